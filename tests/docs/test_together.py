"""Each cell of the tables of docs/together.md names a test in together.toml, which exists and runs; loops are
short.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

import pytest
from documents import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGE = (ROOT / "docs" / "together.md").read_text()
CELLS = tomllib.loads((ROOT / "tests" / "docs" / "together.toml").read_text())
PROJECTS: dict[str, list[str]] = CELLS.pop("projects")
TESTS: dict[str, dict[str, dict[str, list[str]]]] = CELLS
Cells = dict[tuple[str, str], str]


def rows(table: str) -> list[list[str]]:
    """The cells of a Markdown table without its line of dashes, as text without links."""
    lines = [line for line in table.splitlines() if line.startswith("|") and not line.startswith("|-")]
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line) for line in lines]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in plain]


def models() -> Cells:
    header, *body = rows(PAGE.split("\n## ")[1])
    return {(row[0], column): cell for row in body for column, cell in zip(header[1:], row[1:], strict=True)}


def pairs() -> Cells:
    return {(one, other): effect for one, other, effect in rows(PAGE.split("\n## ")[2])[1:]}


def projects() -> dict[str, tuple[str, str]]:
    return {part: (works, why) for part, works, why in rows(PAGE.split("\n## ")[3])[1:]}


def why_no_evidence(source: str, name: str) -> str:
    """The reason why the test of this name in a module shows nothing; empty if it runs."""
    body = ast.parse(source).body
    found = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    if not found:
        return "it does not exist"
    marks = list(found[0].decorator_list)
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            marks += node.value.elts if isinstance(node.value, ast.List) else [node.value]
    if any(_always_skips(mark) for mark in marks) or ast.unparse(found[0].body[0]).startswith("pytest.skip("):
        return "it is skipped"
    return ""


def _always_skips(mark: ast.expr) -> bool:
    called = mark.func if isinstance(mark, ast.Call) else mark
    condition = mark.args[0] if isinstance(mark, ast.Call) and mark.args else None
    name = ast.unparse(called)
    return name.endswith(("mark.skip", "mark.xfail")) or (
        name.endswith("mark.skipif") and isinstance(condition, ast.Constant) and bool(condition.value)
    )


def references() -> Iterator[str]:
    for tests in PROJECTS.values():
        yield from tests
    for table in TESTS.values():
        for row in table.values():
            for tests in row.values():
                yield from tests


@pytest.mark.parametrize(
    ("test", "why"),
    [
        ("def test_it(): f()", ""),
        ("@pytest.mark.slow\n@pytest.mark.skipif(old, reason='')\ndef test_it(): f()", ""),
        ("def test_other(): f()", "it does not exist"),
        ("@pytest.mark.skip\ndef test_it(): f()", "it is skipped"),
        ("@pytest.mark.skip(reason='')\ndef test_it(): f()", "it is skipped"),
        ("@pytest.mark.skipif(True, reason='')\ndef test_it(): f()", "it is skipped"),
        ("@pytest.mark.xfail\ndef test_it(): f()", "it is skipped"),
        ("pytestmark = [pytest.mark.skip]\ndef test_it(): f()", "it is skipped"),
        ("def test_it(): pytest.skip('')", "it is skipped"),
    ],
)
def test_evidence(test: str, why: str) -> None:
    assert why_no_evidence(test, "test_it") == why


@pytest.mark.parametrize(("table", "cells"), [("models", models()), ("pairs", pairs())])
def test_each_cell_has_a_text_and_a_test(table: str, cells: Cells) -> None:
    assert len(cells) >= 10
    assert [place for place, cell in cells.items() if not cell] == []
    tested = {
        (row, column): tests for row, of_row in TESTS[table].items() for column, tests in of_row.items()
    }
    assert tested.keys() == cells.keys()
    assert [place for place, tests in tested.items() if not tests] == []


def test_each_part_works_and_has_a_test_or_does_not_and_has_a_reason() -> None:
    found = projects()
    assert [part for part, (works, why) in found.items() if works not in ("yes", "no") or not why] == []
    tested = {part for part, tests in PROJECTS.items() if tests}
    assert {part for part, (works, _) in found.items() if works == "yes"} <= tested <= found.keys()


def test_each_test_exists_and_runs() -> None:
    wrong: dict[str, str] = {}
    for reference in references():
        file, _, name = reference.partition("::")
        path = ROOT / file
        why = why_no_evidence(path.read_text(), name) if path.is_file() else "there is no such file"
        if why:
            wrong[reference] = why
    assert wrong == {}


def test_the_page_is_short() -> None:
    assert len(PAGE.split()) <= 650


@pytest.mark.parametrize(
    ("script", "lines"),
    [
        ("torchft/job.py", 500),
        ("train_ddp.py", 80),
        ("train_fsdp.py", 100),
        ("train_diloco.py", 120),
        ("python/examples/huggingface_loop.py", 80),
        ("python/examples/lightning_loop.py", 80),
    ],
)
def test_a_loop_is_short_and_needs_the_package_only(script: str, lines: int) -> None:
    source = (ROOT / script).read_text()
    assert len(source.splitlines()) <= lines
    for node in ast.walk(ast.parse(source)):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [each.name for each in node.names] if isinstance(node, ast.Import) else []
        assert not any(name.split(".")[0] == "python" or name.startswith("examples") for name in names)
    assert "sys.path" not in source
