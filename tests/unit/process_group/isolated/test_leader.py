"""The choice of the thread that reads the answers: an exhaustive check of all interleavings of a few simulated threads.

A step is the work of a thread while it holds the channel's lock, or the end of its sleep. The simulated threads are
state machines that use `Leadership` as documented there, like `Channel` and `Completer`. Each reachable state is
visited once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from torchft.process_group.isolated.leader import Leadership

# A method of a simulated thread, and its arguments after `world`.
Step = tuple[str, ...]


class Signal:
    woken = False

    def release(self) -> None:
        assert not self.woken, "a follower is woken twice"
        self.woken = True


class Thread:
    """A simulated thread. As the leader it repeatedly reads an answer and ends its operation, until it has `enough`."""

    state = "begins"
    taken = ""  # an answer that it has read, and whose operation it has not ended yet

    def steps(self, world: World) -> Iterator[Step]:
        """Returns its possible next steps; none while it sleeps or when it is done."""
        raise NotImplementedError

    def enough(self, world: World) -> bool:
        """Whether it stops reading."""
        raise NotImplementedError

    def steps_of_leader(self, world: World) -> Iterator[Step]:
        if self.taken:
            yield ("end",)
        elif self.enough(world) or world.closed:
            yield ("step_down",)
        else:
            for operation in world.unread:
                yield "take", operation

    def take(self, world: World, operation: str) -> None:
        self.taken = operation
        world.unread = [each for each in world.unread if each != operation]

    def end(self, world: World) -> None:
        operation, self.taken = self.taken, ""
        world.end(operation)

    def step_down(self, world: World) -> None:
        world.leadership.step_down()
        self.state = "begins"


class Waiter(Thread):
    """Waits for an operation. With `may_stop` its deadline passes, or it is interrupted, at any time."""

    signal: Any = None

    def __init__(self, operation: str, may_stop: bool = False) -> None:
        self.operation = operation
        self.may_stop = may_stop

    def enough(self, world: World) -> bool:
        return self.operation in world.done

    def steps(self, world: World) -> Iterator[Step]:
        if self.state == "begins":
            yield ("join",)
        elif self.state == "leads":
            yield from self.steps_of_leader(world)
            if self.may_stop and not self.taken:
                yield ("stop_leading",)
        elif self.state == "sleeps" and self.signal.woken:
            yield ("wake_up",)
        elif self.state == "sleeps" and self.may_stop:
            yield ("stop_sleeping",)
        elif self.state == "stops":
            yield ("leave",)

    def join(self, world: World) -> None:
        if self.enough(world):
            self.state = "is done"
            return
        self.signal = world.leadership.join(self.operation)
        self.state = "leads" if self.signal is None else "sleeps"

    def wake_up(self, world: World) -> None:
        self.state = "begins"

    def stop_leading(self, world: World) -> None:
        self.step_down(world)
        self.state = "is done"

    def stop_sleeping(self, world: World) -> None:
        self.state = "stops"  # it does not hold the lock yet, so it may be woken before it gets the lock

    def leave(self, world: World) -> None:
        world.leadership.leave(self.signal)
        self.state = "is done"

    @property
    def is_on_its_way(self) -> bool:
        """Whether it was woken and has neither joined nor left since then."""
        return self.signal is not None and self.signal.woken and self.state in ("sleeps", "begins", "stops")


class Visitor(Thread):
    """Reads available answers without waiting."""

    def enough(self, world: World) -> bool:
        return True

    def steps(self, world: World) -> Iterator[Step]:
        if self.state == "begins":
            yield ("lead",)
        elif self.state == "leads":
            yield from self.steps_of_leader(world)
            if not self.taken and not world.closed:
                for operation in world.unread:
                    yield "take", operation

    def lead(self, world: World) -> None:
        self.state = "leads" if world.leadership.lead() else "is done"

    def step_down(self, world: World) -> None:
        super().step_down(world)
        self.state = "is done"


class Reserve(Thread):
    """The thread that completes futures, see `Completer`."""

    def __init__(self, operations: Sequence[str]) -> None:
        self.open = frozenset(operations)
        self.ended: tuple[str, ...] = ()
        self.idle = False

    def wake(self) -> None:
        self.idle = False

    def enough(self, world: World) -> bool:
        return bool(self.ended)

    def steps(self, world: World) -> Iterator[Step]:
        if self.state == "leads":
            yield from self.steps_of_leader(world)
        elif self.state == "begins" or (self.state == "sleeps" and not self.idle):
            yield ("look",)
        elif self.state == "tries":
            yield ("lead",)

    def look(self, world: World) -> None:
        self.idle = not self.ended
        self.state = "tries" if self.idle else "begins"
        self.open -= set(self.ended)
        self.ended = ()

    def lead(self, world: World) -> None:
        leads = not self.open.isdisjoint(world.unread) and world.leadership.lead()
        self.state = "leads" if leads else "sleeps"


class Closer(Thread):
    """Closes the channel: ends one remaining operation after another."""

    left: tuple[str, ...] = ()

    def steps(self, world: World) -> Iterator[Step]:
        if self.state == "begins":
            yield ("close",)
        elif self.state == "ends":
            yield ("end",)

    def close(self, world: World) -> None:
        world.closed = True
        world.leadership.close()
        self.left, world.unread = tuple(world.unread), []
        self.state = "ends"

    def end(self, world: World) -> None:
        if self.left:
            operation, *left = self.left
            self.left = tuple(left)
            world.end(operation)
        else:
            world.threads[-1].wake()
            self.state = "is done"


class World:
    """All threads, the last of which is the reserve, and their shared state."""

    def __init__(self, kind: type[Leadership], *threads: Thread, futures: Sequence[str] = ()) -> None:
        reserve = Reserve(futures)
        make_signal: Any = Signal
        self.threads: list[Any] = [*threads, reserve]
        self.leadership = kind(reserve.wake, make_signal)
        self.unread = sorted({each.operation for each in self.waiters} | set(futures))
        self.done: frozenset[str] = frozenset()
        self.closed = False

    @property
    def waiters(self) -> list[Waiter]:
        return [thread for thread in self.threads if isinstance(thread, Waiter)]

    def end(self, operation: str) -> None:
        self.done |= {operation}
        self.leadership.ended(operation)
        reserve = self.threads[-1]
        if operation in reserve.open:
            reserve.ended = (*reserve.ended, operation)
            reserve.wake()

    def after(self, thread: int, step: Step) -> World:
        """Returns the world after that thread has done this step."""
        world = copy.copy(self)
        world.threads = [copy.copy(each) for each in self.threads]
        signals: dict[Any, Any] = {}
        for waiter in world.waiters:
            signals[waiter.signal] = waiter.signal = copy.copy(waiter.signal)
        world.leadership = copy.copy(self.leadership)
        world.leadership._followers = {signals[s]: op for s, op in self.leadership._followers.items()}
        world.leadership._wake_reserve = world.threads[-1].wake
        name, *arguments = step
        getattr(world.threads[thread], name)(world, *arguments)
        return world

    def key(self) -> object:
        """A key that is equal for equivalent states."""
        number = {waiter.signal: i for i, waiter in enumerate(self.waiters)}
        threads = [
            tuple(sorted((k, v.woken if isinstance(v, Signal) else v) for k, v in vars(each).items()))
            for each in self.threads
        ]
        followers = tuple(number[signal] for signal in self.leadership._followers)
        return followers, self.leadership.taken, tuple(self.unread), self.done, self.closed, tuple(threads)

    def check(self, before: World) -> None:
        """Checks the invariants of `Leadership`, for a state and for the step that led to it."""
        followers = self.leadership._followers
        leaders = sum(thread.state == "leads" for thread in self.threads)
        assert leaders == self.leadership.taken, "1: at most one leads"
        assert not followers or leaders or self.closed or any(each.is_on_its_way for each in self.waiters), (
            "2: there are followers, but no thread leads or will lead"
        )
        woken_to_lead = [
            mine
            for mine, was in zip(self.waiters, before.waiters)
            if mine.is_on_its_way and not was.is_on_its_way and not mine.enough(self)
        ]
        assert not woken_to_lead or (len(woken_to_lead) == 1 and not leaders), "3: woken for nothing"
        assert not before.closed or before.leadership.taken or not leaders, "5: somebody begins to lead after the close"

    def check_end(self) -> None:
        """Checks a state in which no thread has a possible step."""
        assert all(waiter.state == "is done" for waiter in self.waiters), "a waiter sleeps for ever"
        assert not self.threads[-1].open, "4: a future is never completed"
        assert not self.leadership.taken


def visit_all(world: World) -> int:
    """Visits all states, and returns their number."""
    seen = {world.key()}
    todo = [world]
    while todo:
        world = todo.pop()
        steps = [(number, step) for number, thread in enumerate(world.threads) for step in thread.steps(world)]
        for number, step in steps:
            after = world.after(number, step)
            after.check(world)
            if (key := after.key()) not in seen:
                seen.add(key)
                todo.append(after)
        if not steps:
            world.check_end()
    return len(seen)


SCENES: dict[str, Callable[[type[Leadership]], World]] = {
    "three operations": lambda kind: World(kind, Waiter("a"), Waiter("b"), Waiter("c")),
    "one for two": lambda kind: World(kind, Waiter("a"), Waiter("a"), Waiter("b")),
    "a visitor": lambda kind: World(kind, Waiter("a"), Waiter("b"), Visitor()),
    "deadlines": lambda kind: World(kind, Waiter("a", may_stop=True), Waiter("b", may_stop=True), Waiter("b")),
    "futures": lambda kind: World(kind, Waiter("a"), Waiter("b", may_stop=True), futures=["a", "c"]),
    "a close": lambda kind: World(kind, Waiter("a", may_stop=True), Waiter("b"), Closer(), futures=["b"]),
}


@pytest.mark.parametrize("scene", SCENES)
def test_every_order_of_steps(scene: str) -> None:
    assert visit_all(SCENES[scene](Leadership)) > 1000


class NeverFollows(Leadership):
    def lead(self) -> bool:
        self.taken = True
        return True


class StepsDownAlone(Leadership):
    def step_down(self) -> None:
        self.taken = False


class ForgetsTheReserve(Leadership):
    def _pass_on(self) -> None:
        if self._followers:
            super()._pass_on()


class TakesTheLeadAlong(Leadership):
    def leave(self, signal: Any) -> None:
        self._followers.pop(signal, None)


class StaysAmongFollowers(Leadership):
    def leave(self, signal: Any) -> None:
        if signal not in self._followers:
            self._pass_on()


class WakesNobody(Leadership):
    def ended(self, operation: object) -> None:
        pass


class WakesAll(Leadership):
    def ended(self, operation: object) -> None:
        for signal in list(self._followers):
            self._wake(signal)


class LeadsAfterTheClose(Leadership):
    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("mistake", "scene", "found"),
    [
        (NeverFollows, "three operations", "1: at most one leads"),
        (StepsDownAlone, "three operations", "2: there are followers"),
        (TakesTheLeadAlong, "deadlines", "2: there are followers"),
        (StaysAmongFollowers, "deadlines", "2: there are followers"),
        (WakesNobody, "one for two", "2: there are followers"),
        (WakesAll, "three operations", "3: woken for nothing"),
        (ForgetsTheReserve, "futures", "4: a future is never completed"),
        (LeadsAfterTheClose, "a close", "5: somebody begins to lead"),
    ],
)
def test_a_mistake_is_found(mistake: type[Leadership], scene: str, found: str) -> None:
    with pytest.raises(AssertionError, match=found):
        visit_all(SCENES[scene](mistake))
