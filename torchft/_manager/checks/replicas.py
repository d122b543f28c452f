"""Compares weights and optimizer state between the groups during training (docs/divergence.md).

divergence.py decides which part is digested in which step, and what the digests show. This module computes
them, and sends them with a small reduction in the first step of every ten. Digests are computed before the
vote, when all reductions have ended and the optimizer has not stepped. A device computes them in stream
order, and the host reads them a step later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import torch

from torchft._agreement import COMPARES, all_announce, announced
from torchft._manager.checks.divergence import (
    BUCKETS,
    NOTHING,
    Difference,
    DigestPace,
    Sweep,
    acts,
    bucket_of,
    compare,
    exchange_steps,
    header,
    sweep_commits,
    unlike,
)
from torchft._manager.settings import OnDivergence
from torchft.checkpointing.codec.digest import combine, digest_bytes, memory_of
from torchft.checkpointing.codec.layout import local_part
from torchft.utils import DeviceEvent, devices_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from torchft._manager.observe.log import _ManagerLogger
    from torchft._manager.quorum.plan import Plan
    from torchft._manager.rank import RankState
    from torchft._manager.step.errors import Errors
    from torchft._manager.step.step import Step
    from torchft._manager.step.work import _ManagedWork

Named = Iterable[tuple[str, torch.Tensor]]

# Version of the comparison. Groups compare only if they announce the same version and the same setting.
_VERSION = 1
# How many steps a group may lose to the same difference. Without a limit a step that no group commits would
# be retried forever: a heal does not help there.
_ATTEMPTS = 3
_SHOWN = 3  # tensors named in a message


class Diverged(RuntimeError):
    """This group's weights or optimizer state differ from the others'. `gives_way`: heals, or is evicted."""

    def __init__(self, message: str, gives_way: bool) -> None:
        super().__init__(message)
        self.gives_way = gives_way


class Part(NamedTuple):
    """One value that is compared: a parameter, or a tensor or number of the optimizer state."""

    name: str
    read: Callable[[], Any]  # returns the present value


class RegisteredState:
    """The parameters and optimizer state that must be equal in all groups, in the same order in each.
    `optimizers`: the optimizers whose parameters and state are compared.
    """

    def __init__(self) -> None:
        self.optimizers: list[Optimizer] = []
        self._parameters: list[Callable[[], Named]] = []

    def __bool__(self) -> bool:
        return bool(self.optimizers or self._parameters)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Adds the parameters of an optimizer, and their optimizer state."""
        self.optimizers.append(optimizer)

    def add_parameters(self, named: Callable[[], Named]) -> None:
        """Adds named parameters, including those that no optimizer steps."""
        self._parameters.append(named)

    def counts(self) -> list[int]:
        """Counts that change when parameters or optimizer state are added: most optimizers create their state
        in the first step. Reading ``optimizer.state[parameter]`` before adds an empty entry, which has
        nothing to compare.
        """
        return [
            count
            for optimizer in self.optimizers
            for count in (
                sum(len(entry) if isinstance(entry, dict) else 1 for entry in optimizer.state.values()),
                *(len(group["params"]) for group in optimizer.param_groups),
            )
        ]

    def parts(self) -> list[Part]:
        """All values that are compared."""
        names: dict[int, str] = {}
        parts: list[Part] = []
        for named in self._parameters:
            for name, parameter in named():
                _add(parameter, name, names, parts)
        for number, optimizer in enumerate(self.optimizers):
            for index, group in enumerate(optimizer.param_groups):
                given = group.get("param_names")
                for i, parameter in enumerate(group["params"]):
                    place = given[i] if given else f"optimizer {number}, param_groups[{index}]['params'][{i}]"
                    name = _add(parameter, place, names, parts)
                    state = optimizer.state.get(parameter, {})
                    parts += [
                        Part(f"{name}: {key}", partial(_read, optimizer, parameter, key))
                        for key in sorted(state, key=str)
                        if isinstance(state[key], (torch.Tensor, int, float))
                    ]
        return parts


def _add(parameter: torch.Tensor, name: str, names: dict[int, str], parts: list[Part]) -> str:
    """Adds a parameter unless it is there already. Returns the name under which it is listed."""
    if id(parameter) not in names:
        names[id(parameter)] = name
        parts.append(Part(name, lambda: parameter))
    return names[id(parameter)]


def _read(optimizer: Optimizer, parameter: torch.Tensor, key: Any) -> Any:
    return optimizer.state.get(parameter, {}).get(key)


def _tensor(value: Any) -> torch.Tensor:
    """The bytes to digest: of a tensor's local shard, of a number as float64, none for a lost value."""
    if isinstance(value, torch.Tensor):
        return memory_of(value) if value.layout == torch.strided else memory_of(torch.empty(0))
    return memory_of(torch.tensor(float(value), dtype=torch.float64) if value is not None else torch.empty(0))


def _size(value: Any) -> int:
    """The number of bytes that :func:`_tensor` returns."""
    if not isinstance(value, torch.Tensor):
        return 8
    local = local_part(value)
    return local.numel() * local.element_size() if local.layout == torch.strided else 0


def _line(name: str, value: Any) -> str:
    """Describes a value by name, dtype, shape and strides."""
    if not isinstance(value, torch.Tensor):
        return f"{name} {type(value).__name__}"
    strides = tuple(value.stride()) if value.layout == torch.strided else value.layout
    return f"{name} {value.dtype} {tuple(value.shape)} {strides}"


class Digests(NamedTuple):
    """The digests of one step."""

    header: int
    words: torch.Tensor  # at most BUCKETS, on the device if any of the weights are there
    names: list[list[str]]  # names of the tensors in each bucket


class Digester:
    """Digests a part of the state in each step. `setting`: commits in a sweep; None: by the state's size."""

    def __init__(self, state: RegisteredState, setting: Optional[int]) -> None:
        self._state = state
        self._setting = setting
        # number of the sweep, and :meth:`RegisteredState.counts`, for which the parts were listed
        self._listed: Optional[tuple[int, list[int]]] = None
        # with weights on a device, where the length of a sweep is chosen
        self._pace: Optional[DigestPace] = None
        self._began: Optional[float] = None

    def digest(self, step: int) -> Optional[Digests]:
        """Digests the part of the state that belongs to this step; None if the step digests none."""
        begin = time.monotonic()
        pace = self._pace
        digests = self._digest(step) if pace is None or pace.due(step, self._sweep.commits) else None
        if pace is not None and self._began is not None:
            cost = None if digests is None else time.monotonic() - begin
            pace.took(cost, begin - self._began)
        self._began = begin
        return digests

    def _digest(self, step: int) -> Digests:
        self._list(step)
        spans = self._sweep.spans(step)
        buckets: list[list[torch.Tensor]] = [[] for _ in range(min(BUCKETS, len(spans)))]
        names: list[list[str]] = [[] for _ in buckets]
        for i, span in enumerate(spans):
            part, bucket = self._parts[span.tensor], bucket_of(i, len(spans))
            buckets[bucket].append(digest_bytes(_tensor(part.read())[span.begin : span.end]))
            names[bucket].append(part.name)
        device = next((word.device for words in buckets for word in words if not word.is_cpu), None)
        none = torch.empty(0, dtype=torch.int64)
        words = torch.stack([combine(words, device) for words in buckets]) if buckets else none
        return Digests(self._header, words, names)

    def _list(self, step: int) -> None:
        """Lists the parts again when a sweep begins, or when tensors were added."""
        counts = self._state.counts()
        if self._listed is not None and self._listed == (step // self._sweep.commits, counts):
            return
        self._parts = self._state.parts()
        values = [part.read() for part in self._parts]
        sizes = [_size(value) for value in values]
        on_device = any(isinstance(value, torch.Tensor) and not value.is_cpu for value in values)
        commits = sweep_commits(self._setting, sum(sizes), on_device)
        if self._setting is None and on_device:
            self._pace = self._pace or DigestPace()
        self._sweep = Sweep(sizes, commits)
        self._header = header([_line(part.name, value) for part, value in zip(self._parts, values)], commits)
        self._listed = step // commits, counts


class _Sent(NamedTuple):
    """A message that was sent and not yet evaluated."""

    number: int  # the step in which it was sent
    plan: Plan
    table: torch.Tensor  # the message; with a ``mark``, its copy on the host, valid once the mark is reached
    work: Optional[_ManagedWork] = None
    mark: Optional[DeviceEvent] = None  # reached when the copy to the host is complete


class Replicas:
    """Compares the state of this rank with that of its counterparts in the other groups.

    Args:
        setting: commits in a sweep; 0: off; None: chosen by the size of the state.
        action: the reaction of a group that differs.
        rank_state: has the timeout of waiting for a device.
        errors: takes the error if this group loses a step.

    Attributes:
        state: the values that are compared.
        announced: what this rank announces; empty: it never compares; None: that is not known yet.
    """

    def __init__(
        self,
        setting: Optional[int],
        action: OnDivergence,
        *,
        rank_state: RankState,
        errors: Errors,
        logger: _ManagerLogger,
    ) -> None:
        self.state = RegisteredState()
        self._setting = setting
        self._off = setting == 0
        self._action = action
        self._rank_state = rank_state
        self._errors = errors
        self._logger = logger
        self._every = exchange_steps(setting or None)
        self._digester = Digester(self.state, setting)
        self.announced: Optional[str] = None
        self._active: tuple[int, bool] = (-1, False)  # quorum id, and whether its groups compare
        self._entries: dict[int, Digests] = {}
        self._stale = False  # whether the entries are digests of weights that a heal replaces
        self._mark: Optional[DeviceEvent] = None  # reached when the last digests on a device are computed
        self._last: Optional[int] = None  # the step that was digested last
        self._asked: Optional[Step] = None  # the attempt in which a message was sent last
        self._running: Optional[_Sent] = None
        self._copied: Optional[_Sent] = None
        self._acted = (-1, 0)  # step of the message on which this group acted last, and how often
        self._warned: set[str] = set()  # groups reported because they hold different tensors

    def announces(self, averages: bool) -> str:
        """The announcement to other groups, fixed at the first quorum; empty: this group compares nothing.
        `averages`: whether groups train on their own between two steps (LocalSGD, DiLoCo), so that their
        weights differ.
        """
        if self.announced is None:
            compares = self.state and not self._off and not averages
            self.announced = f"{_VERSION}/{self._setting or 'auto'}" if compares else ""
        return self.announced

    def follow(self, plan: Plan) -> None:
        """Decides for a new quorum whether its groups compare: either all of them or none. On any thread."""
        if plan.heal:
            self._stale = True
        if plan.quorum_id == self._active[0]:
            return
        mine = self.announced
        may = bool(mine) and len(plan.handles) > 1
        active = may and all_announce(plan.handles, COMPARES, mine or "")
        if may and not active:
            others = [
                name
                for name, peer in zip(plan.replica_ids, plan.handles)
                if announced(peer, COMPARES) != mine
            ]
            self._logger.info(
                f"weights are not compared in quorum {plan.quorum_id}: not by {', '.join(others)}"
            )
        self._active = plan.quorum_id, active

    # In a step

    def message(self, step: Step, number: int, device: torch.device) -> Optional[torch.Tensor]:
        """The digests of the preceding steps, which all groups add up before the first tensor of a step. None
        if no message is due, or it was sent.

        Args:
            step: the attempt, whose quorum is known.
            device: device of the tensors that the step reduces.
        """
        plan = step.plan
        if (
            plan is None
            or self._asked is step
            or number == 0
            or number % self._every
            or not self._is_active(plan)
        ):
            return None
        self._asked = step
        table = self._table(plan, number, device)
        self._running = _Sent(number, plan, table)
        return table

    def sent(self, work: Optional[_ManagedWork]) -> None:
        """Notes the reduction of the message; None: it could not begin."""
        if self._running is not None:
            self._running = self._running._replace(work=work)

    def _is_active(self, plan: Plan) -> bool:
        return self._active == (plan.quorum_id, True)

    def _table(self, plan: Plan, number: int, device: torch.device) -> torch.Tensor:
        """The message: a row per group. This group fills in its own; the reduction adds the others'."""
        steps = range(number - self._every, number)
        entries = (
            {} if self._stale else {i: self._entries[s] for i, s in enumerate(steps) if s in self._entries}
        )
        rows = [[*NOTHING] for _ in steps]
        for i, entry in entries.items():
            rows[i][0] = entry.header
        table = torch.zeros(
            plan.replica_world_size, len(steps), len(NOTHING), dtype=torch.int64, device=device
        )
        table[plan.replica_rank] = torch.tensor(rows, dtype=torch.int64)
        if self._mark is not None:
            self._mark.follow()  # the reduction may be queued on another stream than the digests
        for i, entry in entries.items():
            table[plan.replica_rank, i, 1 : 1 + len(entry.words)] = entry.words.to(device)
        return table

    def check(self, step: Step, number: int) -> None:
        """Evaluates the digests that have arrived, and computes those of this step. Called after the step's
        collectives and before the vote. A group that has to heal or to end votes against the step.
        """
        try:
            self._verify(step)
        except Diverged as e:
            step.inputs.refuse(str(e))
            self._errors.lose(e)
        except Exception as e:
            self._logger.exception(f"the weights were not compared: {e}")
        self._digest(step, number)

    def gives_way(self, step: Step) -> bool:
        """Whether this group has to heal because of the differences found in a step."""
        error = _diverged(step)
        return error is not None and error.gives_way

    def check_evicted(self, step: Step) -> None:
        """Raises Diverged if this group has to end because of the differences found in a step."""
        error = _diverged(step)
        if error is not None and not error.gives_way:
            raise error

    def _verify(self, step: Step) -> None:
        running, self._running = self._running, None
        if step.error is not None:
            return
        arrived, self._copied = self._copied, None
        if arrived is not None:
            seconds = self._rank_state.timeout.total_seconds()
            if arrived.mark is None or arrived.mark.wait(seconds):
                self._judge(arrived)
            else:
                self._logger.warn(
                    f"weights are not compared: the device has not copied a message in {seconds:g} s"
                )
        if running is None or running.work is None or not running.work.wait():
            return
        if running.table.is_cpu:
            self._judge(running)
        else:
            table = _on_host(running.table)
            self._copied = running._replace(
                table=table, work=None, mark=DeviceEvent(devices_of(running.table))
            )

    def _digest(self, step: Step, number: int) -> None:
        """Digests this step's part of the state. An error switches the comparison off, not training."""
        if self._stale or (self._last is not None and number not in (self._last, self._last + 1)):
            self._forget()  # a peer's state or a checkpoint was loaded
        if (
            self._off
            or step.error is not None
            or step.healing
            or step.plan is None
            or not self._is_active(step.plan)
        ):
            return
        self._last = number
        try:
            entry = self._digester.digest(number)
            if entry is None:
                return
            self._mark = DeviceEvent(devices_of(entry.words))
        except Exception as e:
            self._logger.exception(f"the weights cannot be compared with those of other groups: {e}")
            # This group sends zeros from now on. It must not stop sending, because the other groups wait for
            # it in the reductions of the messages.
            self._off = True
            self._forget()
            return
        self._entries[number] = entry
        for old in [old for old in self._entries if old < number - self._every]:
            del self._entries[old]

    def _forget(self) -> None:
        """Discards all digests, because the weights were replaced."""
        self._entries.clear()
        self._copied = self._last = None
        self._stale = False

    # The results

    def _judge(self, sent: _Sent) -> None:
        table, plan = sent.table.tolist(), sent.plan
        differences = []
        for i, step in enumerate(range(sent.number - self._every, sent.number)):
            entries = {rank: row[i] for rank, row in enumerate(table)}
            self._warn_unlike(plan, unlike(entries))
            difference = compare(step, entries)
            if difference is not None:
                differences.append(difference)
        if differences:
            self._found(sent, differences)

    def _warn_unlike(self, plan: Plan, ranks: list[int]) -> None:
        new = {plan.replica_ids[rank] for rank in ranks} - self._warned
        if new:
            self._warned |= new
            self._logger.warn(
                f"weights of {', '.join(sorted(new))} are not compared: other tensors than in most groups"
            )

    def _found(self, sent: _Sent, differences: list[Difference]) -> None:
        plan, here = sent.plan, sent.plan.replica_rank
        # one message per set of groups: a group that differs in one part mostly differs in others, too
        texts: dict[tuple[object, ...], str] = {}
        for found in differences:
            key = found.diverged, found.compared if not found.certain else ()
            if key in texts:
                continue
            groups = [
                plan.replica_ids[rank] for rank in (found.diverged if found.certain else found.compared)
            ]
            tensors = self._names(found)
            texts[key] = _describe(found, groups, tensors)
            self._logger.divergence_event(texts[key], found.step, groups, tensors, found.certain)
            if here in (found.diverged if found.certain else found.compared):
                self._logger.counted("divergences")
        acting = [d for d in differences if acts(self._action, d, here, plan.replica_world_size)]
        if acting and self._may_act(sent.number):
            heals = self._action is OnDivergence.HEAL
            text = f"{'; '.join(texts.values())}: this group {'heals' if heals else 'ends'} (on_divergence)"
            raise Diverged(text, gives_way=heals)

    def _names(self, difference: Difference) -> list[str]:
        entry = self._entries.get(difference.step)
        if entry is None:
            return []
        names = [names for i, names in enumerate(entry.names) if i in difference.buckets]
        return [", ".join(bucket[:_SHOWN]) + (" …" if len(bucket) > _SHOWN else "") for bucket in names]

    def _may_act(self, number: int) -> bool:
        """Counts an action on a difference. Returns False after too many actions on the same one."""
        times = self._acted[1] + 1 if self._acted[0] == number else 1
        self._acted = number, times
        return times <= _ATTEMPTS


def _diverged(step: Step) -> Optional[Diverged]:
    error = step.error.original_exception if step.error is not None else None
    return error if isinstance(error, Diverged) else None


def _on_host(table: torch.Tensor) -> torch.Tensor:
    """Starts a copy of a table to pinned memory of the host, in stream order."""
    try:
        copy = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
    except RuntimeError:  # this device type has no pinned memory, so the copy is synchronous
        copy = torch.empty(table.shape, dtype=table.dtype)
    return copy.copy_(table, non_blocking=True)


def _describe(found: Difference, groups: list[str], tensors: list[str]) -> str:
    where = f"in {'; '.join(tensors)}, " if tensors else ""
    if found.certain:
        named = ", ".join(groups)
        return f"step {found.step}: {where}{named} has other bits than most of {len(found.compared)} groups"
    return f"step {found.step}: {where}the bits of {', '.join(groups)} differ, and most of them are not alike"
