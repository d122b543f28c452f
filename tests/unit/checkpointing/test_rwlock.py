from __future__ import annotations

import threading

import pytest

from torchft.checkpointing._rwlock import RWLock

SHORT = 0.01


@pytest.mark.parametrize(
    ("held", "wanted", "works"),
    [
        ([], "r", True),
        ([], "w", True),
        (["r"], "r", True),
        (["r", "r"], "r", True),
        (["r"], "w", False),
        (["r", "r"], "w", False),
        (["w"], "r", False),
        (["w"], "w", False),
    ],
)
def test_which_holders_are_compatible(held: list[str], wanted: str, works: bool) -> None:
    lock = RWLock(timeout=SHORT)
    acquire = {"r": lock.r_acquire, "w": lock.w_acquire}
    release = {"r": lock.r_release, "w": lock.w_release}
    for kind in held:
        acquire[kind]()
    if works:
        acquire[wanted]()
        release[wanted]()
    else:
        with pytest.raises(TimeoutError):
            acquire[wanted]()
    for kind in held:
        release[kind]()
    with lock.w_lock():  # failed attempts have not changed the lock
        assert lock.w_locked()
    assert not lock.w_locked()


def test_a_timeout_names_the_holder_of_the_lock() -> None:
    lock = RWLock(timeout=SHORT)
    with (
        lock.r_lock(),
        lock.r_lock(),
        pytest.raises(TimeoutError, match=r"no write lock after .* \(timeout 0.01 s\): held by 2 reader"),
    ):
        lock.w_acquire()
    with lock.w_lock(), pytest.raises(TimeoutError, match=r"no read lock after .*: held by a writer"):
        lock.r_acquire()


@pytest.mark.parametrize("first", ["r", "w"])
def test_a_waiter_continues_when_the_holder_releases(first: str) -> None:
    lock = RWLock(timeout=10)
    (lock.r_acquire if first == "r" else lock.w_acquire)()
    waiting, got = threading.Event(), threading.Event()

    def wait_for_it() -> None:
        waiting.set()
        with lock.w_lock():
            got.set()

    thread = threading.Thread(target=wait_for_it)
    thread.start()
    assert waiting.wait(10)
    assert not got.is_set()
    # acquired by this thread, released by another
    other = threading.Thread(target=lock.r_release if first == "r" else lock.w_release)
    other.start()
    assert got.wait(10)
    thread.join(10)
    other.join(10)


def test_a_block_that_raises_releases_the_lock() -> None:
    lock = RWLock(timeout=0)
    for block in (lock.r_lock, lock.w_lock):
        with pytest.raises(KeyError), block():
            raise KeyError
    lock.w_acquire()


def test_release_without_acquire() -> None:
    with pytest.raises(RuntimeError, match="no reader"):
        RWLock().r_release()
    with pytest.raises(RuntimeError, match="no writer"):
        RWLock().w_release()


def test_no_limit_and_bad_limits() -> None:
    lock = RWLock()
    assert lock.timeout == -1
    with pytest.raises(ValueError, match="timeout is -2: allowed are"):
        RWLock(timeout=-2)
