"""The versions of what make installs, and those that users may install."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python" / "build"))
import lock  # noqa: E402
import oldest  # noqa: E402

PYPROJECT = (ROOT / "pyproject.toml").read_text()


def extra(name: str) -> list[str]:
    """The packages of an extra, and of the extras that it names."""
    (found,) = re.findall(rf"^{name} = \[(.*?)\]$", PYPROJECT, re.MULTILINE | re.DOTALL)
    packages = []
    for requirement in re.findall(r'"([^"]+)"', found):
        name, more = re.match(r"([\w.-]+)(?:\[([\w,-]+)\])?", requirement).groups()  # type: ignore[union-attr]
        packages += [p for e in more.split(",") for p in extra(e)] if name == "torchft" else [name]
    return packages


def test_the_lock_has_each_package_that_make_installs() -> None:
    installed = set(re.findall(r"\$\(VENV\)/with-([a-z]+)", (ROOT / "Makefile").read_text())) - {"nothing"}
    assert installed == set(lock.EXTRAS)
    locked = {name.partition(" ")[0] for name in lock.versions(lock.LOCK.read_text())}
    assert {package for name in lock.EXTRAS for package in extra(name)} - locked == set()
    assert {"pyrefly", "pytest", "ruff", "setuptools"} <= locked
    assert locked & {"torch", "triton"} == set()


@pytest.mark.parametrize(
    ("new", "found"),
    [
        ("a==1\nb==2 ; python_version < '3.11'\n", []),
        ("a==1.1\nb==3 ; python_version < '3.11'\n", ["a 1 -> 1.1", "b ; python_version < '3.11' 2 -> 3"]),
        ("b==2 ; python_version < '3.11'\nc==1\n", []),
    ],
)
def test_newer_releases_are_named(new: str, found: list[str]) -> None:
    assert lock.moved("# a comment\na==1\nb==2 ; python_version < '3.11'\n", new) == found


@pytest.mark.parametrize(
    ("status", "stdout", "stderr", "line"),
    [
        (0, "{lock}", "", ""),
        (0, "pyrefly==999\n", "", "newer tools exist, `make lock` takes them: pyrefly {pyrefly} -> 999"),
        (1, "", "no network\n", "newer tools are not looked for: lock: no network"),
    ],
)
def test_newer_tools_are_said_and_never_a_failure(
    status: int, stdout: str, stderr: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = lock.LOCK.read_text()
    done = subprocess.CompletedProcess([], status, stdout.format(lock=text), stderr)
    monkeypatch.setattr(lock.subprocess, "run", lambda *args, **kwargs: done)
    assert lock.newer() == line.format(pyrefly=lock.versions(text)["pyrefly"])


def test_the_oldest_releases_are_the_lower_bounds() -> None:
    assert oldest.lowest(PYPROJECT)["torch"] == "2.7"
    wanted = oldest.requirements(PYPROJECT, lock.LOCK.read_text()).splitlines()
    assert {"torch==2.7.*", "ray[train]==2.60.*"} <= set(wanted)
    assert [line for line in wanted if line.startswith("pytest==")]
    with pytest.raises(ValueError, match="dependencies has no package with a lower bound"):
        oldest.lowest('dependencies = ["torch"]\n')
