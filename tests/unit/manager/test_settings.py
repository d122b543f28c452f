from __future__ import annotations

import math
import re
from datetime import timedelta
from typing import Any, Optional

import pytest

from torchft._manager import settings
from torchft._manager.quorum import group
from torchft._manager.settings import (
    HealMode,
    Settings,
    extract_trailing_digits,
    get_timeout,
    global_rank,
    resolve,
)

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [value for name, value in vars(settings).items() if name.endswith("_ENV")]
    for name in [*names, "TORCHFT_LIGHTHOUSE"]:
        monkeypatch.delenv(name, raising=False)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)


def make(**given: Any) -> Settings:
    defaults: dict[str, Any] = dict(
        rank=None,
        world_size=None,
        store_addr=None,
        store_port=None,
        lighthouse_addr=None,
        port=None,
        timeout=timedelta(seconds=60),
        quorum_timeout=timedelta(seconds=61),
        connect_timeout=timedelta(seconds=62),
        heartbeat_interval=timedelta(milliseconds=100),
        quorum_retries=0,
    )
    return resolve({**defaults, **given})


def test_torchrun_environment_fills_in() -> None:
    got = make()
    assert (got.group_rank, got.group_world_size, got.store_addr, got.store_port) == (1, 2, "host", 29500)


def test_arguments_win_over_torchrun() -> None:
    got = make(rank=0, world_size=1, store_addr="other", store_port=1, lighthouse_addr="http://l:1", port=5)
    assert got.group_rank == 0 and got.group_world_size == 1 and got.store_addr == "other"
    assert got.store_port == 1 and got.manager_port == 5 and got.require_lighthouse() == "http://l:1"


def test_environment_wins_over_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_TIMEOUT_SEC", "1")
    monkeypatch.setenv("TORCHFT_QUORUM_TIMEOUT_SEC", "2")
    monkeypatch.setenv("TORCHFT_CONNECT_TIMEOUT_SEC", "3")
    monkeypatch.setenv("TORCHFT_QUORUM_RETRIES", "4")
    monkeypatch.setenv("TORCHFT_MANAGER_PORT", "5")
    got = make()
    seconds = [d.total_seconds() for d in (got.timeout, got.quorum_timeout, got.connect_timeout)]
    assert seconds == [1, 2, 3] and got.quorum_retries == 4 and got.manager_port == 5


@pytest.mark.parametrize("name", TORCHRUN)
def test_missing_environment_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name)
    with pytest.raises(ValueError, match=f"{name} is not set.*torchrun"):
        make()


def test_missing_lighthouse_is_named() -> None:
    with pytest.raises(ValueError, match="TORCHFT_LIGHTHOUSE"):
        make().require_lighthouse()


def test_missing_lighthouse_is_named_before_anything_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the Manager would first wait a minute for the store at MASTER_ADDR."""

    def open_store(settings: Settings) -> None:
        raise AssertionError("the store was opened")

    monkeypatch.setattr(group, "_open_store", open_store)
    with pytest.raises(ValueError, match="TORCHFT_LIGHTHOUSE"):
        group.join_group(
            make(rank=0), None, "here", start_server=lambda **_: pytest.fail("the server was started")
        )


@pytest.mark.parametrize(
    "name",
    [
        "RANK",
        "WORLD_SIZE",
        "MASTER_PORT",
        "TORCHFT_TIMEOUT_SEC",
        "TORCHFT_QUORUM_TIMEOUT_SEC",
        "TORCHFT_CONNECT_TIMEOUT_SEC",
        "TORCHFT_QUORUM_RETRIES",
        "TORCHFT_MANAGER_PORT",
    ],
)
def test_environment_that_is_no_integer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1.5s")
    with pytest.raises(ValueError, match=f"{name}='1.5s' is no integer"):
        make()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 2}, "rank=2 is outside its group: allowed are 0 to 1 (world_size=2)"),
        ({"rank": -1}, "rank=-1"),
        ({"world_size": 0}, "world_size=0: a group has at least 1 rank"),
        ({"store_port": 0}, "store_port=0: a port is 1 to 65535"),
        ({"port": 70000}, "manager_port=70000: a port is 0 to 65535"),
        ({"timeout": timedelta(0)}, "timeout=0s: must be longer than 0s"),
        ({"quorum_timeout": timedelta(seconds=-1)}, "quorum_timeout=-1s: must be longer than 0s"),
        ({"connect_timeout": timedelta(0)}, "connect_timeout=0s: must be longer than 0s"),
        ({"heartbeat_interval": timedelta(0)}, "heartbeat_interval=0s: must be longer than 0s"),
        ({"timeout": 60}, "timeout=60: must be a datetime.timedelta"),
        ({"quorum_retries": -1}, "quorum_retries=-1: allowed are 0 and more"),
    ],
)
def test_bad_values_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**given)


def test_zero_timeout_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_TIMEOUT_SEC", "0")
    with pytest.raises(ValueError, match="TORCHFT_TIMEOUT_SEC=0s: must be longer than 0s"):
        make()
    monkeypatch.setenv("TORCHFT_TIMEOUT_SEC", "9" * 20)
    with pytest.raises(ValueError, match=r"TORCHFT_TIMEOUT_SEC='9+' is too long"):
        make()


def test_the_number_of_a_start_is_alike_on_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert settings.start_number() == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert settings.start_number() == 2
    monkeypatch.setenv("TORCHFT_ROUND", "7")
    assert settings.start_number() == 7


def test_get_timeout() -> None:
    assert get_timeout("5", timedelta(seconds=1)) == timedelta(seconds=5)
    assert get_timeout(None, timedelta(seconds=1)) == timedelta(seconds=1)
    with pytest.raises(ValueError, match="five"):
        get_timeout("five", timedelta(seconds=1))


@pytest.mark.parametrize(("text", "digits"), [("abc12", 12), ("abc", 0), ("12a", 0), ("", 0), ("007", 7)])
def test_extract_trailing_digits(text: str, digits: int) -> None:
    assert extract_trailing_digits(text) == digits


def test_global_rank_reads_the_name_not_the_uuid() -> None:
    assert global_rank("train_3:9f1c7", group_rank=1, group_world_size=4) == 13
    assert global_rank("9f1c7", group_rank=1, group_world_size=4) == 29


@pytest.mark.parametrize(
    ("given", "variable", "commits"),
    [
        (None, None, None),
        (0, None, 0),
        (7, "9", 7),
        ("auto", None, None),
        (None, "auto", None),
        (None, "250", 250),
    ],
)
def test_the_number_of_commits_in_which_weights_are_compared(
    given: Any, variable: str | None, commits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("TORCHFT_COMPARE_COMMITS", variable)
    made = make(compare_commits=given)
    assert made.compare_commits == commits
    assert made.compares_by_default is (given is None and variable is None)


@pytest.mark.parametrize("bad", [-1, True, 1.5, "often", "7"])
def test_a_bad_number_of_commits_is_refused(bad: Any) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"compare_commits={bad!r}: allowed are 0 (never), a number")
    ):
        make(compare_commits=bad)


@pytest.mark.parametrize("bad", ["-1", "often", ""])
def test_a_bad_number_of_commits_in_the_environment_is_refused(
    bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHFT_COMPARE_COMMITS", bad)
    with pytest.raises(
        ValueError, match=re.escape(f"TORCHFT_COMPARE_COMMITS={bad!r}: allowed are 0 (never)")
    ):
        make()


@pytest.mark.parametrize(
    ("given", "variable", "steps"),
    [
        (None, None, 0),
        (None, "auto", None),
        ("auto", "0", None),
        (8, None, 8),
        (None, "8", 8),
        (0, "auto", 0),
    ],
)
def test_the_steps_between_two_snapshots(
    given: Any, variable: str | None, steps: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("TORCHFT_SNAPSHOTS", variable)
    assert make(snapshots=given).snapshots == steps


def test_a_bad_number_of_steps_between_snapshots_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    why = ': allowed are 0 (never), a number of steps, or "auto": chosen by their cost'
    with pytest.raises(ValueError, match=re.escape(f"snapshots=-1{why}")):
        make(snapshots=-1)
    monkeypatch.setenv("TORCHFT_SNAPSHOTS", "on")
    with pytest.raises(ValueError, match=re.escape(f"TORCHFT_SNAPSHOTS='on'{why}")):
        make()


@pytest.mark.parametrize(
    ("given", "variable", "copies"), [(None, None, 0), (None, "2", 2), (3, "2", 3), (0, "2", 0)]
)
def test_the_groups_that_keep_each_part_of_a_snapshot(
    given: int | None, variable: str | None, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("TORCHFT_SNAPSHOT_COPIES", variable)
    assert make(snapshots=2, snapshot_copies=given).snapshot_copies == copies


def test_a_bad_number_of_groups_that_keep_a_part_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for copies in (1, -1, True, "2"):
        why = f"snapshot_copies={copies!r}: allowed are 0 (all groups), or a number of groups from 2"
        with pytest.raises(ValueError, match=re.escape(why)):
            make(snapshots=2, snapshot_copies=copies)
    why = "snapshots=1 with snapshot_copies=2: allowed are 0 (none), 'auto', and a number of steps from 2"
    with pytest.raises(ValueError, match=re.escape(why)):
        make(snapshots=1, snapshot_copies=2)
    assert make(snapshots=0, snapshot_copies=2).snapshots == 0
    assert make(snapshots="auto", snapshot_copies=2).snapshots is None
    monkeypatch.setenv("TORCHFT_SNAPSHOT_COPIES", "1")
    with pytest.raises(ValueError, match="TORCHFT_SNAPSHOT_COPIES='1': allowed are 0"):
        make()


def test_the_rate_of_audits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make().audit == 0
    assert make(audit=0.01).audit == 0.01 and make(audit=1).audit == 1
    for rate in (-0.1, 1.5, 1e-9, True, "often", math.nan):
        why = f"audit={rate!r}: allowed are 0 (never), or the part of the steps that are audited, from 1e-06"
        with pytest.raises(ValueError, match=re.escape(why)):
            make(audit=rate)
    monkeypatch.setenv("TORCHFT_AUDIT", "0.5")
    assert make().audit == 0.5 and make(audit=0).audit == 0
    monkeypatch.setenv("TORCHFT_AUDIT", "each")
    with pytest.raises(ValueError, match="TORCHFT_AUDIT='each': allowed are 0"):
        make()


def test_the_action_of_a_group_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make().on_divergence.value == "report"
    assert make(on_divergence="evict").on_divergence.value == "evict"
    monkeypatch.setenv("TORCHFT_ON_DIVERGENCE", "heal")
    assert make().on_divergence.value == "heal"
    with pytest.raises(ValueError, match=re.escape("on_divergence='cry': allowed are report, heal, evict")):
        make(on_divergence="cry")


@pytest.mark.parametrize(
    ("given", "variables", "mode"),
    [
        ({}, {}, None),
        ({}, {"TORCHFT_HEAL_ALONG": ""}, None),
        ({}, {"TORCHFT_HEAL_ALONG": "0"}, "at_once"),
        ({"heal_along": False}, {}, "at_once"),
        ({"heal": "auto"}, {"TORCHFT_HEAL": "in_passing", "TORCHFT_HEAL_ALONG": "1"}, "auto"),
        ({}, {"TORCHFT_HEAL": "auto", "TORCHFT_HEAL_ALONG": "1"}, "auto"),
        ({"heal_along": True}, {"TORCHFT_HEAL": "at_once"}, "in_passing"),
        ({"heal_along": False}, {"TORCHFT_HEAL_ALONG": "1"}, "at_once"),
        ({}, {"TORCHFT_HEAL_ALONG": "1"}, "in_passing"),
    ],
)
def test_how_groups_heal(
    given: Any, variables: dict[str, str], mode: Optional[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert make(**given).heal == (HealMode(mode) if mode else None)


def test_bad_settings_of_heals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match="heal='auto' and heal_along=True: these are two names of one setting"
    ):
        make(heal="auto", heal_along=True)
    with pytest.raises(ValueError, match="heal='slow': allowed are at_once, in_passing, auto"):
        make(heal="slow")
    monkeypatch.setenv("TORCHFT_HEAL_ALONG", "yes")
    with pytest.raises(
        ValueError, match=re.escape("TORCHFT_HEAL_ALONG='yes': allowed are 0 (off) and 1 (on)")
    ):
        make()
    monkeypatch.setenv("TORCHFT_HEAL", "no")
    with pytest.raises(ValueError, match="TORCHFT_HEAL='no': allowed are at_once, in_passing, auto"):
        make()
