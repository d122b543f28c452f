"""FTLib's shared storage on a file system that is read-only, full, or becomes full: a tmpfs in a
namespace.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import child_environment, ours_path

SCRIPT = Path(__file__).resolve().parent / "ftlib_directory.py"
pytestmark = [pytest.mark.hosts, pytest.mark.timeout(200)]


def events(directory: Path, prepare: str) -> list[dict[str, Any]]:
    """Returns the events that a member prints; a shell mounts and prepares its directory first."""
    directory.mkdir()
    command = ["unshare", "--map-root-user", "--mount", "sh", "-ec", f'{prepare}; exec "$@"', "sh"]
    done = subprocess.run(
        [*command, sys.executable, str(SCRIPT), "."],
        cwd=directory,
        env=child_environment(ours_path(), {"TORCHFT_HOST": "localhost"}),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


MOUNT = 'mount -t tmpfs -o size=64k none "$PWD"; cd "$PWD"'


@pytest.mark.slow  # tests/unit/ftlib has the errors
@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (f'{MOUNT}; mount -o remount,ro none "$PWD"', "Read-only file system"),
        (f"{MOUNT}; cat /dev/zero > filler 2> /dev/null || true", "No space left on device"),
    ],
    ids=["read-only", "full"],
)
def test_a_directory_without_space_or_write_access_is_refused(
    tmp_path: Path, prepare: str, reason: str
) -> None:
    (refused,) = events(tmp_path / "shared", prepare)
    assert refused["event"] == "refused"
    assert reason in refused["error"] and "allowed: a directory with free space" in refused["error"]


@pytest.mark.slow  # tests/unit/ftlib/test_shared_storage.py
def test_a_member_counts_as_failed_while_its_directory_is_full(tmp_path: Path) -> None:
    first, failed, second = events(tmp_path / "shared", MOUNT)
    assert (
        "its own record could not be renewed" in failed["reason"]
        and "No space left on device" in failed["reason"]
    )
    assert second["number"] > first["number"]
