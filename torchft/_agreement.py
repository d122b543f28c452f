"""The settings that groups announce to each other in their reconfigure handles, and their comparison.

Each group announces a dict of texts, most of them settings that stay the same while it runs. Some say what a
group can do: the groups do it if :func:`all_announce` it. The settings of ``EQUAL`` must be equal in all
groups of a job: :func:`differing` finds one that is not, and :func:`difference` is the error for it.

A handle of torchft is a JSON object, and its fields are the dict. A native handle is text made by PyTorch:
the dict is appended to it, and removed before PyTorch gets the handle of a peer. Other handles announce
nothing.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Optional

from torchft._version import __version__

_PREFIX = "torchft_"
_NATIVE = f" {_PREFIX}{{"

AVERAGES = _PREFIX + "averages"  # the process group of this rank averages on its device (Plan.averages)
# How this group compares its weights with those of other groups (replicas.py).
COMPARES = _PREFIX + "compares"
CALLS = _PREFIX + "calls"  # this rank lists its calls in the first step with new peers (calls.py)
# This rank waits for groups that heal, as long as they make progress (_manager/heal/wait.py).
HEALS = _PREFIX + "heals"
# How this group heals, and lets others heal, over several steps: "in_passing" or "auto" (make_plan). By its
# setting, as all ranks of a group must announce the same.
IN_PASSING = _PREFIX + "in_passing"
# The connections of this rank (handover.py); they change from step to step.
CONNECTIONS = _PREFIX + "connections"
# The units of a batch whose gradients this group keeps (data/kept.py).
KEEPS = _PREFIX + "keeps"
# This group loads a copy of an earlier life, unless a group has a later state (snapshots/restore.py).
RESTORES = _PREFIX + "restores"
# How often this group audits gradients, and its host (_manager/checks/audits.py).
AUDITS = _PREFIX + "audits"
# Steps between two copies that this group needs, where each keeps a part (_manager/snapshots/copies.py).
SNAPSHOTS = _PREFIX + "snapshots"
VERSION = _PREFIX + "version"  # of torchft in this group
LOADER = _PREFIX + "loader"  # the kind of data loader that weights this group's gradients (layout.py)
# Digest of the tensors that this rank reduces, and of its data (layout.py, go/quorum/fit.go).
LAYOUT = "layout"


_VERSIONS = "two neighboring minor releases, while the groups are upgraded one by one"


class Setting(NamedTuple):
    """A setting that must be equal in all groups of a job.

    Attributes:
        name: its name in errors.
        absent: the value of a group that announces none; None: such a group is not compared.
        allowed: what is allowed, for errors.
    """

    name: str
    absent: Optional[str]
    allowed: str


EQUAL = {
    LOADER: Setting(
        "the data loader",
        "none",
        "one in all groups of a job, made before their first step, or in none: it weights gradients by "
        "samples, and a group without one would divide their sum by the number of groups",
    ),
    LAYOUT: Setting("what is reduced", None, "the same tensors, and the same data, in all groups"),
}


@functools.lru_cache(maxsize=8)  # each step announces the same
def announce(handle: str, texts: tuple[tuple[str, str], ...], native: bool = False) -> str:
    """Adds the texts of this rank, which are pairs of a key of this module and a text, to its handle.

    Args:
        handle: the handle of the process group; one that is neither native nor a JSON object stays as it is.
        texts: an empty text is not added.
        native: whether the handle was made by PyTorch.
    """
    added = json.dumps({key: text for key, text in texts if text})
    if added == "{}" or not (native or (handle.startswith("{") and handle.endswith("}"))):
        return handle
    return f"{handle} {_PREFIX}{added}" if native else f"{handle[:-1]}, {added[1:]}"


@functools.lru_cache(maxsize=1024)  # the handles of a quorum are read several times
def texts_of(handle: str) -> Mapping[str, str]:
    """Returns the texts in a handle by their keys."""
    _, found, appended = handle.partition(_NATIVE)
    with contextlib.suppress(ValueError):
        fields = json.loads("{" + appended if found else handle)
        return (
            {key: text for key, text in fields.items() if isinstance(text, str)}
            if isinstance(fields, dict)
            else {}
        )
    return {}


def announced(handle: str, key: str) -> str:
    """Returns the text that a handle announces; empty if there is none."""
    return texts_of(handle).get(key, "")


def bare(handle: str) -> str:
    """Returns a native handle without what was appended to it."""
    return handle.partition(_NATIVE)[0]


def all_announce(handles: Iterable[str], key: str, text: str = "1") -> bool:
    """Whether all groups announce the same text."""
    return all(announced(handle, key) == text for handle in handles)


def differing(ours: Mapping[str, str], theirs: Mapping[str, str], *keys: str) -> Optional[str]:
    """Returns the first of these settings of ``EQUAL`` that differs between two groups; None if none does."""
    for key in keys:
        here, there = ours.get(key) or EQUAL[key].absent, theirs.get(key) or EQUAL[key].absent
        if here != there and here and there:
            return key
    return None


def difference(name: str, here: str, who: str, there: str, allowed: str) -> str:
    """The error for what differs between this group, or rank, and another one."""
    return f"{name} differs: {here} here, {there} in {who}; allowed: {allowed}"


def explained(key: str, ours: Mapping[str, str], who: str, theirs: Mapping[str, str]) -> str:
    """The error for a setting of ``EQUAL`` that differs between two groups."""
    setting = EQUAL[key]
    here, there = (repr(texts.get(key) or setting.absent) for texts in (ours, theirs))
    return difference(setting.name, here, who, there, setting.allowed)


def other_version(handles: Mapping[str, str]) -> Optional[str]:
    """Names a group with another version of torchft than this process; None if there is none. The groups of a
    job are upgraded one by one, so this is no error. `handles`: of the groups, by their names.
    """
    for who, handle in handles.items():
        there = announced(handle, VERSION)
        if there not in ("", __version__):
            return difference("torchft's version", __version__, who, there, _VERSIONS)
    return None
