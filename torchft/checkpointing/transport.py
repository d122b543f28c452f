"""The interface of a checkpoint transport, which moves a state from one replica group to another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import contextmanager
from datetime import timedelta
from enum import Enum
from typing import Callable, ClassVar, Generic, Iterator, List, TypeVar

T = TypeVar("T")


class Role(Enum):
    """The role of a source for one target."""

    ASSIGNED = "the quorum names it as the source, and the whole job may wait for it"
    ADDITIONAL = "blocks that equal those of the assigned source may come from it"


# Returns the metadata of an additional source. It may block for a while, or raise.
AdditionalSource = Callable[[], str]


class CheckpointError(RuntimeError):
    """A checkpoint could not be sent or received.

    The message names the source, the step and the cause. A partly received state is discarded:
    `recv_checkpoint` returns all of it or raises. A timeout raises CheckpointTimeout instead.
    """


class Interrupted(CheckpointError):
    """A connection broke, the source failed, or what it sent was damaged on its way: a retry may succeed."""


class CheckpointTimeout(TimeoutError, RuntimeError):
    """A checkpoint was not sent or received in time.

    Also a RuntimeError, which the upstream PGTransport raises and scripts catch. Not a CheckpointError,
    because a transfer is retried after one of those.
    """


@contextmanager
def bounded(what: str) -> Iterator[None]:
    """Turns any TimeoutError in the block into a CheckpointTimeout that names the operation."""
    try:
        yield
    except CheckpointTimeout:
        raise
    except TimeoutError as error:
        raise CheckpointTimeout(f"{what} timed out: {error}") from error


class Unsendable(CheckpointError):
    """The state of a source contains something that cannot be sent. Its targets have been informed."""


class CheckpointTransport(Generic[T], ABC):
    """Moves the state of one step from a source to the groups that heal from it.

    The source calls `send_checkpoint`, then `disallow_checkpoint` before it changes the state that it sent.
    The target calls `recv_checkpoint` with the source's `metadata`, which travels through the managers.

    Attributes:
        several_sources: whether a target can also fetch from additional sources. If so, the Manager calls
            `help_checkpoint` on those, and passes `additional_sources`, a list of `AdditionalSource`, to
            `recv_checkpoint` on the target.
        takes_target: whether `recv_checkpoint` takes `target`, a `TargetState`: the state that the group has,
            and the tensors to receive into.
        in_place: whether `recv_checkpoint` writes into the tensors that this group trains with. If it fails,
            they may hold values of different steps.
        gives_parts: whether it has the methods of HTTPTransport for parts of a state, as `offer_parts`.
    """

    several_sources: ClassVar[bool] = False
    gives_parts: ClassVar[bool] = False
    takes_target: ClassVar[bool] = False
    in_place: bool = False

    @abstractmethod
    def metadata(self) -> str:
        """The value that a peer passes to its `recv_checkpoint`, such as an address.

        Must not change while the transport lives.
        """

    @abstractmethod
    def send_checkpoint(self, dst_ranks: List[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Sends the state or makes it available; this may continue in the background.

        Args:
            dst_ranks: the replica ranks that will receive it
            step: the step that the state belongs to
            state_dict: the state. It must not change before `disallow_checkpoint` has returned.
            timeout: limit for each wait

        Raises:
            TimeoutError: not done in time
            Unsendable: the state cannot be sent at all
        """

    def refuse_checkpoint(self, dst_ranks: List[int], step: int, reason: str, timeout: timedelta) -> None:
        """Tells the targets that there is no state to send, instead of `send_checkpoint`: they need not wait
        for it.

        Args:
            dst_ranks, step, timeout: as in `send_checkpoint`
            reason: sent to the targets
        """

    def help_checkpoint(self, step: int, state_dict: T) -> None:
        """Offers the state to targets of other sources, until `disallow_checkpoint`, which does not wait for
        them.

        Args:
            step: the step that the state belongs to
            state_dict: the state
        """
        raise NotImplementedError(f"{type(self).__name__} takes no additional sources")

    def disallow_checkpoint(self) -> None:
        """Ends the reading of tensors that were sent, before the state changes.

        Waits while they are being read.
        """

    @abstractmethod
    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Receives a state.

        Args:
            src_rank: the replica rank of the source
            metadata: the result of the source's `metadata`
            step: the requested step; a source at another step is an error
            timeout: limit for the whole transfer. HTTPTransport and PGTransport: if the other groups wait for
                it as long as it makes progress, limit for a time without any data

        Returns:
            the state of the source at the time of its `send_checkpoint` with this step

        Raises:
            CheckpointError: the source has ended, is at another step, or sent something that cannot be read
            TimeoutError: not done in time
        """

    def shutdown(self, wait: bool = True) -> None:
        """Ends the transport and every request that waits in it.

        Args:
            wait: whether to wait until its threads have ended
        """
