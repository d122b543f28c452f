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
from functools import cached_property
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
        self._memory = HostMemory()
        self.all: list[torch.Tensor] = []
        self._of: list[Optimizer] = []
        for optimizer in self.optimizers:
            self.all += _parameters(optimizer)
            self._of += [optimizer] * (len(self.all) - len(self._of))
        sizes = [local_part(parameter).numel() for parameter in self.all]
        self._starts = list(accumulate(sizes, initial=0))  # of each parameter, and of all elements their end
        self.device = local_part(self.all[0]).device if self.all else _CPU
        # Only a device that check() accepts has streams and events.
        self.side_stream = SideStream(self.device if copies_for(self.device.type) is not None else _CPU)

    def check(self) -> None:
        """Raises Unsupported with the reason if the parameters cannot be healed in passing."""
        if self.given and not self.optimizers:
            raise Unsupported(str(why_whole(self.given[0])))
        if not self.all:
            raise Unsupported("no OptimizerWrapper of this Manager shows which tensors are parameters")
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
                yield from ((optimizer, one) for one in _parameters(optimizer))

    def describes(self, optimizers: Sequence[Optimizer]) -> bool:
        """Whether these are the optimizers, and their parameters have not changed."""
        able = [one for one in optimizers if why_whole(one) is None]
        return self.given == list(optimizers) and self.optimizers == able and not self._changed()

    def _changed(self) -> bool:
        """Whether the parameters, or their order, have changed: parts are ranges of them."""
        present = [parameter for optimizer in self.optimizers for parameter in _parameters(optimizer)]
        return len(present) != len(self.all) or any(a is not b for a, b in zip(present, self.all))

    def check_groups(self) -> None:
        """Raises Unsupported if the parameters, or their order, have changed."""
        if self._changed():
            raise Unsupported("the parameter groups of an optimizer were changed during the heal")

    def prepare(self) -> None:
        """Does what takes long only once and is part of a target's first steps, for which all groups wait:
        loads the kernels of the optimizers, and in host memory uses the pages of the optimizer state that is
        missing.
        """
        self._memory.prepare(
            parameter.numel() * dtype.itemsize
            for parameter, optimizer, dtypes in zip(self.all, self._of, self._state_dtypes)
            if self._maps(parameter) and not optimizer.state.get(parameter)
            for dtype in dtypes
        )

    def release(self) -> None:
        """Frees the memory that is prepared and not used."""
        self._memory = HostMemory()

    @cached_property
    def nbytes(self) -> int:
        """The bytes of the parameters, and of the optimizer state that they have after a step."""
        sizes = [one.itemsize + sum(d.itemsize for d in of) for one, of in zip(self.all, self._state_dtypes)]
        return sum(local_part(one).numel() * size for one, size in zip(self.all, sizes))

    def rest_nbytes(self) -> int:
        """The bytes of the other parameters, and of the optimizer state that they have now."""
        tensors = [
            one
            for optimizer, parameter in self._others()
            for one in (parameter, *optimizer.state.get(parameter, {}).values())
        ]
        return sum(local_part(one).nbytes for one in tensors if isinstance(one, torch.Tensor))

    @cached_property
    def _state_dtypes(self) -> list[list[torch.dtype]]:
        """For each parameter that is trained, the types of its optimizer state that has its layout."""
        found: list[list[torch.dtype]] = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                trained = {p.dtype for p in group["params"] if p.requires_grad}
                of = {dtype: self._rehearse(optimizer, group, dtype) for dtype in trained}
                found += [of[p.dtype] if p.requires_grad else [] for p in group["params"]]
        return found

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

    @cached_property
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

    def _describe(self, begin: int, end: int, of: Callable[[torch.Tensor, int, int], Json]) -> list[Json]:
        """Describes the parameters of a part with their optimizer state: tensors with a range of elements by
        ``of``, that of the parameter itself under the key "", and other values as they are.
        """
        found: list[Json] = []
        for number, first, last in self._ranges(begin, end):
            parameter, described = self.all[number], {"": of(self.all[number], first, last)}
            for key, value in self._of[number].state.get(parameter, {}).items():
                ranged = _alike(value, parameter)
                described[key] = of(value, first, last) if ranged else _plain(key, value, self.device)
            found.append(described)
        return found

    def read(self, begin: int, end: int) -> tuple[Json, torch.Tensor]:
        """Copies a part to new host memory. Returns its description in JSON types, and flat bytes."""
        parts: list[torch.Tensor] = []

        def described(tensor: torch.Tensor, first: int, last: int) -> Json:
            parts.append(_range(tensor, first, last))
            return {"range": dtype_name(tensor.dtype)}

        states = self._describe(begin, end, described)
        # Not from the heap, which would keep as much for each thread that has read a part.
        memory = HostMemory().take(sum(part.numel() for part in parts))
        at = 0
        for part in parts:
            memory[at : at + part.numel()].copy_(part)
            at += part.numel()
        return states, memory

    @torch.no_grad()
    def write(self, begin: int, end: int, states: Json, memory: torch.Tensor) -> None:
        """Puts a part in place, from what :meth:`read` returned. A forward pass may run at the same time: its
        results are not used. ValueError: the description is malformed, or of a part of another size; nothing
        was written.
        """
        parts = iter(memory.split(self.sizes(begin, end, states, memory.numel())))
        for (number, first, last), state in zip(self._ranges(begin, end), states):
            parameter, optimizer = self.all[number], self._of[number]
            for key, value in state.items():
                if key == "":
                    _range(parameter.data, first, last).copy_(next(parts))
                elif _is_range(value):
                    own, dtype = optimizer.state[parameter], dtype_of(value["range"])
                    mine = own.get(key)
                    if not _alike(mine, parameter) or mine.dtype != dtype:
                        mine = own[key] = self._zeros_like(parameter, dtype)
                    _range(mine, first, last).copy_(next(parts))
                else:
                    optimizer.state[parameter][key] = self._located(value)

    def sizes(self, begin: int, end: int, states: Json, nbytes: int) -> list[int]:
        """The sizes in bytes of the ranges of memory of a part with this description. ValueError: the
        description is malformed, or of a part of another size than ``nbytes``.
        """
        ranges, sizes = self._ranges(begin, end), []
        own = [{"range": dtype_name(self.all[number].dtype)} for number, _, _ in ranges]
        if not isinstance(states, list) or [state.get("") for state in states] != own:
            raise ValueError(f"a part of other parameters than the elements {begin} to {end} belong to")
        for (_, first, last), state in zip(ranges, states):
            dtypes = [dtype_of(value["range"]) for value in state.values() if _is_range(value)]
            sizes += [(last - first) * dtype.itemsize for dtype in dtypes]
        if sum(sizes) != nbytes:
            raise ValueError(f"a part of {nbytes} bytes in place of {sum(sizes)}")
        return sizes

    def _located(self, plain: Json) -> Any:
        """A small value of the optimizer state. A tensor on the source's device is on the device here."""
        if not isinstance(plain, dict):
            return plain
        value = torch.tensor(plain["tensor"], dtype=dtype_of(plain["dtype"]), device="cpu")
        on_device = plain["on_device"] and self.device != _CPU
        return self.side_stream.allocated(value.to(self.device)) if on_device else value

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
        found = self._describe(begin, end, _digest)
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

    def step(self, end: int, hyperparameters: Json, only: Optional[Optimizer] = None) -> None:
        """Steps the parameters with elements below ``end``, with their present gradients and with a source's
        :meth:`hyperparameters`.

        The optimizers keep their own hyperparameters until the whole state is loaded. They step aliases of
        the parameters, which share their memory: a step of the parameters is refused before a commit.

        Args:
            end: elements of these parameters that are missing are stepped too; parts will replace them.
            hyperparameters: of all optimizers.
            only: one of several optimizers; None: all of them step.

        Raises:
            Unsupported: the parameters of the optimizers have changed since the start, or a gradient is
                sparse. Nothing was stepped.
        """
        self.check_groups()
        for number, parameter in enumerate(self.all):
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise Unsupported(f"the gradient of parameter {number} is sparse")
        begun = {id(p) for p, start in zip(self.all, self._starts) if start < end or end == self.total}
        for optimizer, given in zip(self.optimizers, hyperparameters, strict=True):
            if only is not None and only is not optimizer:
                continue
            groups: list[dict[str, Any]] = []
            state: State = defaultdict(dict)
            pairs = []
            for group, plain in zip(optimizer.param_groups, given, strict=True):
                aliases = []
                for parameter in group["params"]:
                    if parameter.grad is None or id(parameter) not in begun:
                        continue
                    alias = parameter.data
                    alias.grad = parameter.grad
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
    return isinstance(plain, dict) and "range" in plain


def _digest(tensor: torch.Tensor, begin: int, end: int) -> int:
    size = tensor.element_size()
    return int(digest(tensor, begin * size, end * size).item())


def _plain(key: str, value: Any, device: torch.device = _CPU) -> Json:
    """A hyperparameter, or a small value of the optimizer state, in JSON's types. A tensor is in host memory
    or on this device.
    """
    if isinstance(value, (tuple, list)) and all(isinstance(one, (bool, int, float, str)) for one in value):
        return list(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        small = value.nbytes <= _SMALL and not is_dtensor(value) and not value.is_complex()
        if small and (value.is_cpu or value.device == device):
            dtype = dtype_name(value.dtype)
            return {"tensor": value.tolist(), "dtype": dtype, "on_device": not value.is_cpu}
        kind = f"tensor of shape {list(value.shape)} on {value.device}"
    raise Unsupported(f"{key!r} of the optimizer is a {kind}, which does not go with one parameter")


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def addresses(optimizers: Sequence[Optimizer]) -> set[int]:
    """The addresses of the parameters and their optimizer state, which change only when a step ends."""
    found: set[int] = set()
    for optimizer in optimizers:
        for parameter in _parameters(optimizer):
            values = parameter, *optimizer.state.get(parameter, {}).values()
            tensors = [local_part(value) for value in values if isinstance(value, torch.Tensor)]
            found.update(one.data_ptr() for one in tensors if one.layout == torch.strided)
    return found
