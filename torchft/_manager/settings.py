"""The Manager's settings: from its arguments, else from environment variables of torchrun and the user."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import Any, Optional, TypeVar, Union

from torchft._checks import check_positive, switch
from torchft._security import ROUND_ENV

T = TypeVar("T")

MANAGER_ADDR_KEY: str = "manager_addr"
REPLICA_ID_KEY: str = "replica_id"

# The exit status of a rank and of `torchft run` when the job stops (poison.py): EX_DATAERR of sysexits.h.
STOPPED_STATUS = 65
# That of a node that should not train, and of `torchft run` where groups cannot start: EX_UNAVAILABLE.
BAD_NODE_STATUS = 69
# That of a rank that is told that the training has ended (JobFinished), for a launcher that sets RETURNS_ENV
# for the groups that it starts again: it must not take this for the end of the script.
LATE_STATUS = 66
#: Set by `torchft run` for a group that it starts again: `JobFinished` then has status 66. Default: none.
RETURNS_ENV: str = "TORCHFT_RETURNS"
#: Port of the manager server. Default: a free one.
MANAGER_PORT_ENV: str = "TORCHFT_MANAGER_PORT"
#: `timeout`, in whole seconds. Default: the argument's.
TIMEOUT_SEC_ENV: str = "TORCHFT_TIMEOUT_SEC"
#: `quorum_timeout`, in whole seconds. Default: the argument's.
QUORUM_TIMEOUT_SEC_ENV: str = "TORCHFT_QUORUM_TIMEOUT_SEC"
#: `connect_timeout`, in whole seconds. Default: the argument's.
CONNECT_TIMEOUT_SEC_ENV: str = "TORCHFT_CONNECT_TIMEOUT_SEC"
#: `quorum_retries`. Default: the argument's.
QUORUM_RETRIES_ENV: str = "TORCHFT_QUORUM_RETRIES"
#: `enable_error_bus`. Default: 1 (on).
FAILURE_BUS_ENV: str = "TORCHFT_FAILURE_BUS"
#: Number of groups that one state is fetched from, 1 to 4. Default: 4.
HEAL_SOURCES_ENV: str = "TORCHFT_HEAL_SOURCES"
#: `replay_failed_step`. Default: 0 (off).
REPLAY_FAILED_STEP_ENV: str = "TORCHFT_REPLAY_FAILED_STEP"
#: `compare_commits`. Default: auto.
COMPARE_COMMITS_ENV: str = "TORCHFT_COMPARE_COMMITS"
#: `on_divergence`. Default: report.
ON_DIVERGENCE_ENV: str = "TORCHFT_ON_DIVERGENCE"
#: `audit`. Default: 0.
AUDIT_ENV: str = "TORCHFT_AUDIT"
#: `snapshots`. Default: 0; auto under `torchft run`.
SNAPSHOTS_ENV: str = "TORCHFT_SNAPSHOTS"
#: `snapshot_copies`. Default: 0.
SNAPSHOT_COPIES_ENV: str = "TORCHFT_SNAPSHOT_COPIES"
#: `heal`. Default: auto with an ElasticDataLoader, else at_once.
HEAL_ENV: str = "TORCHFT_HEAL"
#: 1 stands for TORCHFT_HEAL=in_passing, 0 for at_once; TORCHFT_HEAL wins. Default: none.
HEAL_ALONG_ENV: str = "TORCHFT_HEAL_ALONG"
TORCH_FR_DUMP_TEMP_FILE_ENV: str = "TORCH_FR_DUMP_TEMP_FILE"

# The assigned source, and as many additional ones as a quorum names to a healing group (go/recovery).
MAX_SOURCES = 4

_LEAST_AUDIT = 1e-6

# Number of restarts of the workers so far, in keys: torchrun keeps the group's store over a restart.
RESTART_COUNT_ENV: str = "TORCHELASTIC_RESTART_COUNT"


class OnDivergence(Enum):
    """What a group does if its weights differ from those of most others.

    REPORT: it continues; log, events and metrics name it.
    HEAL: it takes over the state of another group.
    EVICT: ``should_commit`` raises in it, so that it ends.
    """

    REPORT = "report"
    HEAL = "heal"
    EVICT = "evict"


class HealMode(Enum):
    """How groups heal."""

    AT_ONCE = "at_once"
    IN_PASSING = "in_passing"
    AUTO = "auto"


@dataclass(frozen=True)
class Settings:
    """The settings of a Manager, checked. Durations are positive."""

    group_rank: int
    group_world_size: int
    store_addr: str
    store_port: int
    timeout: timedelta
    quorum_timeout: timedelta
    connect_timeout: timedelta
    heartbeat_interval: timedelta
    quorum_retries: int
    manager_port: int
    lighthouse_addr: Optional[str]
    restart_count: int
    enable_error_bus: bool
    replay_failed_step: bool
    reproducible_reduction: bool
    heal_sources: int  # number of groups from which one state is fetched
    # Number of commits over which one comparison of all weights and optimizer state with other groups is
    # spread; 0: no comparison; None: chosen by their size
    compare_commits: Optional[int] = 0
    # Whether compare_commits was left at its default. Then another project's process group compares nothing.
    compares_by_default: bool = False
    on_divergence: OnDivergence = OnDivergence.REPORT
    heal: Optional[HealMode] = None  # None: auto with an ElasticDataLoader, else at once
    # Number of steps between two copies of the state in shared memory; 0: none, because a script that knows
    # nothing of them may restore a state of its own; None: chosen by their cost
    snapshots: Optional[int] = 0
    # Number of groups that keep each part of such a copy; 0: all, so that one host that is left is enough
    snapshot_copies: int = 0
    audit: float = 0.0  # the part of the steps in which all groups compute one unit, which takes time

    def require_lighthouse(self) -> str:
        """The lighthouse's address; only the rank that runs the manager server needs it."""
        if not self.lighthouse_addr:
            raise ValueError(
                "the address of the lighthouse is missing: pass lighthouse_addr or set TORCHFT_LIGHTHOUSE, "
                "for example http://localhost:29510"
            )
        return self.lighthouse_addr


def resolve(given: Mapping[str, Any]) -> Settings:
    """Takes settings that the caller left out from the environment, and checks all of them.

    Args:
        given: the arguments of the Manager, by name.

    Raises:
        ValueError: names the setting, its value and what is allowed.
    """
    get, choice = given.get, partial(_choice, given)
    port = get("port")
    settings = Settings(
        group_rank=_int_setting("rank", get("rank"), "RANK"),
        group_world_size=_int_setting("world_size", get("world_size"), "WORLD_SIZE"),
        store_addr=get("store_addr") or _required_env("store_addr", "MASTER_ADDR"),
        store_port=_int_setting("store_port", get("store_port"), "MASTER_PORT"),
        timeout=duration_from_env(TIMEOUT_SEC_ENV, given["timeout"]),
        quorum_timeout=duration_from_env(QUORUM_TIMEOUT_SEC_ENV, given["quorum_timeout"]),
        connect_timeout=duration_from_env(CONNECT_TIMEOUT_SEC_ENV, given["connect_timeout"]),
        heartbeat_interval=given["heartbeat_interval"],
        quorum_retries=int_from_env(QUORUM_RETRIES_ENV, given["quorum_retries"]),
        manager_port=port if port is not None else int_from_env(MANAGER_PORT_ENV, 0),
        lighthouse_addr=get("lighthouse_addr") or os.environ.get("TORCHFT_LIGHTHOUSE"),
        restart_count=start_number(),
        enable_error_bus=switch(FAILURE_BUS_ENV, default=True, given=get("enable_error_bus")),
        replay_failed_step=switch(REPLAY_FAILED_STEP_ENV, given=get("replay_failed_step")),
        reproducible_reduction=get("reproducible_reduction", False),
        heal_sources=choice("", HEAL_SOURCES_ENV, str(MAX_SOURCES), _sources, _SOURCES),
        compare_commits=choice("compare_commits", COMPARE_COMMITS_ENV, "auto", _number_or_auto, _COMMITS),
        compares_by_default=get("compare_commits") is None and COMPARE_COMMITS_ENV not in os.environ,
        on_divergence=choice(
            "on_divergence", ON_DIVERGENCE_ENV, "report", OnDivergence, _values(OnDivergence)
        ),
        heal=_heal(given),
        snapshots=choice("snapshots", SNAPSHOTS_ENV, "0", _number_or_auto, _STEPS),
        snapshot_copies=choice("snapshot_copies", SNAPSHOT_COPIES_ENV, "0", _copies, _GROUPS),
        audit=choice("audit", AUDIT_ENV, "0", _audit, _RATES),
    )
    _check(settings)
    return settings


def _choice(
    given: Mapping[str, Any], argument: str, env: str, default: str, parse: Callable[[Any], T], allowed: str
) -> T:
    """A setting, as the caller gave it, else from the environment. `parse` raises if it is not allowed."""
    own = given.get(argument)
    name, value = (argument, own) if own is not None else (env, os.environ.get(env, default))
    try:
        if isinstance(value, bool):
            raise ValueError
        # Only the environment has numbers as text.
        return parse(int(value) if own is None and value.isdecimal() else value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={value!r}: allowed are {allowed}") from None


_COMMITS = '0 (never), a number of commits, or "auto": chosen by the size'
_STEPS = '0 (never), a number of steps, or "auto": chosen by their cost'
_SOURCES = f"1 (the assigned one) to {MAX_SOURCES}"
_GROUPS = "0 (all groups), or a number of groups from 2"
_RATES = f"0 (never), or the part of the steps that are audited, from {_LEAST_AUDIT:g} to 1"


def _number_or_auto(value: Union[int, str]) -> Optional[int]:
    """A number of commits or steps; 0: never, None: "auto"."""
    if value == "auto":
        return None
    if not isinstance(value, int) or value < 0:
        raise ValueError
    return value


def _sources(value: Union[int, str]) -> int:
    if not isinstance(value, int) or not 1 <= value <= MAX_SOURCES:
        raise ValueError
    return value


def _copies(value: Union[int, str]) -> int:
    if not isinstance(value, int) or value < 0 or value == 1:
        raise ValueError
    return value


def _audit(value: Union[float, str]) -> float:
    rate = float(value)
    if not (rate == 0 or _LEAST_AUDIT <= rate <= 1):
        raise ValueError
    return rate


def _values(kind: type[Enum]) -> str:
    return ", ".join(each.value for each in kind)


def get_timeout(timeout_sec_env: Optional[str], default_timeout_sec: timedelta) -> timedelta:
    """Returns the timeout that an environment variable's value sets, else the default.

    Args:
        timeout_sec_env: the variable's value in whole seconds, None if it is not set.
        default_timeout_sec: used when it is not set.

    Raises:
        ValueError: the value is no integer.
    """
    if timeout_sec_env is None:
        return default_timeout_sec
    return timedelta(seconds=int(timeout_sec_env))


def duration_from_env(name: str, default: timedelta) -> timedelta:
    """Returns the duration that an environment variable sets in seconds, else the default."""
    try:
        value = get_timeout(os.environ.get(name), default)
    except ValueError:
        raise ValueError(f"{name}={os.environ[name]!r} is no integer: it takes whole seconds") from None
    except OverflowError:
        raise ValueError(
            f"{name}={os.environ[name]!r} is too long: at most {timedelta.max.days} days"
        ) from None
    if name in os.environ:
        check_positive(name, value)
    return value


def _heal(given: Mapping[str, Any]) -> Optional[HealMode]:
    """How groups heal; None: nothing is set. ``heal_along`` and its variable are other names of these."""
    heal, along = given.get("heal"), given.get("heal_along")
    if heal is not None and along is not None:
        raise ValueError(
            f"heal={heal!r} and heal_along={along}: these are two names of one setting, pass one of them"
        )
    if heal is not None or (along is None and HEAL_ENV in os.environ):
        return _choice(given, "heal", HEAL_ENV, "", HealMode, _values(HealMode))
    if along is None and not os.environ.get(HEAL_ALONG_ENV, "").strip():
        return None
    return HealMode.IN_PASSING if switch(HEAL_ALONG_ENV, given=along) else HealMode.AT_ONCE


def start_number() -> int:
    """The number of this start of a group's ranks, alike on its nodes: the round of torchft's rendezvous,
    else torchrun's restarts, of which the agent of a node that replaces another one counts its own only.
    """
    return int_from_env(ROUND_ENV, int_from_env(RESTART_COUNT_ENV, 0))


def int_from_env(name: str, default: int) -> int:
    """Returns the integer that an environment variable sets, else the default."""
    value = os.environ.get(name)
    if value is None:
        return default
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name}={value!r} is no integer") from None


def extract_trailing_digits(s: str) -> int:
    """Returns the number at the end of a string, 0 if there is none: ``"train_12"`` gives 12."""
    head = s.rstrip("0123456789")
    return int(s[len(head) :] or 0)


def global_rank(replica_id: str, group_rank: int, group_world_size: int) -> int:
    """A rank's global number. The group's number is taken from the end of the name in ``{name}:{uuid}``."""
    return extract_trailing_digits(replica_id.split(":")[0]) * group_world_size + group_rank


def _required_env(argument: str, env: str) -> str:
    value = os.environ.get(env)
    if not value:
        raise ValueError(
            f"{env} is not set: start the script with torchrun, set {env}, or pass {argument} to Manager"
        )
    return value


def _int_setting(argument: str, value: Optional[int], env: str) -> int:
    if value is not None:
        return value
    _required_env(argument, env)
    return int_from_env(env, 0)


def _check(settings: Settings) -> None:
    if settings.group_world_size < 1:
        raise ValueError(f"world_size={settings.group_world_size}: a group has at least 1 rank")
    if not 0 <= settings.group_rank < settings.group_world_size:
        raise ValueError(
            f"rank={settings.group_rank} is outside its group: allowed are 0 to "
            f"{settings.group_world_size - 1} (world_size={settings.group_world_size})"
        )
    if settings.snapshot_copies and settings.snapshots == 1:
        # The groups' parts must be of one step. While one group writes the copy of a step, another one may
        # begin with that of the next, over the step before.
        raise ValueError(
            f"snapshots=1 with snapshot_copies={settings.snapshot_copies}: allowed are 0 (none), 'auto', and "
            "a number of steps from 2, the same in all groups"
        )
    for name in ("store_port", "manager_port"):
        value = getattr(settings, name)
        lowest = 1 if name == "store_port" else 0
        if not lowest <= value <= 65535:
            raise ValueError(f"{name}={value}: a port is {lowest} to 65535")
    for name in ("timeout", "quorum_timeout", "connect_timeout", "heartbeat_interval"):
        check_positive(name, getattr(settings, name))
    if settings.quorum_retries < 0:
        raise ValueError(f"quorum_retries={settings.quorum_retries}: allowed are 0 and more")


def check_limits(min_replica_size: int, max_retries: Optional[int]) -> None:
    """Raises ValueError unless these arguments of the Manager are in their range."""
    if min_replica_size < 1:
        raise ValueError(f"min_replica_size={min_replica_size}: at least 1 group has to take part in a step")
    if max_retries is not None and max_retries < 0:
        raise ValueError(f"max_retries={max_retries}: allowed are None, 0 and more")


def given(name: str, value: Optional[timedelta], default: timedelta) -> timedelta:
    """Returns the duration that a caller gave, after a check, or the default."""
    if value is None:
        return default
    check_positive(name, value)
    return value
