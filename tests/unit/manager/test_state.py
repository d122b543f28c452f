from __future__ import annotations

import threading
from datetime import timedelta
from typing import Optional

import pytest
import torch

from torchft._manager.heal.state import UserState
from torchft._manager.rank import RankState


def test_read_and_load_all_parts() -> None:
    state = UserState(RankState(timedelta(seconds=5)))
    loaded = {}
    for key in ("model", "data"):
        state.register(
            key, lambda value, key=key: loaded.__setitem__(key, value), lambda key=key: f"{key} state"
        )
    assert state.read() == {"model": "model state", "data": "data state"}
    state.load({"model": 1, "data": 2, "unknown": 3})
    assert loaded == {"model": 1, "data": 2}


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"default": 1}, 1),
        ({"set_state_dict_fns": 2}, 2),
        ({"default": 1, "set_state_dict_fns": 2}, 1),
        ({"set_state_dict_fns": 2, "model": 3}, 2),
    ],
)
def test_the_main_part_is_found_by_the_name_of_any_generation(parts: dict[str, int], expected: int) -> None:
    state, loaded = UserState(RankState(timedelta(seconds=5))), list[int]()
    state.register("default", loaded.append, lambda: 1)
    state.load(parts)
    assert loaded == [expected]


def test_key_twice() -> None:
    state = UserState(RankState(timedelta(seconds=5)))
    state.register("model", print, dict)
    with pytest.raises(ValueError, match=r"'model' is registered already; keys: \['model'\]"):
        state.register("model", print, dict)


def test_nothing_registered() -> None:
    state = UserState(RankState(timedelta(seconds=5)))
    with pytest.raises(RuntimeError, match="set_state_dict_fns"):
        state.read()
    with pytest.raises(RuntimeError, match="set_state_dict_fns"):
        state.load({})


def test_source_without_a_part() -> None:
    state = UserState(RankState(timedelta(seconds=5)))
    state.register("model", print, dict)
    with pytest.raises(RuntimeError, match=r"lacks \['model'\]; it has \['other'\]"):
        state.load({"other": 1})


def test_reading_waits_while_disallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    state = UserState(RankState(timedelta(seconds=30)))
    state.register("model", print, lambda: 1)
    state.disallow_read()
    state.disallow_read()  # a second call has no further effect
    went_on, read = threading.Event(), []  # the reader waits for the lock, or has read without waiting
    wait = state.lock._cond.wait

    def reported_wait(timeout: Optional[float] = None) -> bool:
        went_on.set()
        return wait(timeout)

    monkeypatch.setattr(state.lock._cond, "wait", reported_wait)

    def reader() -> None:
        read.append(state.read())
        went_on.set()

    thread = threading.Thread(target=reader)
    thread.start()
    assert went_on.wait(30)
    assert read == []
    state.allow_read()
    state.allow_read()
    thread.join(30)
    assert read == [{"model": 1}]


def test_reading_ends_at_its_timeout() -> None:
    state = UserState(RankState(timedelta(seconds=0.01)))
    state.register("model", print, lambda: 1)
    state.disallow_read()
    with pytest.raises(TimeoutError):
        state.read()


def test_the_function_that_runs_is_named() -> None:
    rank, named = RankState(timedelta(seconds=5)), list[object]()
    state = UserState(rank)
    state.register(
        "model",
        lambda value: named.append(rank.activity(waits=False)),
        lambda: named.append(rank.activity(waits=False)),
    )
    state.load(state.read())
    assert named == [
        ("runs the state_dict function 'model'", False, ""),
        ("runs the load_state_dict function 'model'", False, ""),
    ]
    state.register("bad", lambda value: None, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        state.read()
    assert rank.activity(waits=False) is None


def test_the_state_of_another_optimizer_is_refused() -> None:
    """Adam would fail at its next step."""
    mine, theirs = (
        kind([torch.nn.Parameter(torch.ones(2))], lr=0.1) for kind in (torch.optim.Adam, torch.optim.SGD)
    )
    state = UserState(RankState(timedelta(seconds=5)))
    state.optimizers = [mine]
    state.register("optimizer", mine.load_state_dict, mine.state_dict)
    state.load(state.read())
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"another optimizer than Adam: its parameter group 0 has no betas, eps"
        ):
            state.load({"optimizer": theirs.state_dict()})
