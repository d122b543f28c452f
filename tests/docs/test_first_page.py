"""Each sentence of the README above its last links has its evidence in claims.toml, and the evidence exists.

References are of these kinds:

    tests/process/test_x.py::test_name    a test of pytest
    go/manager::TestName                  a test of a Go package
    bench recovery                        a part of docs/internals/benchmarks.json; its table has the figures
    docs/gpu.md                           a page with the details, where no test is possible
"""

from __future__ import annotations

import re
import sys

import pytest
from documents import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FIRST_PAGE = (ROOT / "README.md").read_text().partition("\n## More\n")[0]
CLAIMS: dict[str, list[str]] = tomllib.loads((ROOT / "tests" / "docs" / "claims.toml").read_text())["claims"]
# The end of a sentence, in italics too. A colon before a list or a picture does not end one.
END = re.compile(r"[.!?]\*{0,2}(?:\s|$)")
FIGURE = re.compile(r"(?<![\w.])(?:\d+\.\d+(?![\w.])|\d+(?= (?:ms|s)\b))")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")


def sentences(page: str) -> list[str]:
    """Each sentence in running text and lists, and each row of the bodies of tables."""
    page = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    # Headings, and header rows of tables.
    page = re.sub(r"^(#.*|\|.*\|\n\|[-| ]+\|)$", "", page, flags=re.MULTILINE)
    page = LINK.sub(lambda link: "" if link[0].startswith("!") else link[1], page)
    blocks = [block.strip("|\n ") for block in re.split(r"\n\s*\n|\n(?=[-*] |\|)", page)]
    parts = (" ".join(part.split()) for block in blocks for part in END.split(block + " "))
    return [part for part in parts if re.search(r"\w", part)]


def missing(reference: str) -> str:
    """Returns the reason why a reference is invalid; empty if it is valid."""
    if reference.startswith("bench "):
        return "" if f"<!-- {reference[6:]}: written by run.py -->" in benchmarks() else "no such table"
    place, _, name = reference.partition("::")
    path = ROOT / place
    if not path.exists():
        return f"no {place}"
    if not name:
        return ""
    files = sorted(path.glob("*_test.go")) if path.is_dir() else [path]
    defined = rf"^(?:func|def) {re.escape(name)}\("
    return (
        "" if any(re.search(defined, f.read_text(), re.MULTILINE) for f in files) else f"no {name} in {place}"
    )


def benchmarks() -> str:
    return (ROOT / "docs" / "internals" / "benchmarks.md").read_text()


def table(part: str) -> str:
    return benchmarks().partition(f"<!-- {part}: written by run.py -->")[2].partition("<!-- end of")[0]


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ("One. *Two\ngoes on.*", ["One", "*Two goes on"]),
        ("| head |\n| --- |\n| 1.5 s [here](x.md) |", ["1.5 s here"]),
        ("| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n\nText.", ["1 | 2", "3 | 4", "Text"]),
        ("# Title\n\n![picture](a.png)\n\n```sh\nmake. it\n```\n", []),
    ],
)
def test_sentences(page: str, found: list[str]) -> None:
    assert sentences(page) == found


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("bench recovery", ""),
        ("bench walking", "no such table"),
        ("docs/gpu.md", ""),
        ("docs/gpus.md", "no docs/gpus.md"),
        ("tests/docs/test_first_page.py::test_sentences", ""),
        ("tests/docs/test_first_page.py::test_other", "no test_other in tests/docs/test_first_page.py"),
        ("go/quorum::TestTranscripts", ""),
        ("go/quorum::TestOther", "no TestOther in go/quorum"),
    ],
)
def test_references(reference: str, why: str) -> None:
    assert missing(reference) == why


def test_each_sentence_of_the_first_page_has_its_evidence() -> None:
    found = sentences(FIRST_PAGE)
    assert len(found) > 20
    assert [sentence for sentence in found if not CLAIMS.get(sentence)] == []
    assert [sentence for sentence in CLAIMS if sentence not in found] == []
    assert {r: why for references in CLAIMS.values() for r in references if (why := missing(r))} == {}


def test_its_figures_are_in_the_tables_that_it_names() -> None:
    checked, absent = 0, []
    for sentence, references in CLAIMS.items():
        tables = "".join(table(reference[6:]) for reference in references if reference.startswith("bench "))
        if tables:
            figures = FIGURE.findall(sentence)
            checked += len(figures)
            absent += [
                f"{figure}: {sentence}"
                for figure in figures
                if not re.search(rf"(?<![\d.]){figure}(?![\d.]*\d)", tables)
            ]
    assert checked > 3
    assert absent == []
