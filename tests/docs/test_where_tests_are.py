"""Each source of more than 60 lines has a test of its name, or a row in CONTRIBUTING that names its tests."""

from __future__ import annotations

import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LONG = 60
SOURCES = ("torchft/*.py", "python/build/*.py", "python/binding/*.py", "go/*.go")
# Written by protoc, and by gopy.
GENERATED = ("go/torchftpb/*", "go/native/*")
HEADING = "## The tests of a file"


def tracked(*patterns: str) -> list[str]:
    done = subprocess.run(["git", "ls-files", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in done.stdout.split() if (ROOT / path).is_file()]


def rows() -> list[tuple[list[str], list[str]]]:
    """The patterns of files, and the tests, of each row of the table."""
    table = (ROOT / "CONTRIBUTING.md").read_text().split(HEADING)[1].split("\n## ")[0]
    cells = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    return [(re.findall(r"`([^`]+)`", files), re.findall(r"`([^`]+)`", tests)) for files, tests in cells]


def has_its_own(source: str, tests: set[str]) -> bool:
    path = Path(source)
    if path.suffix == ".go":
        return f"{path.parent}/{path.stem}_test.go" in tests
    return f"test_{path.stem.lstrip('_')}.py" in {Path(test).name for test in tests}


def expected() -> list[str]:
    """The sources that need a row."""
    tests = set(tracked("tests/*.py", "go/*_test.go"))
    sources = [path for path in tracked(*SOURCES) if not path.endswith("_test.go") and Path(path).name != "__init__.py"]
    return [
        source
        for source in sources
        if not any(fnmatch(source, pattern) for pattern in GENERATED)
        and len((ROOT / source).read_text().splitlines()) > LONG
        and not has_its_own(source, tests)
    ]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a source distribution has no list of its files")
def test_each_source_has_its_tests() -> None:
    patterns = [pattern for files, _ in rows() for pattern in files]
    missing = [source for source in expected() if not any(fnmatch(source, pattern) for pattern in patterns)]
    assert not missing, f"{HEADING} of CONTRIBUTING.md: name the tests of these"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a source distribution has no list of its files")
def test_the_rows_name_what_exists() -> None:
    sources = expected()
    for files, tests in rows():
        for pattern in files:
            assert any(fnmatch(source, pattern) for source in sources), f"{pattern}: no file needs this row"
        assert tests
        for test in tests:
            assert any(ROOT.glob(test)), f"{test} is not there"
