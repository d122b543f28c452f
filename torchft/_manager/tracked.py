"""Parameters with their optimizer state, in pieces: read at a source, put in place and stepped along at a target.

A piece is a range of elements of a parameter, in memory order, and the same range of each tensor of its optimizer state
that has the parameter's layout. Small values of the state, such as Adam's count of steps, are part of each piece. Such
pieces can be stepped one by one only if the optimizer computes each element from that element's own parameter, gradient
and state and the hyperparameters of its group. That holds for :data:`ELEMENTWISE`, in each form (foreach, fused).

Of a DTensor (FSDP2) only the part of this rank is meant everywhere: it is healed from the same rank of another group.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import optim
from torch.optim import Optimizer

from torchft._manager.digest import digest, memory_of
from torchft.checkpointing._encoding import dtype_name, dtype_of, is_dtensor
from torchft.checkpointing._memory import HostMemory
from torchft.checkpointing._places import local_part

# By exact type: a subclass may do anything. Each is in the table of tests/unit/manager/test_tracked.py.
ELEMENTWISE = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop)

_SMALL = 64  # the most bytes of a tensor that becomes part of each piece

Json = Any


class Unfit(Exception):
    """Why a heal piece by piece is not possible."""


class Parameters:
    """The parameters of some optimizers.

    Args:
        optimizers: in the same order in each group.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._borrows = True
        self._memory = HostMemory()
        self._versions: dict[int, int] = {}  # of borrowed gradients, when they were kept
        self.all: list[torch.Tensor] = []
        self._of: list[Optimizer] = []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                self.all += group["params"]
                self._of += [optimizer] * len(group["params"])

    def check(self) -> None:
        """Raises Unfit with the reason if these cannot be healed piece by piece."""
        if not self.all:
            raise Unfit("no OptimizerWrapper of this Manager shows which tensors are parameters")
        for optimizer in self._optimizers:
            kind = type(optimizer)
            if kind not in ELEMENTWISE:
                known = ", ".join(one.__name__ for one in ELEMENTWISE)
                raise Unfit(f"the optimizer is {kind.__name__}: known to step each element by itself are {known}")
            if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
                raise Unfit(f"{kind.__name__} has hooks of its steps, which may change anything")
        seen: set[int] = set()
        for number, parameter in enumerate(self.all):
            local = local_part(parameter)
            if type(parameter) not in (torch.Tensor, torch.nn.Parameter) and not is_dtensor(parameter):
                raise Unfit(f"parameter {number} is a {type(parameter).__name__}, not a plain tensor")
            if local.layout != torch.strided:
                raise Unfit(f"parameter {number} is not a dense tensor")
            if not local.is_cpu:
                raise Unfit(f"parameter {number} is on {local.device}; only memory of the host is healed so")
            storage = local.untyped_storage()
            padded = is_dtensor(parameter)  # FSDP2 lets the shards of all ranks take equal amounts of memory
            if (storage.nbytes() != local.nbytes and not padded) or (storage.data_ptr() in seen and local.nbytes):
                raise Unfit(f"parameter {number} shares its memory with another tensor")
            seen.add(storage.data_ptr())

    def check_groups(self) -> None:
        """Raises Unfit if the optimizers have other parameters than at first, or the same in another order: a piece is
        known by its parameter's number.
        """
        present = [p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]]
        if len(present) != len(self.all) or any(one is not other for one, other in zip(present, self.all)):
            raise Unfit("the parameter groups of an optimizer were changed during the heal")

    def sizes(self) -> list[int]:
        """Elements of each parameter."""
        return [local_part(parameter).numel() for parameter in self.all]

    def layout(self) -> str:
        """A digest of the kinds of optimizers and the layout of parameters: pieces fit groups with the same digest."""
        lines = [
            f"{type(optimizer).__name__} {[len(g['params']) for g in optimizer.param_groups]}"
            for optimizer in self._optimizers
        ]
        lines += [_line(parameter) for parameter in self.all]
        return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()

    # Hyperparameters

    def hyperparameters(self) -> Json:
        """The values of the optimizers' parameter groups, without the parameters."""
        return [
            [{key: _plain(key, value) for key, value in group.items() if key != "params"} for group in one.param_groups]
            for one in self._optimizers
        ]

    def set_hyperparameters(self, given: Json) -> None:
        """Sets what :meth:`hyperparameters` gave."""
        for optimizer, groups in zip(self._optimizers, given, strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                for key, value in values.items():
                    if key == "params":
                        raise ValueError("a hyperparameter named params")
                    group[key] = _value(value)

    # Pieces

    def read(self, number: int, begin: int, end: int) -> tuple[Json, list[torch.Tensor]]:
        """A copy of a piece: its description, and the memory of its ranges."""
        parameter = self.all[number]
        parts = [_range(parameter, begin, end).clone()]
        state: dict[str, Json] = {}
        for key, value in self._of[number].state.get(parameter, {}).items():
            if _alike(value, parameter):
                state[key] = ["range", dtype_name(value.dtype)]
                parts.append(_range(value, begin, end).clone())
            else:
                state[key] = _plain(key, value)
        return state, parts

    def bytes_of(self, number: int, begin: int, end: int, state: Json) -> list[int]:
        """The lengths in bytes of the ranges of a piece with this description.

        Raises:
            ValueError: it is malformed.
        """
        if not isinstance(state, dict):
            raise ValueError(f"optimizer state that is {type(state).__name__}")
        count = end - begin
        kinds = [dtype_of(value[1]) for value in state.values() if isinstance(value, list) and value[0] == "range"]
        return [count * dtype.itemsize for dtype in (self.all[number].dtype, *kinds)]

    @torch.no_grad()
    def write(self, number: int, begin: int, end: int, state: Json, raw: torch.Tensor) -> None:
        """Puts a piece in place. Another thread may train meanwhile, see :meth:`step`.

        Args:
            number, begin, end: of the piece.
            state: its description.
            raw: the memory of its ranges, one after the other.
        """
        parameter = self.all[number]
        ranges = list(raw.split(self.bytes_of(number, begin, end, state)))
        _range(parameter.data, begin, end).copy_(ranges.pop(0))
        own = self._of[number].state[parameter] if state else self._of[number].state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, list) and value[0] == "range":
                dtype = dtype_of(value[1])
                mine = own.get(key)
                if not _alike(mine, parameter) or mine.dtype != dtype:
                    mine = own[key] = self._zeros_like(parameter, dtype)
                _range(mine, begin, end).copy_(ranges.pop(0))
            else:
                own[key] = _value(value)

    def _zeros_like(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Memory for optimizer state, in huge pages where the system has them: the first use of small ones would take
        as much processor time as the training of some steps.
        """
        if is_dtensor(parameter) or not parameter.is_contiguous() or not parameter.numel():
            return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        flat = self._memory.take(parameter.numel() * dtype.itemsize)
        return flat.zero_().view(dtype).view(parameter.shape)

    def digest(self, number: int, begin: int, end: int) -> Json:
        """The digests of a piece, to compare with another group's: equal if all bits are equal."""
        parameter = self.all[number]
        found: dict[str, Json] = {"": _digest(parameter, begin, end)}
        for key, value in self._of[number].state.get(parameter, {}).items():
            if _alike(value, parameter):
                found[key] = _digest(value, begin, end)
            else:
                found[key] = _plain(key, value)
        return found

    def storages(self) -> dict[int, tuple[int, str]]:
        """By address of a tensor's memory: its parameter's number, and its key in the optimizer state ("": itself)."""
        found: dict[int, tuple[int, str]] = {}
        for number, parameter in enumerate(self.all):
            state = self._of[number].state.get(parameter, {})
            for key, value in {"": parameter, **state}.items():
                if (key == "" or _alike(value, parameter)) and local_part(value).nbytes:
                    found[local_part(value).untyped_storage().data_ptr()] = number, key
        return found

    def storage(self, number: int, key: str) -> torch.UntypedStorage:
        """The memory of a parameter, or of a tensor of its optimizer state.

        Raises:
            KeyError: there is none of this name.
        """
        parameter = self.all[number]
        tensor = parameter if key == "" else self._of[number].state[parameter][key]
        return local_part(tensor).untyped_storage()

    # Gradients

    def gradients(self, numbers: set[int], into: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The present gradients of these parameters, as the optimizers would read them.

        They are borrowed where the training loop drops them (``zero_grad``), and copied where it was found to change
        them (:meth:`unchanged`), or their memory is part of a buffer.

        Args:
            numbers: of the parameters.
            into: what was kept before; the memory of copies is reused.

        Raises:
            Unfit: a gradient is sparse.
        """
        kept: dict[int, torch.Tensor] = {}
        borrowed, self._versions = self._versions, {}
        for number in numbers:
            gradient = self.all[number].grad
            if gradient is None:
                continue
            _check_dense(number, gradient)
            whole = type(gradient) is torch.Tensor and gradient.untyped_storage().nbytes() == gradient.nbytes
            if self._borrows and whole:
                self._versions[number] = gradient._version
                kept[number] = gradient
                continue
            copied = None if number in borrowed else into.get(number)
            if copied is None or copied.dtype != gradient.dtype:
                copied = torch.empty_like(gradient)
            kept[number] = copied.copy_(gradient.detach())
        return kept

    def present_gradients(self, numbers: set[int]) -> dict[int, torch.Tensor]:
        """The present gradients of these parameters themselves, to be applied at once.

        Raises:
            Unfit: a gradient is sparse.
        """
        found = {number: gradient for number in numbers if (gradient := self.all[number].grad) is not None}
        for number, gradient in found.items():
            _check_dense(number, gradient)
        return found

    def unchanged(self, kept: dict[int, torch.Tensor]) -> bool:
        """Whether what :meth:`gradients` gave is what it was. If not, gradients are copied from now on."""
        same = all(kept[number]._version == version for number, version in self._versions.items())
        self._borrows = self._borrows and same
        return same

    def step(self, numbers: set[int], gradients: dict[int, torch.Tensor], hyperparameters: Json) -> None:
        """Steps these parameters with these gradients, and no others.

        Another thread may train meanwhile, with values of either kind: what is stepped are tensors with the parameters'
        memory, but with separate gradients and versions, so that a backward pass does not fail.

        Raises:
            Unfit: the optimizers have other parameters than at first.
        """
        self.check_groups()
        self.set_hyperparameters(hyperparameters)
        number = 0
        for optimizer in self._optimizers:
            shadow = copy(optimizer)
            shadow.param_groups, shadow.state = [], defaultdict(dict)
            pairs = []
            for group in optimizer.param_groups:
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
                        shadow.state[alias] = optimizer.state[parameter]
                shadow.param_groups.append({**group, "params": aliases})
            # The class's method, not the instance's: a learning rate scheduler wraps the latter to count its calls.
            type(optimizer).step(shadow)
            for parameter, alias in pairs:
                if alias in shadow.state:
                    optimizer.state[parameter] = shadow.state[alias]


def _check_dense(number: int, gradient: torch.Tensor) -> None:
    if gradient.layout != torch.strided:
        raise Unfit(f"the gradient of parameter {number} is sparse")


def _line(parameter: torch.Tensor) -> str:
    """The layout of a parameter; of a DTensor also how it is sharded, and the memory of this rank's part."""
    line = f"{parameter.dtype} {list(parameter.shape)} {list(parameter.stride())}"
    if not is_dtensor(parameter):
        return line
    local = local_part(parameter)
    memory = local.storage_offset(), local.untyped_storage().nbytes()
    return f"{line} {parameter.placements} {list(local.shape)} {list(local.stride())} {memory}"  # type: ignore[attr-defined]


def _alike(value: Any, parameter: torch.Tensor) -> bool:
    """Whether both are tensors of the same layout, so that elements at the same place in memory correspond."""
    if not isinstance(value, torch.Tensor) or is_dtensor(value) != is_dtensor(parameter):
        return False
    mine, other = local_part(value), local_part(parameter)
    return (
        value.shape == parameter.shape
        and mine.shape == other.shape
        and mine.stride() == other.stride()
        and mine.untyped_storage().nbytes() == mine.nbytes
    )


def _range(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    size = tensor.element_size()
    return memory_of(tensor)[begin * size : end * size]


def _digest(tensor: torch.Tensor, begin: int, end: int) -> int:
    size = tensor.element_size()
    return int(digest(tensor, begin * size, end * size).item())


def _plain(key: str, value: Any) -> Json:
    """A small value of the optimizer state, in JSON's types."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple) and all(isinstance(one, (int, float)) for one in value):
        return ["tuple", *value]
    if isinstance(value, torch.Tensor) and value.nbytes <= _SMALL and value.is_cpu and not is_dtensor(value):
        raw = memory_of(value).numpy().tobytes()
        return ["tensor", dtype_name(value.dtype), list(value.shape), raw.hex()]
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return ["names", *value]
    kind = f"tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise Unfit(f"{key!r} of the optimizer is a {kind}, which does not go with one parameter")


def _value(plain: Json) -> Any:
    if not isinstance(plain, list):
        return plain
    kind, *rest = plain
    if kind == "tuple":
        return tuple(rest)
    if kind == "names":
        return rest
    if kind == "tensor":
        name, shape, raw = rest
        flat = torch.frombuffer(bytearray(bytes.fromhex(raw)), dtype=torch.uint8)
        return flat.view(dtype_of(name)).reshape(shape).clone()
    raise ValueError(f"a value of kind {kind!r}")
