"""The Manager's settings: from its arguments, else from environment variables of torchrun and the user."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Optional, Union

from torchft._checks import check_positive, switch
from torchft._security import ROUND_ENV

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


def resolve(
    *,
    rank: Optional[int],
    world_size: Optional[int],
    store_addr: Optional[str],
    store_port: Optional[int],
    lighthouse_addr: Optional[str],
    port: Optional[int],
    timeout: timedelta,
    quorum_timeout: timedelta,
    connect_timeout: timedelta,
    heartbeat_interval: timedelta,
    quorum_retries: int,
    enable_error_bus: Optional[bool] = None,
    replay_failed_step: Optional[bool] = None,
    reproducible_reduction: bool = False,
    compare_commits: Union[int, str, None] = None,
    on_divergence: Optional[str] = None,
    heal: Optional[str] = None,
    heal_along: Optional[bool] = None,
    snapshots: Union[int, str, None] = None,
    snapshot_copies: Optional[int] = None,
    audit: Optional[float] = None,
) -> Settings:
    """Takes settings that the caller left out from the environment, and checks all of them. ValueError:
    naming the setting, its value and what is allowed.
    """
    settings = Settings(
        group_rank=_int_setting("rank", rank, "RANK"),
        group_world_size=_int_setting("world_size", world_size, "WORLD_SIZE"),
        store_addr=store_addr or _required_env("store_addr", "MASTER_ADDR"),
        store_port=_int_setting("store_port", store_port, "MASTER_PORT"),
        timeout=duration_from_env(TIMEOUT_SEC_ENV, timeout),
        quorum_timeout=duration_from_env(QUORUM_TIMEOUT_SEC_ENV, quorum_timeout),
        connect_timeout=duration_from_env(CONNECT_TIMEOUT_SEC_ENV, connect_timeout),
        heartbeat_interval=heartbeat_interval,
        quorum_retries=int_from_env(QUORUM_RETRIES_ENV, quorum_retries),
        manager_port=port if port is not None else int_from_env(MANAGER_PORT_ENV, 0),
        lighthouse_addr=lighthouse_addr or os.environ.get("TORCHFT_LIGHTHOUSE"),
        restart_count=start_number(),
        enable_error_bus=switch(FAILURE_BUS_ENV, default=True, given=enable_error_bus),
        replay_failed_step=switch(REPLAY_FAILED_STEP_ENV, given=replay_failed_step),
        reproducible_reduction=reproducible_reduction,
        heal_sources=heal_sources_from_env(),
        compare_commits=_number_or_auto("compare_commits", compare_commits, COMPARE_COMMITS_ENV, "auto"),
        compares_by_default=compare_commits is None and COMPARE_COMMITS_ENV not in os.environ,
        on_divergence=_on_divergence(on_divergence),
        heal=_heal(heal, heal_along),
        snapshots=_number_or_auto("snapshots", snapshots, SNAPSHOTS_ENV, "0"),
        snapshot_copies=_snapshot_copies(snapshot_copies),
        audit=_audit(audit),
    )
    _check(settings)
    return settings


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


# What "auto" goes by, and what the number counts.
_CHOSEN = {"compare_commits": ("commits", "the size"), "snapshots": ("steps", "their cost")}


def _number_or_auto(argument: str, given: Union[int, str, None], env: str, default: str) -> Optional[int]:
    """Returns the number of a setting: 0 for never, None for "auto"."""
    name = env if given is None else argument
    value = number = os.environ.get(env, default) if given is None else given
    if value == "auto":
        return None
    if given is None and isinstance(value, str) and value.isdecimal():
        number = int(value)
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        what, by = _CHOSEN[argument]
        raise ValueError(
            f'{name}={value!r}: allowed are 0 (never), a number of {what}, or "auto": chosen by {by}'
        )
    return number


def _snapshot_copies(given: Optional[int]) -> int:
    name = SNAPSHOT_COPIES_ENV if given is None else "snapshot_copies"
    copies = int_from_env(SNAPSHOT_COPIES_ENV, 0) if given is None else given
    if not isinstance(copies, int) or isinstance(copies, bool) or copies < 0 or copies == 1:
        raise ValueError(f"{name}={copies!r}: allowed are 0 (all groups), or a number of groups from 2")
    return copies


def _audit(given: Optional[float]) -> float:
    name = AUDIT_ENV if given is None else "audit"
    value = os.environ.get(AUDIT_ENV, "0") if given is None else given
    try:
        rate = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        rate = math.nan
    if rate == 0 or _LEAST_AUDIT <= rate <= 1:
        return rate
    raise ValueError(
        f"{name}={value!r}: allowed are 0 (never), or the part of the steps that are audited, from "
        f"{_LEAST_AUDIT:g} to 1"
    )


def _on_divergence(given: Optional[str]) -> OnDivergence:
    name = ON_DIVERGENCE_ENV if given is None else "on_divergence"
    value = os.environ.get(ON_DIVERGENCE_ENV, "report") if given is None else given
    try:
        return OnDivergence(value)
    except ValueError:
        raise ValueError(
            f"{name}={value!r}: allowed are {', '.join(each.value for each in OnDivergence)}"
        ) from None


def _heal(given: Optional[str], along: Optional[bool]) -> Optional[HealMode]:
    """How groups heal; None: nothing is set. ``along`` and its variable are other names of these."""
    if given is not None and along is not None:
        raise ValueError(
            f"heal={given!r} and heal_along={along}: these are two names of one setting, pass one of them"
        )
    name = HEAL_ENV if given is None else "heal"
    value = os.environ.get(HEAL_ENV) if given is None and along is None else given
    if value is None:
        if along is None and not os.environ.get(HEAL_ALONG_ENV, "").strip():
            return None
        return HealMode.IN_PASSING if switch(HEAL_ALONG_ENV, given=along) else HealMode.AT_ONCE
    try:
        return HealMode(value)
    except ValueError:
        raise ValueError(
            f"{name}={value!r}: allowed are {', '.join(each.value for each in HealMode)}"
        ) from None


def heal_sources_from_env() -> int:
    """Returns the number of groups from which one state is fetched, as TORCHFT_HEAL_SOURCES sets it."""
    sources = int_from_env(HEAL_SOURCES_ENV, MAX_SOURCES)
    if not 1 <= sources <= MAX_SOURCES:
        raise ValueError(f"{HEAL_SOURCES_ENV}={sources}: allowed are 1 (the assigned one) to {MAX_SOURCES}")
    return sources


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
