"""The state that a heal transfers: the Manager's counters, and the state dicts of the user."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Callable, Dict, Optional, Sequence, TypeVar

from torchft._manager.rank import Position, RankState, kept_in
from torchft.checkpointing._rwlock import RWLock
from torchft.checkpointing.codec.upstream import MAIN_PARTS

if TYPE_CHECKING:
    from torch.optim import Optimizer

T = TypeVar("T")


DEFAULT_KEY = MAIN_PARTS[0]


class UserState:
    """The functions a user registered to read and to load state, by key.

    Attributes:
        load_fns: key to the function that loads that part.
        read_fns: key to the function that returns that part.
        lock: held for reading while state is collected; ``disallow_read`` holds it for writing.
        optimizers: those that the Manager knows; their state is a part of the user's.
    """

    def __init__(self, rank_state: RankState) -> None:
        self._rank_state = rank_state
        self.load_fns: dict[str, Callable[[Any], None]] = {}
        self.read_fns: dict[str, Callable[[], Any]] = {}
        self.lock = RWLock(timeout=rank_state.timeout.total_seconds())
        self.optimizers: Sequence[Optimizer] = ()
        self._readable = True

    def register(self, key: str, load: Callable[[T], None], read: Callable[[], T]) -> None:
        """Adds a part of the state. ValueError: the key is taken."""
        if key in self.load_fns:
            raise ValueError(f"state dict key {key!r} is registered already; keys: {sorted(self.load_fns)}")
        self.load_fns[key] = load
        self.read_fns[key] = read

    def read(self) -> dict[str, Any]:
        """Collects all parts; waits while reading is disallowed.

        Raises:
            RuntimeError: nothing is registered.
            TimeoutError: reading stayed disallowed for the whole timeout.
        """
        if not self.read_fns:
            raise RuntimeError("there is no state to heal another group with: call set_state_dict_fns first")
        with self.lock.r_lock():
            return {key: self._run("state_dict", key, read) for key, read in self.read_fns.items()}

    def _run(self, kind: str, key: str, function: Callable[..., T], *args: Any) -> T:
        with self._rank_state.doing(f"runs the {kind} function {key!r}", waits=False):
            return function(*args)

    def load(self, parts: dict[str, Any]) -> None:
        """Loads all parts. The main part is accepted under any of its names.

        Raises:
            RuntimeError: nothing is registered, or the source lacks a part that this group has, or has the
                state of another kind of optimizer.
            Exception: whatever a registered function raises.
        """
        if not self.load_fns:
            raise RuntimeError("there is nothing to load a peer's state with: call set_state_dict_fns first")
        main = next((key for key in MAIN_PARTS if key in parts), DEFAULT_KEY)
        names = {key: main if key == DEFAULT_KEY else key for key in self.load_fns}
        missing = sorted(key for key, name in names.items() if name not in parts)
        if missing:
            raise RuntimeError(f"the source's state lacks {missing}; it has {sorted(parts)}")
        for key, load in self.load_fns.items():
            self._run("load_state_dict", key, load, parts[names[key]])
        for optimizer in self.optimizers:
            _check_hyperparameters(optimizer)

    def allow_read(self) -> None:
        if not self._readable:
            self._readable = True
            self.lock.w_release()

    def disallow_read(self) -> None:
        if self._readable:
            self.lock.w_acquire()
            self._readable = False


def _check_hyperparameters(optimizer: Optimizer) -> None:
    """Raises RuntimeError if a parameter group lacks some of the optimizer's hyperparameters after a state
    was loaded. PyTorch's optimizers load the state of any other kind, and fail in a later step.
    """
    for number, group in enumerate(optimizer.param_groups):
        if missing := sorted(set(optimizer.defaults) - set(group)):
            raise RuntimeError(
                f"the source trains with another optimizer than {type(optimizer).__name__}: "
                f"its parameter group {number} has no {', '.join(missing)}"
            )


class Stateful:
    """The state that a Manager keeps from step to step. A base class of the Manager, because users set and
    read this state on it.

    Args:
        timeout: limit for collectives, transfers, votes, and the wait while reading the user's state is
            disallowed.
        load_state_dict, state_dict: functions that load and return the main part of the user's state; None:
            set later.

    Raises:
        ValueError: only one of the two functions is given.
    """

    def __init__(
        self,
        timeout: timedelta,
        load_state_dict: Optional[Callable[[T], None]],
        state_dict: Optional[Callable[[], T]],
    ) -> None:
        self._rank_state = RankState(timeout)
        self._batches_committed = 0
        # the quorum in which the weights were committed; -1: none since this process began
        self._committed_quorum_id = -1
        self._user_state = UserState(self._rank_state)
        if load_state_dict is not None and state_dict is not None:
            self.set_state_dict_fns(load_state_dict, state_dict)
        elif load_state_dict is not None or state_dict is not None:
            raise ValueError("load_state_dict and state_dict belong together: pass both, or None for both")

    _step: int = kept_in("_rank_state.step")
    _quorum_id: int = kept_in("_rank_state.quorum_id")
    _timeout: timedelta = kept_in("_rank_state.timeout")
    _load_state_dict_fns: Dict[str, Callable[[Any], None]] = kept_in("_user_state.load_fns")
    _user_state_dicts: Dict[str, Callable[[], Any]] = kept_in("_user_state.read_fns")
    _state_dict_lock: RWLock = kept_in("_user_state.lock")

    @property
    def _position(self) -> Position:
        return Position(self._step, self._batches_committed, self._committed_quorum_id)

    @_position.setter
    def _position(self, position: Position) -> None:
        self._step, self._batches_committed, self._committed_quorum_id = position

    def current_step(self) -> int:
        """The number of committed steps, which is the number of the step in progress."""
        return self._step

    def batches_committed(self) -> int:
        """The number of batches committed so far, summed over all groups."""
        return self._batches_committed

    def state_dict(self) -> Dict[str, int]:
        """Returns the part of the Manager's state that a checkpoint must contain."""
        return {"step": self._step, "batches_committed": self._batches_committed}

    def load_state_dict(self, state_dict: Dict[str, int]) -> None:
        """Restores step and batches_committed from :meth:`state_dict`."""
        self._position = Position(state_dict["step"], state_dict["batches_committed"], committed_quorum_id=-1)

    def _manager_state_dict(self) -> Dict[str, Any]:
        return {"user": self._user_state.read(), "torchft": self.state_dict()}

    def _load_manager_state_dict(self, state: Dict[str, Any]) -> None:
        self._user_state.load(state["user"])
        self.load_state_dict(state["torchft"])

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[T], None], state_dict: Callable[[], T]
    ) -> None:
        """Adds a part to the state that a healing group receives. ValueError: the key is taken."""
        self._user_state.register(key, load_state_dict, state_dict)

    def set_state_dict_fns(self, load_state_dict: Callable[[T], None], state_dict: Callable[[], T]) -> None:
        """Sets the main part of the state, instead of the constructor's arguments."""
        self._load_state_dict_fns[DEFAULT_KEY] = load_state_dict
        self._user_state_dicts[DEFAULT_KEY] = state_dict

    def allow_state_dict_read(self) -> None:
        """Undoes :meth:`disallow_state_dict_read`."""
        self._user_state.allow_read()

    def disallow_state_dict_read(self) -> None:
        """Prevents healing groups from reading the state while the caller changes it."""
        self._user_state.disallow_read()
