"""The choice of the next source, and the effect of answers, failures and quorums on it."""

from __future__ import annotations

import random

from torchft._manager.sources import FIRST_PAUSE, LONGEST_PAUSE, MAX_FAILURES, Sources


def named(assigned: str = "a", *additional: str) -> Sources:
    sources = Sources()
    sources.quorum(assigned, additional)
    return sources


def test_before_a_quorum_there_is_none() -> None:
    sources = Sources()
    assert sources.pick(True, 0.0) is None and "a" not in sources and not sources.failing


def test_pieces_come_from_all_sources_in_turn_and_the_rest_from_the_assigned_one() -> None:
    sources = named("a", "b", "c")
    assert [sources.pick(True, 0.0) for _ in range(6)] == ["a", "b", "c"] * 2
    assert [sources.pick(False, 0.0) for _ in range(2)] == ["a", "a"]
    assert sources.pick(True, 0.0) == "a", "data that only the assigned source has takes no turn"


def test_a_piece_of_a_failed_source_is_requested_from_another_at_once() -> None:
    sources = named("a", "b")
    assert sources.pick(True, 0.0) == "a"
    assert sources.failed("a", 0.0)
    assert [sources.pick(True, 0.0) for _ in range(2)] == ["b", "b"]
    assert sources.pick(False, 0.0) is None and sources.pause(False, 0.0) == FIRST_PAUSE
    assert sources.failing
    assert sources.pick(False, FIRST_PAUSE) == "a"
    sources.answered("a")
    assert not sources.failing


def test_pauses_double_and_the_assigned_source_ends_the_heal() -> None:
    sources, now, pauses = named("a"), 0.0, []
    while sources.failed("a", now):
        assert sources.pick(True, now) is None
        pauses.append(sources.pause(True, now))
        now += pauses[-1]
    assert pauses == [min(LONGEST_PAUSE, FIRST_PAUSE * 2**n) for n in range(MAX_FAILURES - 1)]


def test_an_additional_source_that_fails_too_often_or_refuses_is_dropped() -> None:
    sources = named("a", "b", "c")
    assert all(sources.failed("b", 0.0) for _ in range(MAX_FAILURES))
    assert sources.drop("c")
    assert not sources.drop("a"), "without the assigned source there is no heal"
    sources.quorum("a", ["b", "c"])
    assert [sources.pick(True, 0.0) for _ in range(2)] == ["a", "a"]


def test_a_new_quorum_ends_the_assigned_pause_and_drops_sources_that_it_does_not_name() -> None:
    sources = named("a", "b")
    sources.failed("a", 0.0)
    sources.failed("b", 0.0)
    sources.quorum("a", ["b"])
    assert sources.pick(False, 0.0) == "a" and sources.failing
    assert [sources.pick(True, 0.0) for _ in range(2)] == ["a", "a"]
    sources.quorum("b", [])
    assert "a" not in sources and not sources.failing
    sources.drop("b")
    assert sources.pick(True, 0.0) == "b"


def test_a_source_that_was_dropped_may_be_assigned() -> None:
    sources = named("a", "b")
    sources.drop("b")
    sources.quorum("b", ["a"])
    assert sources.pick(False, 0.0) == "b"


def test_random_histories_ask_only_named_sources_that_are_not_in_their_pause() -> None:
    for seed in range(300):
        chance = random.Random(seed)
        sources, now = Sources(), 0.0
        names: list[str] = []
        until: dict[str, float] = {}
        for _ in range(60):
            now += chance.random()
            if not names or chance.random() < 0.1:
                names = chance.sample("abcd", chance.randrange(1, 5))
                sources.quorum(names[0], names[1:])
                until = {one: at for one, at in until.items() if one in names[1:]}
            any_source = chance.random() < 0.8
            source = sources.pick(any_source, now)
            if source is None:
                pause = sources.pause(any_source, now)
                assert pause > 0 and sources.pick(any_source, now + pause) is not None, seed
                continue
            assert source in names and (any_source or source == names[0]), seed
            assert now >= until.get(source, 0.0), seed
            if chance.random() < 0.3:
                if not sources.failed(source, now):
                    assert source == names[0], seed
                    break
                until[source] = now + FIRST_PAUSE
            elif chance.random() < 0.05:
                sources.drop(source)
            else:
                sources.answered(source)
