"""An operation on its way to the worker: its tensors as registered memory, its options as bytes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Optional, Sequence

import torch
from torch.distributed import ReduceOp

from torchft.process_group._timeout import given_timeout
from torchft.process_group.isolated import protocol
from torchft.process_group.isolated.devices import Devices
from torchft.process_group.isolated.sharing import Registration
from torchft.utils import refuse_capture


class Call:
    """One operation, made by :func:`made_call`.

    Attributes:
        parts: the bytes that the worker reads.
        registrations: (device, registration) of every tensor.
        result: value of the operation's future.
        seconds: timeout of the operation.
        stream: the current stream; None if there are only CPU tensors.
    """

    __slots__ = ("_devices", "on_device", "parts", "registrations", "result", "seconds", "stream")

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self.parts: list[bytes] = []
        self.registrations: list[tuple[int, Registration]] = []
        self.result: list[torch.Tensor] = []
        self.seconds = 0.0
        self.on_device = False
        self.stream: Optional[torch.Stream] = None

    def add(self, name: str, arguments: Sequence[Any], access: Optional[str]) -> None:
        """Encodes the operation and its arguments as `protocol.OPERATIONS` defines them; tensors are registered."""
        parts = self.parts
        parts.append(protocol.code(name))
        for kind, argument in zip(protocol.OPERATIONS[name], arguments):
            if type(kind) is tuple:
                parts.append(self.register(kind[0], argument, access or kind[1]))
            elif type(kind) is str:
                parts.append(protocol.integer(argument) if kind == "integer" else protocol.integers(argument))
            else:
                if type(argument) is not tuple:
                    argument = protocol.options(kind() if argument is None else argument)
                parts.append(argument[0])
                self.seconds = argument[1]

    def register(self, kind: str, argument: Any, access: str) -> bytes:
        read, write = "r" in access, "w" in access
        if kind == "tensors":
            return protocol.tensors(self._lend(argument, read, write))
        if kind == "tensor":
            return protocol.tensor(self._lend((argument,), read, write)[0])
        return protocol.lists([self._lend(tensors, read, write) for tensors in argument])

    def _lend(self, tensors: Sequence[torch.Tensor], read: bool, write: bool) -> list[protocol.Item]:
        items = []
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{tensor!r} is no tensor")
            # Cheaper than reading the device's type.
            device = 0 if tensor.is_cpu else self._device_of(tensor)
            registration = self._devices.sharing(device).register(tensor, read, write)
            self.registrations.append((device, registration))
            items.append((device, registration.ref))
        return items

    def _device_of(self, tensor: torch.Tensor) -> int:
        kind = tensor.device.type
        if kind not in protocol.DEVICES:
            raise RuntimeError(f"a tensor on {tensor.device} is not supported")
        self.on_device = True
        return protocol.DEVICES.index(kind)

    def release(self) -> None:
        for _, registration in self.registrations:
            registration.release()


def made_call(
    devices: Devices, group: str, name: str, arguments: Sequence[Any], access: Optional[str], timeout: timedelta
) -> Call:
    """Encodes an operation to be sent.

    Args:
        devices: the devices that register the tensors.
        group: name of the group, for errors.
        name: name of the operation, see `protocol.OPERATIONS`.
        arguments: the arguments of PyTorch's method of that name.
        access: which tensors the operation reads and writes, if that differs from `protocol.OPERATIONS`.
        timeout: the group's timeout.

    Raises:
        Exception: the operation cannot be sent; no tensor is registered then.
    """
    call = Call(devices)
    try:
        try:
            call.add(name, arguments, access)
        except Exception as e:
            # so that the error names the group and the operation
            kind = type(e) if type(e) in (TypeError, ValueError, NotImplementedError) else RuntimeError
            raise kind(f"{group}: {name}: {e}") from e
        if call.on_device:
            refuse_capture(f"{group}: {name}")
    except Exception:
        call.release()
        raise
    if call.seconds <= 0:
        call.seconds = (given_timeout() or timeout).total_seconds()
    if call.registrations:
        call.result = flat(arguments[0])
    if call.on_device:
        call.stream = torch.accelerator.current_stream()
    return call


def flat(outputs: Any) -> list[torch.Tensor]:
    """The value of an operation's future, the same as with Gloo: its outputs, one after another."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    return [tensor for item in outputs for tensor in (item if isinstance(item, (list, tuple)) else (item,))]


# Encoded options whose only field is the reduction, by the id() of a constant such as ReduceOp.SUM. The constants are
# never freed, so their ids are not reused.
_BARE: dict[tuple[int, type], tuple[bytes, float]] = {}


def reduction(opts: Any, kind: type) -> Any:
    """Returns options whose only field is the reduction, given other options or a reduction."""
    if type(opts) is kind:
        return opts
    made: Any = kind()
    if hasattr(opts, "reduceOp"):
        made.reduceOp = opts.reduceOp
        made.timeout = opts.timeout
        return made
    made.reduceOp = opts
    return made


def encoded_reduction(op: Any, kind: type) -> Any:
    """The encoding of `reduction`, cached for ReduceOp's constants, which most callers pass."""
    if type(op) is not ReduceOp.RedOpType:
        return reduction(op, kind)
    known = _BARE.get((id(op), kind))
    if known is None:
        known = protocol.options(reduction(op, kind))
        if any(op is constant for constant in vars(ReduceOp).values()):
            _BARE[id(op), kind] = known
    return known
