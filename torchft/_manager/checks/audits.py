"""Compares the gradient of one unit between all groups before the vote, in some steps (docs/divergence.md).

audit.py decides which unit, and who is wrong. The loader gives the unit to this rank, and surrounds its
passes with :meth:`Audits.measured`; the Manager reduces the table of :meth:`Audits.table` with the vote.
"""

from __future__ import annotations

import math
import random
import socket
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch.nn.modules.batchnorm import _NormBase

from torchft._agreement import AUDITS, KEEPS, announced
from torchft._manager.checks.audit import MOST_TRIES, PROJECTIONS, WORDS, Row, due, judge
from torchft._manager.checks.divergence import header, unlike
from torchft.checkpointing.codec.digest import combine, digest
from torchft.checkpointing.codec.layout import local_part

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from torchft._manager.checks.audit import Corruption
    from torchft._manager.observe.log import _ManagerLogger
    from torchft._manager.quorum.plan import Plan
    from torchft._manager.step.step import Step
    from torchft._manager.step.work import _ManagedWork

_VERSION = 1  # of the choice and of the rows: groups compare only if they announce the same one
_WIDTH = 4096  # elements after which the directions of projections repeat
_SHOWN = 4  # samples and groups in a message


class CorruptedGradient(RuntimeError):
    """The groups have different gradients of the same unit: the step is not committed, and the rank that is
    wrong ends.
    """


class Audits:
    """The audits of one rank.

    Args:
        rate: the part of the steps that are audited; 0: none is.
        group_rank: of this rank.
        optimizers: those that read the gradients, as far as the Manager knows them.
        logger: the Manager's logger.

    Attributes:
        on: whether any step is audited.
        announces: the announcement of this rank to the other groups; empty: none.
    """

    def __init__(
        self,
        rate: float,
        group_rank: int,
        optimizers: Sequence[Optimizer],
        logger: _ManagerLogger,
    ) -> None:
        self.on = rate > 0
        self._rate = rate
        self._group_rank = group_rank
        self._optimizers = optimizers
        self._logger = logger
        self._mine = f"{_VERSION}/{rate!r}"
        self.announces = f"{self._mine} {socket.gethostname()}" if self.on else ""
        self._checked: tuple[Any, ...] = ()  # the models
        self._said: set[str] = set()  # why gradients are not compared
        self._due: Optional[Step] = None  # the audited attempt
        self._number = 0  # of its step
        self._tries = (-1, 0)  # a step, and the number of attempts at it without a majority
        self._indices: Sequence[int] = ()
        self._gradients: Optional[_Gradients] = None
        self._sent: Optional[tuple[Plan, torch.Tensor, _ManagedWork]] = None
        self._wrong: Optional[CorruptedGradient] = None  # why this rank ends

    # In a step

    def begin(self, step: Step, plan: Plan, number: int, seed: int) -> bool:
        """Begins an attempt at a step. Returns whether it is audited, which is the same in all groups.

        Args:
            step, plan: the attempt and its quorum.
            number: of the step.
            seed: of the loader.
        """
        self._due, self._number, self._indices, self._gradients, self._sent = None, number, (), None, None
        if not due(number, self._rate, seed):
            return False
        why = self._why_not(plan)
        if why:
            self._say(why)
        # A group that keeps gradients computes some units only. All groups of the quorum decide alike.
        if why or any(announced(handle, KEEPS) for handle in plan.handles):
            return False
        self._due = step
        # A wrong group that loses its peers, because they have seen the difference, does not know that it is
        # wrong: gradients that it keeps would count in the next attempt.
        step.inputs.refuse("its gradients are audited")
        return True

    def _why_not(self, plan: Plan) -> str:
        theirs = [announced(handle, AUDITS).partition(" ")[0] for handle in plan.handles]
        if theirs != [self._mine] * plan.replica_world_size:
            others = [name for name, each in zip(plan.replica_ids, theirs) if each != self._mine]
            others += plan.without_handles
            if plan.replica_ids[plan.replica_rank] in others:
                return "the process group of this group cannot announce the rate to the others"
            return f"{', '.join(others)} have another rate or none"
        return "one group takes part" if plan.participants < 2 else ""

    def _say(self, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            self._logger.warn(f"audit={self._rate:g}: gradients are not compared: {why}")

    def check(self, models: tuple[Any, ...]) -> bool:
        """Raises a ValueError unless the gradients of a unit are those of these models, and complete. Returns
        whether the models are new: then their buffers are to be checked, too.
        """
        if models and self._checked == models:
            return False
        known = {id(parameter) for model in models for parameter in model.parameters()}
        stepped = (p for each in self._optimizers for group in each.param_groups for p in group["params"])
        if not models or any(id(p) not in known for p in stepped if p.requires_grad):
            raise ValueError(
                f"audit={self._rate:g}: accumulate() did not get all models whose gradients the optimizers "
                "read: those of a unit that another group counts have to be discarded"
            )
        self._checked = models
        return True

    @contextmanager
    def unchanged(self, models: tuple[Any, ...]) -> Iterator[None]:
        """Surrounds the passes of a unit. Raises a ValueError if they change a buffer on which gradients may
        depend: groups have different ones, as they compute different units.
        """
        before = _buffers(models)
        yield
        after = _buffers(models)
        changed = [name for name in after if before.get(name) != after[name]]
        if changed:
            raise ValueError(
                f"audit={self._rate:g}: the forward pass of a unit changes the buffer {changed[0][1]}: the "
                "gradients of healthy groups would differ, because each computes other units. Give audit=0; "
                "only the buffers of PyTorch's batch and instance norms may change"
            )

    @contextmanager
    def measured(self, models: tuple[Any, ...], indices: Sequence[int], discard: bool) -> Iterator[None]:
        """Surrounds the passes of the audited unit.

        Args:
            models: all whose gradients the optimizer reads.
            indices: the samples of the unit.
            discard: whether another group counts it. Then its gradients are not accumulated, and buffers, as
                those of a batch norm, are left as they were.
        """
        parameters = list(dict.fromkeys(p for m in models for p in m.parameters() if p.requires_grad))
        without = [p for p in parameters if p.grad is None]
        buffers = [(b, b.clone()) for model in models for b in model.buffers()] if discard else []
        exact = _deterministic() and not torch.backends.cudnn.benchmark
        gradients = _Gradients(parameters, discard, exact)
        places = {id(parameter): place for place, parameter in enumerate(parameters)}
        hooks = [p.register_hook(partial(gradients.take, place)) for place, p in enumerate(parameters)]
        hooks += [model.register_forward_pre_hook(gradients.note_precision) for model in models]
        # FSDP2 computes with other parameters, of which it reduces the gradients of all units at once.
        sharded = [each for model in models for each in _sharded(model, places)]
        hooks += [
            module.register_forward_pre_hook(partial(gradients.hook, owned, hooks))
            for module, owned in sharded
        ]
        try:
            with self.unchanged(models):
                yield
            for module, owned in sharded:
                if owned and id(module) not in gradients.passed:
                    raise ValueError(
                        f"audit={self._rate:g}: {type(module).__name__}, a module of FSDP2, was not called "
                        "in a unit, so gradients of its parameters may count twice: call it, or give audit=0"
                    )
        finally:
            for hook in hooks:
                hook.remove()
            if discard:
                for parameter in without:
                    parameter.grad = None
                with torch.no_grad():
                    for buffer, before in buffers:
                        buffer.copy_(before)
        self._gradients, self._indices = gradients, indices

    def table(self, step: Step, device: torch.device) -> Optional[torch.Tensor]:
        """A row for each group of the quorum, all of which are added up: this group fills in its own. None if
        the step is not audited.
        """
        if self._due is not step or step.plan is None:
            return None
        table = torch.zeros(step.plan.replica_world_size, WORDS, dtype=torch.int64)
        if self._gradients is not None:
            tries = self._tries[1] if self._tries[0] == self._number else 0
            row = self._gradients.row(tries)
            table[step.plan.replica_rank] = torch.tensor(row.words, dtype=torch.int64)
        return table.to(device)

    def sent(self, step: Step, table: torch.Tensor, work: Optional[_ManagedWork]) -> None:
        """Notes the reduction of the table; None: it could not begin."""
        if step.plan is not None and work is not None:
            self._sent = step.plan, table, work

    def verify(self, step: Step) -> None:
        """Raises CorruptedGradient if the step must not be committed. Also after an error: the first group
        that has seen the difference counts as failed for the others.
        """
        sent, self._sent = self._sent, None
        if sent is None or not sent[2].wait():
            return
        plan, rows = sent[0], {rank: Row.of(words) for rank, words in enumerate(sent[1].tolist())}
        others = [plan.replica_ids[rank] for rank in unlike(rows)]
        if others:
            self._say(f"{', '.join(others)} have other kernels or parameters than most groups")
        found = judge(rows)
        if found is None:
            return
        text = self._describe(found, plan, rows)
        groups = [plan.replica_ids[rank] for rank in found.wrong]
        self._logger.audit_event(text, groups, found.certain, reports=self._gradients is not None)
        if not found.certain:
            self._tries = self._number, found.tries
        if found.fails:
            error = CorruptedGradient(text)
            if found.certain and plan.replica_rank in found.wrong:
                self._wrong = error
            raise error

    def check_ends(self) -> None:
        """Raises CorruptedGradient if this rank has been found to be wrong."""
        if self._wrong is not None:
            raise self._wrong

    def _describe(self, found: Corruption, plan: Plan, rows: dict[int, Row]) -> str:
        samples = ", ".join(map(str, self._indices[:_SHOWN])) + (", …" if len(self._indices) > _SHOWN else "")
        named = [
            f"{plan.replica_ids[rank]} (rank {self._group_rank} on "
            f"{announced(plan.handles[rank], AUDITS).partition(' ')[2]}, {rows[rank].digest % 2**64:016x})"
            for rank in found.wrong[:_SHOWN]
        ]
        named += [f"{len(found.wrong) - _SHOWN} more"] if len(found.wrong) > _SHOWN else []
        who = f"step {self._number}, samples {samples}: the gradient of {', '.join(named)}"
        if found.certain:
            right = rows[found.first].digest % 2**64
            return f"{who} is not that of most groups ({right:016x}): it ends, and the step is made again"
        what = "made again" if found.fails else "committed"
        tries = f"attempt {found.tries} of {MOST_TRIES}"
        return f"{who} differ, and no majority shows which is right: the step is {what} ({tries})"


class _Gradients:
    """The gradients of one unit: what identifies them, without the tensors.

    Args:
        parameters: in the same order in all groups.
        discard: whether they are replaced by zeros.
        exact: whether their bits are compared.

    Attributes:
        passed: ids of the FSDP2 modules that were called.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], discard: bool, exact: bool) -> None:
        self._parameters = parameters
        self._discard = discard
        self._exact = exact
        # By parameter: digests, or norm and projections.
        self._found: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._dtypes = {parameter.dtype for parameter in parameters}
        self.passed: set[int] = set()
        self._whole = {id(parameter) for parameter in parameters}  # that have a hook

    def note_precision(self, module: Any, inputs: Any) -> None:
        """A hook of a model's forward pass: with autocast gradients are no more exact than its dtype."""
        device = self._parameters[0].device.type if self._parameters else "cpu"
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            self._dtypes.add(torch.get_autocast_dtype(device))

    def hook(self, owned: Sequence[tuple[Any, str, int]], hooks: list[Any], module: Any, inputs: Any) -> None:
        """A hook of an FSDP2 module's forward pass, in which its parameters are whole.

        Args:
            owned: the modules and names of its parameters, and their places.
            hooks: gets those of the whole parameters.
        """
        self.passed.add(id(module))
        for owner, name, place in owned:
            whole = owner._parameters[name]
            if id(whole) not in self._whole:  # activation checkpointing repeats the pass
                self._whole.add(id(whole))
                hooks.append(whole.register_hook(partial(self.take, place)))

    @torch.no_grad()
    def take(self, place: int, gradient: torch.Tensor) -> Optional[torch.Tensor]:
        """A hook of the parameter at this place. It is called before the gradient is accumulated."""
        local = local_part(gradient.coalesce().values() if gradient.is_sparse else gradient)
        self._dtypes.add(gradient.dtype)
        self._found[place].append(digest(local) if self._exact else _sums(local))
        return torch.zeros_like(gradient) if self._discard else None

    def row(self, tries: int) -> Row:
        """Waits for the devices."""
        devices = sorted({_kernels(parameter.device) for parameter in self._parameters})
        lines = [f"{p.dtype} {tuple(p.shape)}" for p in self._parameters]
        kind = header([torch.__version__, str(self._exact), *devices, *lines], 0)
        found = [self._found[place] for place in sorted(self._found)]
        if self._exact:
            bits = int(combine([combine(each) for each in found]).item()) if found else 0
            return Row(kind, tries, bits, 0.0, (0.0,) * (1 + PROJECTIONS))
        none = torch.zeros(1 + PROJECTIONS, dtype=torch.float64)
        sums = torch.stack([none, *(each.cpu() for of_one in found for each in of_one)]).sum(0)
        sums[0].sqrt_()
        bound = math.sqrt(max((torch.finfo(dtype).eps for dtype in self._dtypes), default=0.0))
        return Row(kind, tries, int(digest(sums).item()), bound, tuple(sums.tolist()))


def _sharded(model: Any, places: dict[int, int]) -> list[tuple[Any, list[tuple[Any, str, int]]]]:
    """The FSDP2 modules of a model, each with the modules, names and places of the parameters that it makes
    whole for its forward pass.
    """
    found: list[tuple[Any, list[tuple[Any, str, int]]]] = []

    def walk(module: Any, owned: list[tuple[Any, str, int]]) -> None:
        if hasattr(module, "set_requires_gradient_sync"):
            owned = []
            found.append((module, owned))
        owned += [
            (module, name, places[id(parameter)])
            for name, parameter in module._parameters.items()
            if id(parameter) in places
        ]
        for child in module.children():
            walk(child, owned)

    walk(model, [])
    return found


def _buffers(models: tuple[Any, ...]) -> dict[tuple[int, str], int]:
    """Digests of the buffers on which gradients may depend. Those of a norm are read only once they no more
    change, in evaluation mode.
    """
    return {
        (number, f"{f'{path}.{name}'.lstrip('.')!r} of {type(module).__name__}"): int(digest(buffer))
        for number, model in enumerate(models)
        for path, module in model.named_modules()
        if not isinstance(module, _NormBase)
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.layout is torch.strided
    }


def _deterministic() -> bool:
    """Whether the same unit has the same gradients, bit for bit, in each pass."""
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def _kernels(device: torch.device) -> str:
    """What decides which kernels a device runs."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"


def _sums(gradient: torch.Tensor) -> torch.Tensor:
    """The square of the norm, and the projections, in float64 on the gradient's device."""
    flat = gradient.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    square = torch.zeros(1, dtype=torch.float64, device=flat.device)
    columns = torch.zeros(_WIDTH, dtype=torch.float64, device=flat.device)
    for piece in flat.split(_WIDTH * (16 if flat.is_cpu else 4096)):  # in a processor's cache, or 128 MiB
        wide = piece.double()
        square += torch.linalg.vector_norm(wide).square()
        whole = wide.numel() // _WIDTH * _WIDTH
        columns += wide[:whole].view(-1, _WIDTH).sum(0)
        columns[: wide.numel() - whole] += wide[whole:]
    return torch.cat([square, (_directions(flat.device) * columns).sum(1)])


@lru_cache(maxsize=16)
def _directions(device: torch.device) -> torch.Tensor:
    """Signs, of shape (PROJECTIONS, _WIDTH), the same in every process."""
    bits = random.Random(48)
    signs = [[bits.choice((-1.0, 1.0)) for _ in range(_WIDTH)] for _ in range(PROJECTIONS)]
    return torch.tensor(signs, dtype=torch.float64, device=device)
