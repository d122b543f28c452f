"""Each sentence of the README's first page is followed by a comment that names its evidence, which exists.

A comment reads ``<!-- shown by A, B -->``, with references of these kinds:

    tests/process/test_x.py::test_name    a test of pytest
    go/manager::TestName                  a test of a Go package
    bench recovery                        a part of docs/benchmarks.json; the sentence's figures are in its table
    docs/gpu.md                           a page with the details, where no test is possible
"""

from __future__ import annotations

import re

import pytest
from documents import ROOT

FIRST_PAGE = (ROOT / "README.md").read_text().partition("\n## Install\n")[0]
SHOWN = re.compile(r"<!--\s+shown\s+by\s+(.+?)\s+-->", re.DOTALL)
# The end of a sentence. A colon before a list or a picture does not end one.
END = re.compile(r"[.!?](?:\s|$)")
FIGURE = re.compile(r"(?<![\w.])(?:\d+\.\d+(?![\w.])|\d+(?= (?:ms|s)\b))")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")


def sentences(page: str) -> list[tuple[str, list[str]]]:
    """Each sentence in running text, lists and the bodies of tables, with the references behind it."""
    page = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"^(#.*|\|.*\|\n\|[-| ]+\|)$", "", page, flags=re.MULTILINE)  # headings, and header rows of tables
    found: list[tuple[str, list[str]]] = []
    for block in re.split(r"\n\s*\n|\n(?=[-*] )|\|", page):
        pieces = SHOWN.split(block)  # text, references, text, …
        for text, references in zip(pieces[::2], [*pieces[1::2], ""]):
            prose = LINK.sub(lambda link: "" if link[0].startswith("!") else link[1], text)
            prose = re.sub(r"<!--.*?-->", "", prose, flags=re.DOTALL)
            parts = [" ".join(part.split()) for part in END.split(prose + " ")]
            parts = [part for part in parts if re.search(r"\w", part)]
            found += [(part, []) for part in parts[:-1]]
            if parts:
                found.append((parts[-1], [r.strip() for r in references.split(",") if r.strip()]))
    return found


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
    return "" if any(re.search(defined, f.read_text(), re.MULTILINE) for f in files) else f"no {name} in {place}"


def benchmarks() -> str:
    return (ROOT / "docs" / "benchmarks.md").read_text()


def table(part: str) -> str:
    return benchmarks().partition(f"<!-- {part}: written by run.py -->")[2].partition("<!-- end of")[0]


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ("One. <!-- shown by a, b::c -->\nTwo.", [("One", ["a", "b::c"]), ("Two", [])]),
        ("One. Two. <!-- shown by a -->", [("One", []), ("Two", ["a"])]),
        (
            "| head |\n| --- |\n| 1.5 s [here](x.md) <!-- shown by bench x --> |",
            [("1.5 s here", ["bench x"])],
        ),
        ("# Title\n\n![picture](a.png)\n\n```sh\nmake. it\n```\n", []),
    ],
)
def test_sentences_and_their_references(page: str, found: list[tuple[str, list[str]]]) -> None:
    assert sentences(page) == found


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("bench recovery", ""),
        ("bench walking", "no such table"),
        ("docs/gpu.md", ""),
        ("docs/gpus.md", "no docs/gpus.md"),
        ("tests/docs/test_first_page.py::test_sentences_and_their_references", ""),
        ("tests/docs/test_first_page.py::test_other", "no test_other in tests/docs/test_first_page.py"),
        ("go/quorum::TestTranscripts", ""),
        ("go/quorum::TestOther", "no TestOther in go/quorum"),
    ],
)
def test_references(reference: str, why: str) -> None:
    assert missing(reference) == why


def test_each_sentence_of_the_first_page_names_its_evidence() -> None:
    found = sentences(FIRST_PAGE)
    assert len(found) > 20
    assert [sentence for sentence, references in found if not references] == []
    assert {r: why for _, references in found for r in references if (why := missing(r))} == {}


def test_its_figures_are_in_the_tables_that_it_names() -> None:
    checked, absent = 0, []
    for sentence, references in sentences(FIRST_PAGE):
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
