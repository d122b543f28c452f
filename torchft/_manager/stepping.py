"""What a training loop calls during a step: a base class of the Manager, which begins and ends steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Optional

from torchft._forked import Maker
from torchft._manager.checks.layout import Layout
from torchft._manager.observe.hangs import PHASES
from torchft._manager.observe.log import _ManagerLogger
from torchft._manager.observe.ranges import ranged
from torchft._manager.quorum.plan import Plan
from torchft._manager.quorum.rounds import Round
from torchft._manager.rank import RankState, kept_in
from torchft._manager.step.errors import ExceptionWithTraceback
from torchft._manager.step.step import Step


class Stepping:
    """Answers questions about the step in progress, or the last one.

    Attributes:
        _current: the step in progress, or the last one.
        _round: the round that requests its quorum; None before the first.
        _ready: whether :meth:`wait_quorum` has nothing to wait for.
        _maker: the process of this Manager.
        _layout: the tensors that this rank reduces.
        _group_rank: this rank in its group.
    """

    _layout: Layout
    _logger: _ManagerLogger
    _rank_state: RankState
    _group_rank: int
    _current: Step
    _maker: Maker
    _round: Optional[Round] = None
    _ready = False

    # Names that other projects read and set

    _errored: Optional[ExceptionWithTraceback] = kept_in("_current.known_error")
    _healing: bool = kept_in("_current.healing")
    _participating_replica_rank: Optional[int] = kept_in("_current.participating_rank")
    _participating_replica_world_size: int = kept_in("_current.participants")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Surrounds what takes longer than a step, so that this group counts as stalled only after what is
        usual in that phase, while others wait for it: docs/failures.md.

        Without it, a compilation by PyTorch, ``torch.save``, torch.distributed.checkpoint and a model in
        evaluation mode between two steps are recognized, and anything else between two steps is a phase of
        its own.

        Args:
            name: ``evaluation``, ``checkpoint`` or ``compilation``.

        Raises:
            ValueError: there is no such phase.
        """
        if name not in PHASES:
            raise ValueError(f"phase({name!r}): allowed are {', '.join(PHASES)}")
        self._logger.phase(PHASES[name])
        try:
            with self._rank_state.doing(f"is in the phase {name!r}", waits=False, phase=PHASES[name]):
                yield
        finally:
            around = self._rank_state.activity(waits=False)
            self._logger.phase("" if around is None else around.phase)

    def _transfer(self, step: Step, plan: Plan) -> None:
        """Serves this group's state, or fetches a peer's."""
        raise NotImplementedError

    # Questions of a training loop

    @ranged("wait_quorum")
    def wait_quorum(self) -> None:
        """Waits until this step's quorum is known, the process group is ready and a heal has arrived. The
        functions of the user's state run in it, unless they have run in start_quorum.

        Raises:
            RuntimeError: there is no quorum, or start_quorum was not called.
            ValueError: this group reduces other tensors than the groups of the job.
            TimeoutError: there was none in time.
        """
        begun = self._check_begun("wait_quorum")
        with self._refusal_named():
            begun.result()
            deferred, self._current.deferred = self._current.deferred, None
            if deferred is not None:
                self._transfer(self._current, deferred)
            self._ready = True

    @contextmanager
    def _refusal_named(self) -> Iterator[None]:
        """Makes the refusal of this group a ValueError with the tensors that differ."""
        try:
            yield
        except RuntimeError as e:
            refused = self._layout.explain(e, self._group_rank)
            if refused is None:
                raise
            raise refused from e

    def _check_begun(self, call: str) -> Round:
        """The round of the step. Refuses a call before the first step."""
        self._maker.check()
        if self._round is None:
            raise RuntimeError(not_begun(call))
        return self._round

    def errored(self) -> Optional[ExceptionWithTraceback]:
        """The first error of this step, None if there is none."""
        return self._current.error

    def participating_rank(self) -> Optional[int]:
        """This group's rank among the participants of the step, None if it does not participate. Waits for
        the quorum, if one was requested.
        """
        if self._round is not None:
            self.wait_quorum()
        return self._current.participating_rank

    def is_participating(self) -> bool:
        """Whether this group's gradients count in this step."""
        return self._current.participating_rank is not None and not self._current.healing

    def num_participants(self) -> int:
        """The number of groups in the step, 0 before the first. Waits for the quorum if one was requested."""
        if self._round is not None:
            self.wait_quorum()
        return self._current.participants

    def num_up_to_date(self) -> int:
        """Groups of this quorum that had the newest state when it formed; the others heal in it. Waits for
        the quorum.

        All groups of a quorum get the same number, so they can use it to decide together, for example to end
        the job.
        """
        self.wait_quorum()
        assert self._current.plan is not None
        return self._current.plan.num_up_to_date

    def _is_draining(self) -> bool:
        """Whether this group was asked to leave and has ended its last step."""
        step = self._current
        return not step.undecided and step.plan is not None and step.plan.draining


def not_begun(call: str) -> str:
    """The error of a call that belongs to a step, where none has begun."""
    return (
        f"{call}: no step has begun, start_quorum must be called before it; the zero_grad of an optimizer in "
        "torchft.optim.OptimizerWrapper calls it, that of the optimizer inside does not"
    )
