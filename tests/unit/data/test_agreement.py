from __future__ import annotations

import pytest

from torchft.data.agreement import GroupAction, Verdict, entry, judge, next_action, step_to_announce

A, B = "ffffffff00000001", "00000001ffffffff"


def judged(*digests: str, own: str = A, leads: bool = False, heals: bool = False) -> Verdict:
    """Returns the verdict of a group whose participants have these digests, and two samples each."""
    sums = [sum(column) for column in zip(*(entry(2, digest) for digest in digests))]
    return judge(sums, own, participants=len(digests), leads=leads, heals=heals)


def test_an_entry_fits_into_three_times_64_bits_for_any_number_of_groups() -> None:
    assert entry(7, A) == (7, 2**32 - 1, 1)
    assert max(2**31 * half for half in entry(0, A)) < 2**63


@pytest.mark.parametrize("digests", [(A,), (A, A), (A,) * 1000])
@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize("heals", [True, False])
def test_equal_participants(digests: tuple[str, ...], leads: bool, heals: bool) -> None:
    assert judged(*digests, leads=leads, heals=heals) is Verdict.ALIKE


@pytest.mark.parametrize(
    ("leads", "heals", "verdict"),
    [
        (True, False, Verdict.DIFFERS),  # the others heal from it
        (False, False, Verdict.GIVES_WAY),
        (False, True, Verdict.DIFFERS),  # it takes over another state anyway
    ],
)
@pytest.mark.parametrize("digests", [(A, B), (B, A), (A, A, B), (B,), (B, B)])
def test_of_different_participants_the_first_one_counts(
    digests: tuple[str, ...], leads: bool, heals: bool, verdict: Verdict
) -> None:
    """This also holds for a spare, which adds nothing."""
    assert judged(*digests, leads=leads, heals=heals) is verdict


@pytest.mark.parametrize("found", [(), (A,), (A, A)])
@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize("heals", [True, False])
def test_missing_entries_are_no_reason_to_heal(found: tuple[str, ...], leads: bool, heals: bool) -> None:
    sums = [sum(column) for column in zip(*(entry(2, digest) for digest in found))] or [0, 0, 0]
    assert judge(sums, A, participants=3, leads=leads, heals=heals) is Verdict.INCOMPLETE


def test_a_group_that_has_to_heal_announces_an_older_step() -> None:
    assert {verdict: step_to_announce(5, verdict) for verdict in Verdict} == {
        Verdict.ALIKE: 5,
        Verdict.INCOMPLETE: 5,
        Verdict.DIFFERS: 5,
        Verdict.GIVES_WAY: 4,
    }


@pytest.mark.parametrize(
    ("at_end", "heals_in_background", "all_up_to_date", "what"),
    [
        (False, False, True, GroupAction.TRAINS),
        (False, False, False, GroupAction.TRAINS),
        (False, True, False, GroupAction.TRAINS),
        (True, True, False, GroupAction.TRAINS),  # with the others: the heal replaces its position
        (True, False, False, GroupAction.PASSES),
        (True, False, True, GroupAction.ENDS),
    ],
)
def test_actions(at_end: bool, heals_in_background: bool, all_up_to_date: bool, what: GroupAction) -> None:
    assert (
        next_action(at_end=at_end, heals_in_background=heals_in_background, all_up_to_date=all_up_to_date)
        is what
    )
