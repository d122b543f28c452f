"""The folder of a job's checkpoints: names, what is complete, what is damaged, what is deleted.

step-S               a checkpoint: files of torch.distributed.checkpoint, and torchft.json with the size and
                     the CRC of each. One without torchft.json was written by the user's script
.step-S.…            one that is being written, or was when its writer ended
damaged-step-S…      one that a job refused to load, for what it holds
replaced-step-S…     one of the user's script, of a step that torchft has saved later
parts-of-step-S      what this host has of a step, where no host has all (`stored.py`)
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
import zlib
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

KEPT = 3  # the newest checkpoints; the others are deleted
DIGESTS = "torchft.json"
_NAME = re.compile(r"step-(\d+)")
_PARTIAL = re.compile(r"\.step-(\d+)\..*")
_AT_ONCE = 4 << 20  # bytes


def complete(folder: Path) -> List[Tuple[int, Path]]:
    """Returns the checkpoints of a folder by step, the newest last."""
    return named(folder, _NAME)


def named(folder: Path, pattern: re.Pattern[str]) -> List[Tuple[int, Path]]:
    """Returns what a folder has by step, the newest last. The pattern's group 1 is the step."""
    if not folder.is_dir():
        return []
    found = [(pattern.fullmatch(each.name), each) for each in folder.iterdir()]
    return sorted((int(match[1]), each) for match, each in found if match)


def describe(checkpoint: Path) -> Optional[Dict[str, Any]]:
    """Returns what torchft.json says; None: there is none, or it is damaged.

    Raises:
        OSError: the disk fails.
    """
    try:
        found = json.loads((checkpoint / DIGESTS).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return found if isinstance(found, dict) else None


class Damage(NamedTuple):
    """Why a checkpoint is not loaded.

    Attributes:
        text: names it.
        content: whether the content is damaged. Otherwise the disk did not give it, and may do so later.
    """

    text: str
    content: bool = True

    @classmethod
    def of(cls, error: BaseException) -> Damage:
        """Returns what an error says of what was read."""
        content = not isinstance(error, OSError) or isinstance(error, FileNotFoundError)
        return cls(f"{type(error).__name__}: {error}", content)


def damage(checkpoint: Path, share: int = 0, shares: int = 1) -> Optional[Damage]:
    """Says what is damaged in a checkpoint; None: nothing that can be found without loading it.

    Args:
        checkpoint: its folder.
        share, shares: which part of the files is read, of how many parts, so that the ranks of a group read
            each file once.
    """
    try:
        try:
            files = json.loads((checkpoint / DIGESTS).read_text())["files"]
        except FileNotFoundError:
            return _short(checkpoint) if share == 0 else None
        for name, (size, crc) in sorted(files.items())[share::shares]:
            if (found := checksum(checkpoint / name)) != (size, crc):
                return Damage(
                    f"{name} has {found[0]} bytes with CRC {found[1]:08x} instead of {size} with {crc:08x}"
                )
    except Exception as error:  # pickle and JSON raise errors of any type
        return Damage.of(error)
    return None


def checksum(path: Path) -> Tuple[int, int]:
    """Returns size and CRC32 of a file."""
    size, crc = 0, 0
    with open(path, "rb") as file:
        while block := file.read(_AT_ONCE):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc


def _short(checkpoint: Path) -> Optional[Damage]:
    """Says what is missing in a checkpoint without digests."""
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    ends: Dict[str, int] = {}
    for place in metadata.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in ends.items():
        if (size := (checkpoint / name).stat().st_size) < end:
            return Damage(f"{name} has {size} bytes, and the last item ends at {end}")
    return None


def set_aside(checkpoint: Path) -> None:
    """Renames a checkpoint whose content is damaged, so that no job looks at it again."""
    numbers = chain([""], (f"-{number}" for number in count(2)))  # of the same step in earlier histories
    asides = (checkpoint.with_name(f"damaged-{checkpoint.name}{number}") for number in numbers)
    aside = next(path for path in asides if not path.exists())
    with suppress(OSError):  # another group has, or the folder is read-only
        checkpoint.rename(aside)


def prune(folder: Path) -> None:
    """Deletes all but the newest checkpoints of torchft, and what was begun of steps before the newest."""
    found = complete(folder)
    own = [checkpoint for _, checkpoint in found if (checkpoint / DIGESTS).exists()]
    for old in own[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    for checkpoint in own[-KEPT:]:
        _tidy(checkpoint)
    prune_begun(folder, found[-1][0] if found else -1)


def _tidy(checkpoint: Path) -> None:
    """Deletes what was left by the processes that have written a checkpoint together."""
    files = (describe(checkpoint) or {}).get("files") or {}
    for each in checkpoint.iterdir() if files else ():
        if each.is_dir():
            shutil.rmtree(each, ignore_errors=True)
        elif each.name not in (DIGESTS, *files):
            each.unlink(missing_ok=True)


def prune_begun(folder: Path, newest: int) -> None:
    """Deletes what was begun of checkpoints before a step."""
    for step, partial in named(folder, _PARTIAL):
        if step < newest:
            shutil.rmtree(partial, ignore_errors=True)
