"""The target's part of a heal in pieces: trains along while the state of a peer arrives.

along.py decides what to request and how to use the answers. tracked.py changes the tensors. _pieces.py in checkpointing
transfers the pieces.

The *request thread* sends one request at a time. Between two votes it also puts the arrived pieces in place and
compares digests, so that the other groups do not wait for this work. Before its vote the training thread asks the
source whether it has committed the step. If so, it applies the gradient while the other groups step their optimizers.
If the source does not answer, the gradient is kept until the next quorum, which shows whether the step was committed.
Once all pieces are compared, the request thread applies a kept gradient after that quorum, because in the last step the
training thread also steps this group's own optimizer after the vote. A forward or backward pass may run at the same
time: its results are not used during a heal.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Optional

import torch

from torchft._manager.along import Advance, Ask, Fate, Heal, Kind, cut
from torchft._manager.heal_plan import Measured, Mode
from torchft._manager.observe.lifetime import weakly
from torchft._manager.pace import Pace
from torchft._manager.sources import MAX_FAILURES, Sources
from torchft._manager.tracked import Parameters, Unfit
from torchft.checkpointing._encoding import decode, storage_bytes
from torchft.checkpointing._http_client import Refused
from torchft.checkpointing._pieces import DECISION, Answer, Asker
from torchft.checkpointing._token import checkpoint_token
from torchft.checkpointing.transport import CheckpointError
from torchft.utils import DeviceThread

if TYPE_CHECKING:
    from torchft._manager.observe.log import _ManagerLogger
    from torchft._manager.plan import Plan

# Elements of a piece: 3 MB for float32 with the state of Adam, which a source copies in 1 ms.
_PIECE = 1 << 18
# No more pieces are requested while this many bytes have arrived and are not processed.
_WAITING = 64 << 20
# Seconds before a vote in which the training thread processes answers: usually the request thread has done so already.
_TAKE_SEC = 0.01
# The most seconds that a target's step waits for the hyperparameters of the previous step.
_HEAD_SEC = 2.0
# The most seconds that a target waits for the source's decision. The source votes at the same time as the target.
_DECISION_SEC = 1.0
# The most seconds for which the request thread leaves the lock to a thread that waits for it.
_GIVE_WAY_SEC = 0.1

Locate = Callable[[str], str]


def _hurries(want: Ask | int) -> bool:
    """Whether the request is sent without a pause, because a step of all groups may wait for its answer.

    These are the requests for hyperparameters (a step number) and for the rest of the state.
    """
    return isinstance(want, int) or want.kind is Kind.REST


class Target:
    """One heal of this rank.

    Attributes:
        wrote: whether the heal has changed weights.
        pace: the pauses between requests for pieces and digests.
    """

    wrote = False

    def __init__(
        self, parameters: Parameters, locate: Locate, timeout: float, additional: int, logger: _ManagerLogger
    ) -> None:
        self._parameters = parameters
        self._locate = weakly(locate)  # else the request thread would keep the Manager alive
        self._timeout = timeout
        self._additional = additional
        self._logger = logger
        self.sources = Sources()
        self.pace = Pace()
        self.heal = Heal(cut(parameters.sizes(), _PIECE))
        self._cond = threading.Condition()  # guards all below; the training thread uses the tensors without it
        self._plan: Optional[Plan] = None
        self._asked: set[int] = set()  # pieces with a request in progress, or an answer in _arrived
        self._arrived: list[tuple[Ask, Answer]] = []  # pieces and digests that are not processed yet
        self._waiting = 0  # number of bytes in _arrived
        self._rest: Optional[Answer] = None
        self._heads: dict[int, Any] = {}  # hyperparameters, by step; None: no source has them
        self._kept: dict[int, torch.Tensor] = {}
        self._early = False  # whether the request thread has applied _kept since the last vote
        self._given: dict[int, tuple[str, bool]] = {}  # source of each piece, and whether it was the assigned one
        self._askers: dict[str, Asker] = {}  # by source
        self._talks = ""  # the source of the request in progress
        self._decider: Optional[tuple[str, Asker]] = None  # the assigned source, asked by the training thread
        self._silent = ""  # an assigned source that did not report whether it committed
        self._ended: Optional[int] = None  # the step in which the state was complete
        self._measured = Measured()
        self._over = False
        self._gives_way = False  # another thread waits for the lock
        self._thread = DeviceThread(target=self._run, name="torchft_heal_along")

    @contextmanager
    def _soon(self) -> Iterator[None]:
        """Takes the lock when the request thread next releases it: else that thread would mostly retake it at once."""
        self._gives_way = True
        with self._cond:
            self._gives_way = False
            yield

    @contextmanager
    def _marked(self) -> Iterator[None]:
        """Orders the request thread's work on the device behind that of the training thread, also after an error."""
        try:
            yield
        finally:
            self._parameters.beside.mark()

    def quorum(self, plan: Plan, together: bool = True) -> None:
        """Takes over a quorum in which this group heals, see :meth:`Heal.quorum`."""
        with self._soon():
            before, self._plan = self._plan, plan
            assert plan.source is not None
            self.sources.quorum(plan.source.manager_address, plan.additional_sources[: self._additional])
            if self._talks not in self.sources:
                self._abort()
            fate = self.heal.quorum(plan.max_step, plan.quorum_id, plan.committed_quorum_id, together)
            self._ended = None
            self.pace.quorum(time.monotonic())
            if fate is Fate.MISSED:
                self._logger.warn(f"step {plan.max_step - 1} was committed without this group: its heal starts over")
            if before is None:
                self._logger.info(f"training along from step {plan.max_step} on while the state arrives in pieces")
                self._thread.start()
            self._cond.notify_all()

    def why_at_once(self) -> Optional[str]:
        """Called after each quorum. Returns why this heal should end, and the whole state be transferred at once;
        None: it should not, or that is not known.
        """
        with self._soon():
            assert self._plan is not None
            elements, groups = sum(self._parameters.sizes()), self._plan.num_up_to_date
            limit = math.inf if self._plan.awaits_heals else self._timeout
            figures = self._measured.quorum(
                time.monotonic(), elements, self.pace.overlap, groups, limit, self.pace.share.settled
            )
        if figures is None or figures.mode is Mode.IN_PASSING:
            return None
        return (
            f"that loses {figures.lost_at_once:.1f} s of all groups together, and the rest in pieces would lose "
            f"{figures.lost_in_passing:.1f} s"
        )

    def peer_failed(self, quorum_id: int, replica_id: str) -> None:
        """Called when a group of a quorum has failed. If it is this group's assigned source, the vote must not wait for
        it; the next quorum names another source.
        """
        with self._cond:
            plan = self._plan
            if plan is None or plan.source is None or self._over:
                return
            if (plan.quorum_id, plan.source.replica_id) == (quorum_id, replica_id):
                self._count_failure(self.sources.assigned, "it is reported to have failed")
                if self._talks == self.sources.assigned:
                    self._abort()
                if self._decider is not None and self._decider[0] == self.sources.assigned:
                    self._decider[1].abort()

    def how_far(self) -> str:
        """The progress of the heal, as text for logs and errors."""
        total = len(self.heal.pieces)
        return f"{total - self.heal.missing} of {total} pieces of the state are here"

    def abandon(self, reason: str) -> None:
        with self._cond:
            self.heal.abandon(reason)

    def stop(self) -> None:
        """Tells the request thread to end; no further answer is put in place."""
        with self._cond:
            self._over = True
            self._cond.notify_all()
            self._abort()
            if self._decider is not None:
                self._decider[1].abort()

    def _abort(self) -> None:
        """Aborts the request in progress."""
        if self._talks in self._askers:
            self._askers[self._talks].abort()

    # The training thread

    def advance(self, reduced: bool) -> Optional[dict[str, Any]]:
        """Ends a step before the vote: puts arrived pieces in place, and applies or keeps the gradient.

        Returns:
            the complete state of the step; None while parts of it are missing.
        """
        with self._soon(), self._marked():
            heal, parameters = self.heal, self._parameters
            assert heal.step is not None
            before = heal.step - 1
            if heal.applies and heal.missing < len(heal.pieces):
                self._cond.wait_for(lambda: before in self._heads or self._stopped(), _HEAD_SEC)
            if heal.applies and self._heads.get(before) is None:
                heal.miss()
            # The rest of the state can be used only in the step in which the source read it, so the step waits for the
            # answer. A step whose reductions failed is not committed anyway, and does not wait.
            if reduced and heal.ends:
                self._cond.wait_for(lambda: self._has_rest() or self._stopped() or self.sources.failing, self._timeout)
            if self._early and not self._unchanged():
                heal.miss()
            self._early = False
            pieces = self._take(lambda ask, answer: ask.kind is Kind.PIECE and answer.step != heal.step)
            todo = heal.advance([(number, answer.step) for number, answer in pieces], time.monotonic())
            for index in todo.before:
                self._write(*pieces[index])
            if todo.apply:
                self._apply(todo)
            until = time.monotonic() + _TAKE_SEC
            while self._take_up() and time.monotonic() < until:
                pass
            rest, self._rest = self._rest, None
            keeps = reduced and heal.abandoned is None
            kept = heal.keep(self._asked) if keeps else set()
            ends = rest is not None and rest.value is not None and heal.done(rest.step)
            if ends:
                self._ended = heal.step
        committed = not ends and bool(kept) and self._source_committed()
        with self._cond, self._marked():
            if committed and heal.abandoned is None:
                self._kept = parameters.gradients(set(), {})
                numbers = heal.committed()
                self._step(numbers, parameters.present_gradients(numbers), heal.step)
            elif keeps:  # also in the last step, which another rank may vote against
                self._kept = parameters.gradients(kept, self._kept)
            if ends:
                assert rest is not None
                return self._state(rest)
            self._cond.notify_all()
            return None

    def _source_committed(self) -> bool:
        """Whether the assigned source reports that it has committed the current step. Called on the training thread."""
        with self._cond:
            plan, source = self._plan, self.sources.assigned
            if plan is None or source == self._silent or self._heads.get(plan.max_step) is None:
                return False
            if self.sources.failing:
                return False  # it may have failed: a stopped host would not answer
        try:
            return self._asks_decision(source, f"{plan.max_step}-{plan.quorum_id}")
        except Exception as e:
            self._logger.info(f"gradients are applied a step later: {source} did not say how it decided: {e}")
            self._silent = source
            return False

    def _located(self, source: str) -> str:
        locate = self._locate()
        if locate is None:
            raise CheckpointError("the Manager of this heal no longer exists")
        return locate(source)

    def _asks_decision(self, source: str, attempt: str) -> bool:
        if self._decider is None or self._decider[0] != source:
            self._close_decider()
            self._decider = source, Asker(self._located(source), checkpoint_token(), _DECISION_SEC)
        return self._decider[1].ask(DECISION, attempt).value is True

    def _close_decider(self) -> None:
        if self._decider is not None:
            self._decider[1].close()

    def _stopped(self) -> bool:
        return self._over or self.heal.abandoned is not None

    def _has_rest(self) -> bool:
        return self._rest is not None and self._rest.step == self.heal.step

    def _apply(self, todo: Advance) -> bool:
        """Applies the kept gradients of the previous step. Returns False if the training loop changed one in place."""
        assert self.heal.step is not None
        self._step(todo.parameters, self._kept, self.heal.step - 1)
        unchanged = self._unchanged()
        if not unchanged:
            self.heal.miss()
        return unchanged

    def _unchanged(self) -> bool:
        """Whether the kept gradients were not changed in place. Checked after they were applied.

        If the request thread applied them, the training thread checks again: PyTorch increments a tensor's version at
        the end of a change, so the request thread may have read a tensor in the middle of one.
        """
        unchanged = self._parameters.unchanged(self._kept)
        if not unchanged:
            self._logger.info("the training loop changes gradients in place: they are copied, and the heal starts over")
        return unchanged

    def _step(self, numbers: set[int], gradients: dict[int, torch.Tensor], step: int) -> None:
        self.wrote = True
        self._parameters.step(numbers, gradients, self._heads[step])

    def _take(self, which: Callable[[Ask, Answer], bool]) -> list[tuple[int, Answer]]:
        """Removes the pieces and digests that ``which`` selects from the arrived ones, and returns them."""
        found = [one for one in self._arrived if which(*one)]
        self._arrived = [one for one in self._arrived if not which(*one)]
        self._waiting -= sum(answer.memory.numel() for _, answer in found)
        self._asked.difference_update(ask.number for ask, _ in found)
        return [(ask.number, answer) for ask, answer in found]

    def _take_up(self) -> bool:
        """Processes one answer: a piece or a digest. Returns False if there is none, or only of steps yet to come."""
        heal = self.heal
        one = self._next_arrived()
        if one is None:
            return False
        ((number, answer),) = self._take(lambda ask, answer: answer is one[1])
        if one[0].kind is Kind.PIECE:
            if heal.place(number, answer.step):
                self._write(number, answer)
        elif heal.comparable(number, answer.step):
            self._compare(number, self._parameters.digest(*heal.pieces[number]) == answer.value)
        return True

    def _next_arrived(self) -> Optional[tuple[Ask, Answer]]:
        """The next answer that is not of a step yet to come."""
        return next((one for one in self._arrived if not self.heal.early(one[1].step)), None)

    def _compare(self, number: int, equal: bool) -> None:
        giver, as_assigned = self._given[number]
        self.heal.compared(number, equal, as_assigned and giver == self.sources.assigned)
        if not equal and self.heal.abandoned is None:
            self.sources.drop(giver)
            self._logger.warn(f"a piece from {giver} differs from the assigned source's, and is requested again")

    def _write(self, number: int, answer: Answer) -> None:
        self.wrote = True
        self._parameters.write(*self.heal.pieces[number], answer.value, answer.memory)

    def _state(self, rest: Answer) -> dict[str, Any]:
        """The complete state: this group's parameters and optimizer state, and the rest from the source."""
        self._parameters.check_groups()
        flats: list[torch.Tensor] = []
        begin = 0
        for region in rest.value["regions"]:
            if isinstance(region, list):
                flats.append(storage_bytes(self._parameters.storage(*region)))
                continue
            on_device = isinstance(region, dict)
            size = region["on device"] if on_device else region
            flat = rest.memory[begin : begin + size].clone()
            flats.append(flat.to(self._parameters.device) if on_device else flat)
            begin += size
        return decode(rest.value["structure"], flats, "the rest of the state")

    # The request thread

    def _run(self) -> None:
        while (found := self._next()) is not None:
            want, source = found
            began = time.monotonic()
            try:
                self._ask(want, source)
            except Exception as e:
                with self._cond:
                    self._failed(want, source, e)
            else:
                if not _hurries(want):
                    with self._cond:
                        self.pace.spent(began, time.monotonic())
        with self._cond:
            for source in list(self._askers):
                self._close(source)
            self._close_decider()

    def _failed(self, want: Ask | int, source: str, error: Exception) -> None:
        self._close(source)
        if isinstance(want, Ask):
            self._asked.discard(want.number)
        if self._over or source not in self.sources:
            return  # the heal does not use this source any more
        if isinstance(error, (Refused, Unfit)):
            if self.sources.drop(source):
                self._logger.info(f"an additional source does not give pieces: {error}")
            else:
                self.heal.abandon(str(error))
            self._cond.notify_all()
            return
        self._logger.info(f"a request for a part of the state failed: {error}")
        self._count_failure(source, str(error))

    def _count_failure(self, source: str, error: str) -> None:
        if not self.sources.failed(source, time.monotonic()):
            self.heal.abandon(f"{MAX_FAILURES} requests in a row failed, the last one: {error}")
        self._cond.notify_all()

    def _next(self) -> Optional[tuple[Ask | int, str]]:
        """Waits for the next request and a source that can be asked now; None: the heal in pieces has ended."""
        with self._cond:
            while not self._stopped():
                if self._gives_way:
                    self._cond.wait(_GIVE_WAY_SEC)
                began = time.monotonic()
                if self._work():
                    self.pace.spent(began, time.monotonic())
                    continue
                pause: Optional[float] = None
                if (want := self._wanted()) is not None:
                    any_source, now = isinstance(want, Ask) and want.kind is Kind.PIECE, time.monotonic()
                    pause = 0.0 if _hurries(want) else self.pace.pause(now)
                    source = self.sources.pick(any_source, now) if pause <= 0 else None
                    if source is not None:
                        if isinstance(want, Ask) and want.number >= 0:
                            self._asked.add(want.number)
                        self._talks = source
                        return want, source
                    pause = max(pause, self.sources.pause(any_source, now))
                self._cond.wait(pause)
            return None

    def _work(self) -> bool:
        """Does one piece of local work in place of the training thread. Returns False if there is none."""
        try:
            if self._next_arrived() is not None:
                with self._parameters.beside.running():
                    return self._take_up()
            heal = self.heal
            if heal.unverified or not heal.applies or heal.step is None or self._heads.get(heal.step - 1) is None:
                return False
            if self._parameters.device.type != "cpu":
                return False  # the training thread only queues that work, so the others do not wait for it
            self._early = self._apply(heal.advance([], time.monotonic()))
        except Exception as e:
            self.heal.abandon(str(e) if isinstance(e, Unfit) else repr(e))
        return True

    def _wanted(self) -> Optional[Ask | int]:
        """The request that is due now; an integer stands for the head of that step, None for no request."""
        if self._plan is None or self._ended is not None:
            return None
        step = self._plan.max_step
        # The rest of the state comes first: all ranks need it in the same step, and heads can be requested later.
        if self.heal.ends and not self._has_rest():
            return self.heal.next(self._asked)
        if self.heal.applies and step - 1 not in self._heads:
            return step - 1
        if step not in self._heads:
            return step
        if self._waiting >= _WAITING or self._has_rest():
            return None
        return self.heal.next(self._asked)

    def _close(self, source: str) -> None:
        asker = self._askers.pop(source, None)
        if asker is not None:
            asker.close()

    def _asker(self, source: str) -> Asker:
        with self._cond:
            for one in [one for one in self._askers if one not in self.sources]:
                self._close(one)
            if source in self._askers:
                return self._askers[source]
        asker = Asker(self._located(source), checkpoint_token(), self._timeout)
        with self._cond:
            if self._over or source not in self.sources:
                raise CheckpointError(f"{source} is not asked any more")
            self._askers[source] = asker
        return asker

    def _ask(self, want: Ask | int, source: str) -> None:
        """Sends one request to a source and stores its answer."""
        asker = self._asker(source)
        if isinstance(want, int):
            self._take_head(want, asker.ask("head", str(want)), source)
            return
        with self._cond:
            assert self.heal.step is not None
            about = self.heal.pieces[want.number] if want.number >= 0 else (self.heal.step,)
        began = time.monotonic()
        answer = asker.ask(want.kind.value, "-".join(map(str, about)))
        elements, seconds = 0, time.monotonic() - began
        if want.kind is Kind.PIECE:
            number, begin, end = self.heal.pieces[want.number]
            elements = end - begin
            expected = sum(self._parameters.bytes_of(number, begin, end, answer.value))
            if answer.memory.numel() != expected:
                raise ValueError(f"a piece of {answer.memory.numel()} bytes in place of {expected}")
        with self._cond:
            self.sources.answered(source)
            if want.kind is Kind.REST:
                self._rest = answer
            else:
                if want.kind is Kind.PIECE:
                    self._measured.piece(answer.memory.numel(), elements, seconds)
                    self._given[want.number] = source, source == self.sources.assigned
                self._arrived.append((want, answer))
                self._waiting += answer.memory.numel()
            self._cond.notify_all()

    def _take_head(self, step: int, answer: Answer, source: str) -> None:
        head = answer.value
        if head is not None and "unfit" in head:
            raise Unfit(f"the source: {head['unfit']}")
        if head is not None and head["layout"] != self._parameters.layout():
            raise Unfit("parameters or optimizers differ from the source's")
        with self._cond:
            self.sources.answered(source)
            self._heads[step] = head["hyperparameters"] if head is not None else None
            for old in [old for old in self._heads if old < step - 1]:
                del self._heads[old]
            self._cond.notify_all()
