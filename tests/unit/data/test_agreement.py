from __future__ import annotations

from dataclasses import replace

import pytest

from torchft.data.agreement import Agreement, Finding, Verdict, compare
from torchft.data.position import Plan, Position, Stamp

PLAN = Plan(length=10, global_batch_size=4, micro_batch_size=2, epochs=2)
TRAINS = Finding(Verdict.TRAINS)


def at(*positions: tuple[int, int]) -> dict[str, Stamp]:
    """Groups a, b, c, … at these positions."""
    return {name: PLAN.stamp(Position(*position)) for name, position in zip("abcdefgh", positions)}


def heals(name: str, old: tuple[int, int], new: tuple[int, int]) -> Finding:
    reason = f"group {name} heals from batch {old[1]} of epoch {old[0]} to batch {new[1]} of epoch {new[0]}"
    return Finding(Verdict.HEALS, reason)


def test_all_are_there() -> None:
    expected = Agreement(Position(1, 2), ended=False, groups={"a": TRAINS, "b": TRAINS})
    assert compare(at((1, 2), (1, 2)), ["a", "b"]) == expected


def test_a_group_that_is_behind_heals() -> None:
    found = compare(at((0, 1), (1, 2), (0, 0)), ["b"])
    assert found.position == Position(1, 2)
    assert found.groups == {"a": heals("a", (0, 1), (1, 2)), "b": TRAINS, "c": heals("c", (0, 0), (1, 2))}


def test_a_group_without_the_newest_weights_heals_although_its_position_is_that_of_the_job() -> None:
    found = compare(at((0, 1), (0, 1)), ["b"])
    assert found.groups == {"a": heals("a", (0, 1), (0, 1)), "b": TRAINS}


@pytest.mark.parametrize(
    ("positions", "job", "trains"),
    [
        ([(0, 1), (0, 2), (0, 2)], (0, 2), "bc"),
        ([(0, 2), (0, 1), (0, 2)], (0, 2), "ac"),
        ([(0, 1), (0, 2)], (0, 1), "a"),
        ([(0, 2), (0, 1)], (0, 2), "a"),
        ([(0, 0), (0, 1), (0, 2), (0, 1), (0, 0)], (0, 0), "ae"),
    ],
)
def test_the_job_is_where_most_participants_are(
    positions: list[tuple[int, int]], job: tuple[int, int], trains: str
) -> None:
    stamps = at(*positions)
    found = compare(stamps, set(stamps))
    assert found.position == Position(*job)
    assert "".join(name for name, finding in found.groups.items() if finding == TRAINS) == trains
    backwards = {name: stamps[name] for name in reversed(stamps)}
    assert compare(backwards, list(backwards)) == found  # whatever order a group knows the others in


def test_a_crowd_that_heals_decides_nothing() -> None:
    assert compare(at((0, 0), (0, 0), (0, 2)), ["c"]).position == Position(0, 2)


@pytest.mark.parametrize("setting", ["length", "global_batch_size", "micro_batch_size", "seed", "epochs"])
@pytest.mark.parametrize("participants", [["a", "b"], ["a", "b", "c"]])
def test_a_group_of_another_job_is_refused(setting: str, participants: list[str]) -> None:
    stamps = at((0, 1), (0, 1), (0, 1))
    ours = getattr(stamps["a"], setting)
    stamps["c"] = stamps["c"]._replace(**{setting: ours + 1})
    reason = f"group c does not belong to this job: {setting} is {ours + 1}, the others have {ours}"
    found = compare(stamps, participants)
    assert found.groups == {"a": TRAINS, "b": TRAINS, "c": Finding(Verdict.REFUSED, reason)}


def test_all_that_differs_is_named() -> None:
    stamps = at((0, 1), (0, 1))
    stamps["b"] = replace(PLAN, length=9, shuffle=False).stamp(Position())
    found = compare(stamps, ["a"]).groups["b"]
    assert found.reason.endswith("length is 9, the others have 10, shuffle is False, the others have True")


def test_the_end_is_the_same_for_all() -> None:
    found = compare(at((2, 0), (1, 2), (2, 0)), ["a", "c"])
    assert found.ended
    assert found.groups["b"] == heals("b", (1, 2), (2, 0))  # it leaves with the weights of the end
    assert not compare(at((1, 2), (1, 2)), ["a", "b"]).ended


@pytest.mark.parametrize("participants", [[], ["a", "z"]])
def test_participants_that_are_not_there(participants: list[str]) -> None:
    with pytest.raises(ValueError, match=r"participants is .*: allowed are one or more of \['a', 'b'\]"):
        compare(at((0, 0), (0, 0)), participants)
