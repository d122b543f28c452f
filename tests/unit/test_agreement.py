"""What reconfigure handles announce, and its comparison."""

from __future__ import annotations

import pytest

from torchft._agreement import (
    COMPARES,
    CONNECTIONS,
    EQUAL,
    HEALS,
    LAYOUT,
    LOADER,
    all_announce,
    announce,
    announced,
    bare,
    differing,
    explained,
)

BOTH = ((COMPARES, "1/10"), (CONNECTIONS, "a/2//0"), (HEALS, ""))


@pytest.mark.parametrize(
    "handle", ['{"id": "a"}', "native", "{no json", '{"torchft_compares": 3}', "", "[1]", "3"]
)
def test_a_handle_that_announces_nothing(handle: str) -> None:
    assert announced(handle, COMPARES) == ""


def test_texts_in_a_handle_of_torchft() -> None:
    handle = announce('{"id": "a"}', BOTH)
    assert handle == '{"id": "a", "torchft_compares": "1/10", "torchft_connections": "a/2//0"}'
    assert announced(handle, COMPARES) == "1/10" and announced(handle, CONNECTIONS) == "a/2//0"
    assert announce('{"id": "a"}', ((COMPARES, ""),)) == '{"id": "a"}'


def test_the_handle_of_another_project_stays_as_it_is() -> None:
    assert announce("another project's", BOTH) == "another project's"


def test_texts_after_a_native_handle_are_removed_before_pytorch_gets_it() -> None:
    native = "a:native:handle with spaces"
    handle = announce(native, BOTH, native=True)
    assert handle != native and bare(handle) == bare(native) == native
    assert announce(native, ((COMPARES, ""),), native=True) == native
    assert announced(handle, COMPARES) == "1/10" and announced(handle, CONNECTIONS) == "a/2//0"
    assert announced(handle, HEALS) == ""


def test_what_all_groups_can_do() -> None:
    one, other = announce('{"id": "a"}', ((HEALS, "1"),)), announce("native", ((HEALS, "1"),), native=True)
    assert all_announce([one, other], HEALS)
    assert not all_announce([one, other, "{}"], HEALS)
    assert not all_announce([one], HEALS, "2")


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ({}, {}, None),
        ({LAYOUT: "x"}, {}, None),  # upstream's group, for example
        ({LAYOUT: "x"}, {LAYOUT: "y"}, LAYOUT),
        ({LOADER: "L"}, {LAYOUT: "x"}, LOADER),  # a loader is needed in all groups or in none
        ({COMPARES: "1/10"}, {COMPARES: "1/20"}, None),
    ],
)
def test_settings_that_must_be_equal(
    ours: dict[str, str], theirs: dict[str, str], expected: str | None
) -> None:
    assert differing(ours, theirs, *EQUAL) == expected


def test_an_error_names_the_setting_both_values_and_what_is_allowed() -> None:
    text = explained(LOADER, {}, "rank 1", {LOADER: "L"})
    assert text.startswith(
        "the data loader differs: 'none' here, 'L' in rank 1; allowed: one in all groups of a job"
    )
