"""The source distribution contains everything in the repository, so that it builds, trains and passes its
tests.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_IN_IT = {".gitignore"}


def test_the_source_distribution_has_every_file(tmp_path: Path) -> None:
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("compares with what git knows, and this is no clone")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    known = {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=100,
    )
    (sources,) = tmp_path.glob("*.egg-info/SOURCES.txt")
    missing = known - set(sources.read_text().splitlines()) - NOT_IN_IT
    assert {name for name in missing if not name.startswith((".ci/", ".github/"))} == set()


def test_the_logs_of_jobs_are_no_part_of_the_repository() -> None:
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("asks git, and this is no clone")
    asked = subprocess.run(
        ["git", "check-ignore", "torchft-logs/20260101-000000/group-0.log"], cwd=ROOT, timeout=60
    )
    assert asked.returncode == 0


ROOMS = {
    "_manager": ("checks", "heal", "observe", "quorum", "step"),
    "checkpointing": ("client", "codec", "native", "source"),
}
PACKAGES = (
    "_manager",
    "_node",
    *(f"{of}/{room}" for of, rooms in ROOMS.items() for room in rooms),
    "data",
    "ftlib",
    "process_group",
    "scaling",
)


@pytest.mark.parametrize("name", [*PACKAGES, "process_group/isolated"])
def test_a_package_lists_its_modules(name: str) -> None:
    folder = ROOT / "torchft" / name
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    modules = {path.stem for path in folder.glob("[a-z]*.py")}
    assert {module for module in modules if not re.search(rf"\b{module}\b", docstring)} == set()


def test_each_public_class_has_a_name_of_its_own() -> None:
    found: dict[str, list[str]] = {}
    for path in (ROOT / "torchft").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    # the second one is the first with the losses of a job: users see one class
    del found["DistributedDataParallel"]
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}
