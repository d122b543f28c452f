"""The pages that say where a change goes name files and names that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from documents import ROOT

NOT_OURS = {"testing/synctest"}
SOURCES = (".c", ".go", ".h", ".js", ".json", ".proto", ".py", ".toml", ".txt")
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
FILES = {file for file in TRACKED.split() if (ROOT / file).is_file()}
FOLDERS = {str(parent) for file in FILES for parent in Path(file).parents}


def missing(row: str) -> set[str]:
    """The files of a row that do not exist. One without its folder is in that of another file of the row."""
    names = [name.rstrip("/") for name in re.findall(r"`([\w./-]+)`", row) if name not in NOT_OURS]
    names = [name for name in names if "/" in name or name.endswith(SOURCES)]
    folders = {""}
    for name in names:
        folders |= {name} & FOLDERS | ({str(Path(name).parent)} if name in FILES else set())
    return {
        name for name in names if not any(str(Path(folder, name)) in FILES | FOLDERS for folder in folders)
    }


def test_a_file_in_another_folder_is_missing() -> None:
    assert missing("| x | `go/quorum`: `types.go`; `news.go` beside `go/lighthouse/http.go` |") == set()
    assert missing("| x | `go/quorum`: `news.go`; `torchft/launch/cluster.py` |") == {
        "news.go",
        "torchft/launch/cluster.py",
    }


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/internals/changes.md"])
def test_the_files_of_each_row_exist(page: str) -> None:
    rows = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("| ")]
    assert len(rows) > 10
    assert {row[:60]: found for row in rows if (found := missing(row))} == {}


def test_the_names_exist() -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / "docs/internals/changes.md").read_text(), flags=re.M | re.S)
    codes = [code for code in re.findall(r"`([^`]+)`", text) if "/" not in code]
    names = {word for code in codes for word in re.findall(r"[A-Za-z_]\w+", code)}
    known: set[str] = set()
    for file in FILES:
        if file.startswith(("torchft/", "go/", "proto/", "tests/", "csrc/")) and file.endswith(SOURCES):
            known |= set(re.findall(r"\w+", (ROOT / file).read_text(errors="replace")))
            known |= set(re.findall(r"\w+", Path(file).name))
    assert names - known == set()
