"""Parameters with their optimizer state, in parts: a source reads them, a target puts them in place and steps
them.

The elements of all parameters are numbered through, in memory order. A part is a range of them, with the same
range of each tensor of the optimizer state that has its parameter's layout. Small values of the state, such
as Adam's count of steps, come with each part of their parameter. An optimizer can step such parts
independently only if it computes each element from that element's own parameter, gradient and state, and from
the hyperparameters of its group. That holds for :data:`ELEMENTWISE`, in each form (foreach, fused).

For a DTensor (FSDP2), this module handles only the shard of this rank, which is healed from the same rank of
another group.

Parts travel through host memory. If the parameters are on a device, threads other than the training thread
read and write them within :attr:`Parameters.side_stream`.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from itertools import accumulate
from typing import Any, Optional

import torch
from torch import optim
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from torchft._manager.heal.side_stream import SideStream
from torchft._unvoted import before_step
from torchft.checkpointing.codec.digest import digest, memory_of
from torchft.checkpointing.codec.encoding import dtype_of, is_dtensor
from torchft.checkpointing.codec.layout import local_part
from torchft.checkpointing.memory.host import HostMemory
from torchft.checkpointing.memory.staging import copies_for
from torchft.utils import dtype_name

# Compared by exact type, because a subclass may do anything. Each type is in the table of
# tests/unit/manager/test_tracked.py.
ELEMENTWISE = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop)

_SMALL = 64  # the largest tensor, in bytes, that comes with each part of its parameter
_FEW = 64  # elements of a parameter that stands for others
_CPU = torch.device("cpu")
_ON_DEVICE = "on device"  # ends the description of a small tensor that is on the device of the parameters

Json = Any
State = defaultdict[torch.Tensor, Any]


class Unsupported(Exception):
    """A heal in passing is not possible, for the reason given."""


def why_whole(optimizer: Optimizer) -> Optional[str]:
    """The reason why the parameters of an optimizer cannot be stepped in parts; None if they can."""
    kind = type(optimizer)
    if kind not in ELEMENTWISE:
        known = ", ".join(one.__name__ for one in ELEMENTWISE)
        return f"the optimizer is {kind.__name__}: known to step each element by itself are {known}"
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    before_all = any(hook is not before_step for hook in _global_optimizer_pre_hooks.values())
    if own or before_all or _global_optimizer_post_hooks:
        return f"{kind.__name__} has hooks of its steps, which may change anything"
    return None


class Parameters:
    """The parameters of those optimizers that can step them in parts. The others come with the rest of the
    state.

    Args:
        optimizers: all optimizers, in the same order in each replica group.

    Attributes:
        given: the argument.
        optimizers: those that can step their parameters in parts.
        all: the parameters of these optimizers, which have numbers in this order.
        device: the device of all of them, see :meth:`check`.
        side_stream: orders the work of other threads on that device.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.given = list(optimizers)
        self.optimizers = [one for one in optimizers if why_whole(one) is None]
        # With nesterov=True and foreach=True, PyTorch's SGD adds to the gradients in place.
        self._borrows = not any(
            group.get("nesterov") for one in self.optimizers for group in one.param_groups
        )
        self._memory = HostMemory()
        self._versions: dict[int, int] = {}  # the borrowed gradients' versions when they were kept
        self.all: list[torch.Tensor] = []
        self._of: list[Optimizer] = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                self.all += group["params"]
                self._of += [optimizer] * len(group["params"])
        sizes = [local_part(parameter).numel() for parameter in self.all]
        self._starts = list(accumulate(sizes, initial=0))  # of each parameter, and of all elements their end
        self.device = local_part(self.all[0]).device if self.all else _CPU
        # Only a device that check() accepts has streams and events.
        self.side_stream = SideStream(self.device if copies_for(self.device.type) is not None else _CPU)

    def check(self) -> None:
        """Raises Unsupported with the reason if the parameters cannot be healed in passing."""
        reasons = {id(one): why_whole(one) for one in self.given}
        if self.given and all(reasons.values()):
            raise Unsupported(str(reasons[id(self.given[0])]))
        if not self.all:
            raise Unsupported("no OptimizerWrapper of this Manager shows which tensors are parameters")
        if any((reasons[id(one)] is None) != (one in self.optimizers) for one in self.given):
            raise Unsupported("hooks of an optimizer were changed")
        seen: set[int] = set()
        for number, parameter in enumerate(self.all):
            local = local_part(parameter)
            if type(parameter) not in (torch.Tensor, torch.nn.Parameter) and not is_dtensor(parameter):
                raise Unsupported(f"parameter {number} is a {type(parameter).__name__}, not a plain tensor")
            if local.layout != torch.strided:
                raise Unsupported(f"parameter {number} is not a dense tensor")
            if not local.is_cpu and copies_for(local.device.type) is None:
                raise Unsupported(f"parameter {number} is on {local.device}, on which this is not tested")
            if local.device != self.device:
                raise Unsupported(
                    f"parameter {number} is on {local.device}, and parameter 0 on {self.device}"
                )
            storage = local.untyped_storage()
            padded = is_dtensor(parameter)  # FSDP2 pads the shards of all ranks to equal sizes
            if (storage.nbytes() != local.nbytes and not padded) or (
                storage.data_ptr() in seen and local.nbytes
            ):
                raise Unsupported(f"parameter {number} shares its memory with another tensor")
            seen.add(storage.data_ptr())
        for optimizer, parameter in self._others():
            local = local_part(parameter)
            if local.layout == torch.strided and local.untyped_storage().data_ptr() in seen:
                raise Unsupported(f"{type(optimizer).__name__} steps a parameter of another optimizer")

    def _others(self) -> Iterator[tuple[Optimizer, torch.Tensor]]:
        """Yields the parameters of the optimizers that cannot step them in parts."""
        for optimizer in self.given:
            if optimizer not in self.optimizers:
                yield from ((optimizer, one) for group in optimizer.param_groups for one in group["params"])

    def prepare(self) -> None:
        """Does what takes long only once and is part of a target's first steps, for which all groups wait:
        loads the kernels of the optimizers, and in host memory uses the pages of the optimizer state that is
        missing.
        """
        sizes: list[int] = []
        for optimizer, parameter, found in self._rehearsed():
            if self._maps(parameter) and not optimizer.state.get(parameter):
                sizes += [parameter.numel() * one.itemsize for one in found]
        self._memory.prepare(sizes)

    def nbytes(self) -> int:
        """The bytes of the parameters, and of the optimizer state that they have after a step."""
        state = sum(
            local_part(p).numel() * one.itemsize for _, p, found in self._rehearsed() for one in found
        )
        return state + sum(local_part(parameter).nbytes for parameter in self.all)

    def rest_nbytes(self) -> int:
        """The bytes of the other parameters, and of the optimizer state that they have now."""
        tensors = [
            one
            for optimizer, parameter in self._others()
            for one in (parameter, *optimizer.state.get(parameter, {}).values())
        ]
        return sum(local_part(one).nbytes for one in tensors if isinstance(one, torch.Tensor))

    def _rehearsed(self) -> Iterator[tuple[Optimizer, torch.Tensor, list[torch.dtype]]]:
        """Yields each trained parameter, and the types of its optimizer state that have its layout."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                trained = [parameter for parameter in group["params"] if parameter.requires_grad]
                found = {
                    dtype: self._rehearse(optimizer, group, dtype) for dtype in {p.dtype for p in trained}
                }
                yield from ((optimizer, parameter, found[parameter.dtype]) for parameter in trained)

    def _rehearse(self, optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype) -> list[torch.dtype]:
        """Steps a small parameter of its own. The types of its state that have the parameter's layout."""
        parameter = torch.zeros(_FEW, dtype=dtype, device=self.device)
        parameter.grad = torch.zeros_like(parameter)
        rehearsed = {**group, "params": [parameter]}
        kind: Callable[..., Optimizer] = type(optimizer)
        # Not empty: Adagrad of PyTorch 2.7 makes it before its first step.
        state: State = kind([rehearsed]).state
        _step_with(optimizer, [rehearsed], state)
        return [value.dtype for value in state[parameter].values() if _alike(value, parameter)]

    def check_groups(self) -> None:
        """Raises Unsupported if the parameters, or their order, have changed: parts are ranges of them."""
        present = [
            p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]
        ]
        if len(present) != len(self.all) or any(one is not other for one, other in zip(present, self.all)):
            raise Unsupported("the parameter groups of an optimizer were changed during the heal")

    def layout(self) -> str:
        """A digest of the types of the optimizers and the layouts of the parameters.

        Two groups can exchange parts if their digests are equal.
        """
        lines = [
            f"{type(optimizer).__name__} {[len(g['params']) for g in optimizer.param_groups]}"
            for optimizer in self.optimizers
        ]
        lines += [_line(parameter) for parameter in self.all]
        return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()

    # Hyperparameters

    def hyperparameters(self) -> Json:
        """The values of the optimizers' parameter groups, without the parameters."""
        return [
            [
                {key: _plain(key, value) for key, value in group.items() if key != "params"}
                for group in one.param_groups
            ]
            for one in self.optimizers
        ]

    # Parts

    @property
    def total(self) -> int:
        """Number of elements of all parameters."""
        return self._starts[-1]

    def begun(self, end: int) -> set[int]:
        """Numbers of the parameters with elements below ``end``; in the end these are all parameters."""
        return set(range(len(self.all) if end >= self.total else bisect_left(self._starts, end)))

    def numbers(self, optimizer: Optional[Optimizer]) -> set[int]:
        """Numbers of the parameters of an optimizer."""
        return {number for number, one in enumerate(self._of) if one is optimizer}

    def _ranges(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """The elements from ``begin`` to ``end``: numbers of parameters, and ranges of elements of each."""
        first, starts = bisect_right(self._starts, begin) - 1, self._starts
        if begin >= end:
            return []
        return [
            (
                number,
                max(begin, starts[number]) - starts[number],
                min(end, starts[number + 1]) - starts[number],
            )
            for number in range(first, bisect_left(starts, end))
            if starts[number] < starts[number + 1]
        ]

    def read(self, begin: int, end: int) -> tuple[Json, torch.Tensor]:
        """Copies a part to new host memory. Returns its description in JSON types, and flat bytes."""
        states: list[Json] = []
        parts: list[torch.Tensor] = []
        for number, first, last in self._ranges(begin, end):
            parameter, state = self.all[number], {}
            parts.append(_range(parameter, first, last))
            for key, value in self._of[number].state.get(parameter, {}).items():
                if _alike(value, parameter):
                    state[key] = ["range", dtype_name(value.dtype)]
                    parts.append(_range(value, first, last))
                else:
                    state[key] = _plain(key, value, self.device)
            states.append(state)
        # Not from the heap, which would keep as much for each thread that has read a part.
        memory = HostMemory().take(sum(part.numel() for part in parts))
        at = 0
        for part in parts:
            memory[at : at + part.numel()].copy_(part)
            at += part.numel()
        return states, memory

    @torch.no_grad()
    def write(self, begin: int, end: int, states: Json, memory: torch.Tensor) -> None:
        """Puts a part in place. Another thread may train at the same time, see :meth:`step`.

        Args:
            begin, end: the elements, numbered through all parameters.
            states: the description of the part.
            memory: its bytes.

        Raises:
            ValueError: the description is malformed, or of a part of another size. Nothing was written.
        """
        parts = iter(memory.split(self.sizes(begin, end, states, memory.numel())))
        for (number, first, last), state in zip(self._ranges(begin, end), states):
            parameter = self.all[number]
            _range(parameter.data, first, last).copy_(next(parts))
            own = self._of[number].state[parameter] if state else self._of[number].state.get(parameter, {})
            for key, value in state.items():
                if _is_range(value):
                    dtype = dtype_of(value[1])
                    mine = own.get(key)
                    if not _alike(mine, parameter) or mine.dtype != dtype:
                        mine = own[key] = self._zeros_like(parameter, dtype)
                    _range(mine, first, last).copy_(next(parts))
                else:
                    own[key] = self._located(value)

    def sizes(self, begin: int, end: int, states: Json, nbytes: int) -> list[int]:
        """The sizes in bytes of the ranges of memory of a part with this description. ValueError: the
        description is malformed, or of a part of another size than ``nbytes``.
        """
        ranges = self._ranges(begin, end)
        if not isinstance(states, list) or len(states) != len(ranges):
            raise ValueError(f"a part of other parameters than the elements {begin} to {end} belong to")
        sizes: list[int] = []
        for (number, first, last), state in zip(ranges, states):
            kinds = [dtype_of(value[1]) for value in state.values() if _is_range(value)]
            sizes += [(last - first) * dtype.itemsize for dtype in (self.all[number].dtype, *kinds)]
        if sum(sizes) != nbytes:
            raise ValueError(f"a part of {nbytes} bytes in place of {sum(sizes)}")
        return sizes

    def _located(self, plain: Json) -> Any:
        """A small value of the optimizer state. A tensor on the source's device is on the device here."""
        value = _value(plain)
        if isinstance(plain, list) and plain[-1] == _ON_DEVICE and self.device != _CPU:
            return self.side_stream.allocated(value.to(self.device))
        return value

    def _zeros_like(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Allocates optimizer state. In host memory it is in huge pages, where they are faster: the first
        access to as much memory in small pages would take as much processor time as a few training steps. No
        page is used here: each part uses its own, since the other groups wait for this thread.
        """
        if self.device != _CPU:
            made = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            self.side_stream.allocated(local_part(made))
            return made
        if not self._maps(parameter):
            return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        flat = self._memory.take(parameter.numel() * dtype.itemsize)
        return flat.view(dtype).view(parameter.shape)

    def _maps(self, parameter: torch.Tensor) -> bool:
        """Whether optimizer state of this parameter is in memory of :class:`HostMemory`."""
        plain = self.device == _CPU and not is_dtensor(parameter)
        return plain and parameter.is_contiguous() and parameter.numel() > 0

    def digest(self, begin: int, end: int) -> str:
        """The digest of a part. It equals that of another group if all bits of the two parts are equal."""
        found: list[Json] = []
        for number, first, last in self._ranges(begin, end):
            parameter = self.all[number]
            of: dict[str, Json] = {"": _digest(parameter, first, last)}
            for key, value in self._of[number].state.get(parameter, {}).items():
                of[key] = (
                    _digest(value, first, last)
                    if _alike(value, parameter)
                    else _plain(key, value, self.device)
                )
            found.append(of)
        return hashlib.blake2b(json.dumps(found, sort_keys=True).encode(), digest_size=16).hexdigest()

    def storages(self) -> dict[int, tuple[int, str]]:
        """Maps the address of each tensor's memory to its parameter's number and its key in the optimizer
        state.

        The key of the parameter itself is "". Memory that has more than the tensor, such as that of a padded
        shard, is not among them: its other bytes are not compared.
        """
        found: dict[int, tuple[int, str]] = {}
        for number, parameter in enumerate(self.all):
            state = self._of[number].state.get(parameter, {})
            for key, value in {"": parameter, **state}.items():
                if key != "" and not _alike(value, parameter):
                    continue
                local = local_part(value)
                if 0 < local.nbytes == local.untyped_storage().nbytes():
                    found[local.untyped_storage().data_ptr()] = number, key
        return found

    def storage(self, number: int, key: str) -> torch.UntypedStorage:
        """The memory of a parameter, or of its optimizer state. KeyError: that has no such key."""
        parameter = self.all[number]
        tensor = parameter if key == "" else self._of[number].state[parameter][key]
        return local_part(tensor).untyped_storage()

    # Gradients

    def gradients(self, numbers: set[int], into: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The present gradients of these parameters, as the optimizers would read them.

        A gradient in host memory is borrowed as long as the training loop only drops gradients
        (``zero_grad``). It is copied if its memory is part of a larger buffer, or once the loop was found to
        change gradients in place (:meth:`unchanged`). A gradient on a device is always copied: the replay of
        a CUDA graph writes into it without counting its version up.

        Args:
            numbers: numbers of the parameters.
            into: copies of gradients kept before, see :meth:`copies`: their memory is used again.

        Raises:
            Unsupported: a gradient is sparse.
        """
        kept: dict[int, torch.Tensor] = {}
        for number in numbers:
            gradient = self.all[number].grad
            if gradient is None:
                continue
            _check_dense(number, gradient)
            whole = type(gradient) is torch.Tensor and gradient.untyped_storage().nbytes() == gradient.nbytes
            if self._borrows and whole and gradient.is_cpu:
                self._versions[number] = gradient._version
                kept[number] = gradient
                continue
            copied = into.get(number)
            if copied is None or copied.dtype != gradient.dtype:
                copied = torch.empty_like(gradient)
            kept[number] = copied.copy_(gradient.detach())
        return kept

    def copies(self, kept: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Returns the copies among kept gradients that are not needed any more, and gives back the others."""
        borrowed, self._versions = self._versions, {}
        return {number: gradient for number, gradient in kept.items() if number not in borrowed}

    def present_gradients(self, numbers: set[int]) -> dict[int, torch.Tensor]:
        """The present gradients of these parameters, for use at once. Unsupported: one is sparse."""
        found = {number: gradient for number in numbers if (gradient := self.all[number].grad) is not None}
        for number, gradient in found.items():
            _check_dense(number, gradient)
        return found

    def unchanged(self, kept: dict[int, torch.Tensor]) -> bool:
        """Whether the gradients that are borrowed are unchanged. If not, gradients are copied from now on."""
        same = all(kept[number]._version == version for number, version in self._versions.items())
        self._borrows = self._borrows and same
        return same

    def step(self, numbers: set[int], gradients: dict[int, torch.Tensor], hyperparameters: Json) -> None:
        """Steps only these parameters, with these gradients and with a source's :meth:`hyperparameters`.

        The optimizers keep their own hyperparameters until the whole state is loaded.

        Another thread may train at the same time, and may read old or new values. The optimizer steps
        aliases: tensors that share the parameters' memory, but have their own gradients and versions, so that
        a backward pass does not fail.

        Raises:
            Unsupported: the parameters of the optimizers have changed since the start.
        """
        self.check_groups()
        number = 0
        for optimizer, given in zip(self.optimizers, hyperparameters, strict=True):
            groups: list[dict[str, Any]] = []
            state: State = defaultdict(dict)
            pairs = []
            for group, plain in zip(optimizer.param_groups, given, strict=True):
                aliases = []
                for parameter in group["params"]:
                    gradient = gradients.get(number) if number in numbers else None
                    number += 1
                    if gradient is None:
                        continue
                    alias = parameter.data
                    alias.grad = gradient
                    aliases.append(alias)
                    pairs.append((parameter, alias))
                    if parameter in optimizer.state:
                        state[alias] = optimizer.state[parameter]
                values = {key: self._located(value) for key, value in plain.items()}
                groups.append({**group, **values, "params": aliases})
            if pairs:
                _step_with(optimizer, groups, state)
            for parameter, alias in pairs:
                if alias in state:
                    optimizer.state[parameter] = state[alias]


def _step_with(optimizer: Optimizer, groups: list[dict[str, Any]], state: State) -> None:
    """Steps the parameters of these groups, with this state, in place of the optimizer's own."""
    shadow = copy(optimizer)
    shadow.param_groups, shadow.state = groups, state
    # The method of the class: a learning rate scheduler wraps that of the instance, to count its calls.
    type(optimizer).step(shadow)


def _check_dense(number: int, gradient: torch.Tensor) -> None:
    if gradient.layout != torch.strided:
        raise Unsupported(f"the gradient of parameter {number} is sparse")


def _line(parameter: torch.Tensor) -> str:
    """The layout of a parameter. For a DTensor also its placements, and the layout of this rank's shard."""
    line = f"{parameter.dtype} {list(parameter.shape)} {list(parameter.stride())}"
    if not is_dtensor(parameter):
        return line
    local = local_part(parameter)
    memory = local.storage_offset(), local.untyped_storage().nbytes()
    return f"{line} {parameter.placements} {list(local.shape)} {list(local.stride())} {memory}"  # type: ignore[attr-defined]


def _alike(value: Any, parameter: torch.Tensor) -> bool:
    """Whether both are tensors of the same layout, so that elements at the same place in memory correspond.

    Both are on the same device: Adam's count of steps in host memory is not like a parameter with a single
    number.
    """
    if not isinstance(value, torch.Tensor) or is_dtensor(value) != is_dtensor(parameter):
        return False
    mine, other = local_part(value), local_part(parameter)
    return (
        value.shape == parameter.shape
        and mine.device == other.device
        and mine.shape == other.shape
        and mine.stride() == other.stride()
        and mine.untyped_storage().nbytes() == mine.nbytes
    )


def _range(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    size = tensor.element_size()
    return memory_of(tensor)[begin * size : end * size]


def _is_range(plain: Json) -> bool:
    return isinstance(plain, list) and plain[0] == "range"


def _digest(tensor: torch.Tensor, begin: int, end: int) -> int:
    size = tensor.element_size()
    return int(digest(tensor, begin * size, end * size).item())


def _plain(key: str, value: Any, device: torch.device = _CPU) -> Json:
    """A small value of the optimizer state, in JSON's types. A tensor is in host memory or on this device."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple) and all(isinstance(one, (int, float)) for one in value):
        return ["tuple", *value]
    small = isinstance(value, torch.Tensor) and not is_dtensor(value) and value.nbytes <= _SMALL
    if small and (value.is_cpu or value.device == device):
        plain = [
            "tensor",
            dtype_name(value.dtype),
            list(value.shape),
            memory_of(value.cpu()).numpy().tobytes().hex(),
        ]
        return plain if value.is_cpu else [*plain, _ON_DEVICE]
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return ["names", *value]
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        kind = f"tensor of shape {list(value.shape)} on {value.device}"
    raise Unsupported(f"{key!r} of the optimizer is a {kind}, which does not go with one parameter")


def _value(plain: Json) -> Any:
    if not isinstance(plain, list):
        return plain
    kind, *rest = plain
    if kind == "tuple":
        return tuple(rest)
    if kind == "names":
        return rest
    if kind == "tensor":
        name, shape, raw, *_ = rest
        flat = torch.frombuffer(bytearray(bytes.fromhex(raw)), dtype=torch.uint8)
        return flat.view(dtype_of(name)).reshape(shape).clone()
    raise ValueError(f"a value of kind {kind!r}")
