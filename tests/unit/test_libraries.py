"""A native library that does not load names the remedy."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torchft import _libraries


def test_a_library_that_was_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [str(_libraries.PACKAGE.parent)])
    expected = r"does not load \(No module named 'torchft._missing'\): build it with `pip install \.`, or"
    with pytest.raises(ImportError, match=expected):
        _libraries.load("torchft._missing")


@pytest.mark.parametrize(
    ("by", "remedy"),
    [
        ("script", "because it lies beside the script train.py: copy the script to another folder, or"),
        ("module", "because it is in the current directory: start from another folder, or"),
        ("path", "because it comes first in Python's path ({}): remove that folder from PYTHONPATH, or"),
    ],
)
def test_sources_that_hide_the_installed_package_are_named(
    by: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `pip install .`, a script in the clone imports the sources beside it, which have no library."""
    clone, packages, elsewhere = (tmp_path / name for name in ("my clone", "site-packages", "elsewhere"))
    for folder in (clone / "torchft", packages / "torchft", elsewhere):
        folder.mkdir(parents=True)
    (packages / "torchft" / "_torchft_go.abi3.so").touch()
    program = "from torchft import _libraries\n_libraries.load('torchft._missing')\n"
    (clone / "torchft" / "__init__.py").touch()
    shutil.copy(_libraries.__file__, clone / "torchft")
    for folder in (clone, elsewhere):
        (folder / "train.py").write_text(program)
    command, here, path = {
        "script": ([str(clone / "train.py")], clone, [packages]),  # the current directory is not to blame
        "module": (["-m", "train"], clone, [packages]),
        "path": ([str(elsewhere / "train.py")], elsewhere, [clone, packages]),
    }[by]
    env = {"PYTHONPATH": ":".join(map(str, path))}
    done = subprocess.run(
        [sys.executable, "-S", *command], cwd=here, env=env, capture_output=True, text=True, timeout=60
    )
    error = done.stderr.splitlines()[-1]
    source, installed = clone / "torchft", packages / "torchft"
    hidden = f"the source folder {source} hides the package that is installed in {installed}, "
    assert f"{hidden}{remedy.format(clone)} " in error
    assert error.endswith(f"build it in place with `pip install -e '{clone}[train]'`")
