"""Two installations that are imported as torchft: which one is imported, and how to change it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchft import __version__, _beside


def packages(folder: Path, *distributions: str) -> Path:
    """A folder of packages with a torchft, and the metadata of distributions."""
    for name in ("torchft", *(f"{distribution}.dist-info" for distribution in distributions)):
        (folder / name).mkdir(parents=True)
    (folder / "torchft" / "__init__.py").touch()
    return folder


def test_one_installation_is_no_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one = packages(tmp_path / "one", "torchft-0.3.0")
    (tmp_path / "empty" / "torchft").mkdir(parents=True)  # no package
    path = [str(one), "", str(tmp_path / "empty"), "/no/such/folder", f"{tmp_path}/empty/../one"]
    assert _beside.others(str(one / "torchft"), "0.3.0", path) == []


def test_a_folder_that_cannot_be_listed_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: str) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    one = packages(tmp_path / "one", "torchft_nightly-1.dist-info")
    monkeypatch.setattr(os, "listdir", refused)
    assert _beside.others(str(one / "torchft"), "0.3.0", [str(one)]) == []


def test_another_one_elsewhere(tmp_path: Path) -> None:
    one, other = packages(tmp_path / "one"), packages(tmp_path / "other")
    (told,) = _beside.others(str(one / "torchft"), "0.3.0", [str(one), str(other)])
    assert told.startswith(
        f"`import torchft` is torchft 0.3.0 in {one}/torchft, and hides another one in {other}"
    )
    assert f"put {other} first in PYTHONPATH" in told


def test_upstreams_nightly_in_the_same_folder(tmp_path: Path) -> None:
    one = packages(tmp_path, "torchft-0.3.0", "torchft_nightly-2026.10.26", "torchft_nightly_tools-1.0")
    (told,) = _beside.others(str(one / "torchft"), "0.3.0", [str(one)])
    assert told.startswith(
        f"torchft 0.3.0 and torchft-nightly 2026.10.26 are both in {one}/torchft, which mixes"
    )


@pytest.mark.parametrize("hidden", [False, True])
def test_an_import_tells(hidden: bool, tmp_path: Path) -> None:
    ours = Path(_beside.__file__).parents[1]
    path = [str(ours), *([str(packages(tmp_path))] if hidden else [])]
    program = "import torchft; print(torchft.__file__)"
    command = [sys.executable, "-W", "always" if hidden else "error", "-c", program]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(command, env=env, cwd=tmp_path / "..", capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{ours}/torchft/__init__.py\n", done.stderr
    told = f"RuntimeWarning: `import torchft` is torchft {__version__} in {ours}/torchft, and hides"
    assert (told in done.stderr) == hidden
