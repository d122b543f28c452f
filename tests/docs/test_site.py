"""The site: links are valid, every page is in it, every name of the API exists. MkDocs builds it, if
installed.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from documents import ROOT, documents, words

LINKS = [
    pytest.param(document, link, id=f"{document}: {link}")
    for document, text in documents().items()
    for link in sorted(set(re.findall(r"\]\((?!https?:)([^)\s]+)\)", text)))
]
# Modules that import packages which torchft does not need.
FOR_CLIENTS = ("torchft.huggingface", "torchft.lightning", "torchft.torchx")
NAMES = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)


def anchor(heading: str) -> str:
    """Returns the anchor of a heading, as Markdown tools make it."""
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.strip().lower()))


@pytest.mark.parametrize(("document", "link"), LINKS)
def test_the_link_is_valid(document: str, link: str) -> None:
    target, _, place = link.partition("#")
    path = (ROOT / document).parent / target if target else ROOT / document
    assert path.exists()
    if place:
        assert place in {
            anchor(heading) for heading in re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
        }


@pytest.mark.parametrize("name", NAMES)
def test_the_name_exists_and_has_a_docstring(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    if module in FOR_CLIENTS:
        (found,) = (
            node
            for node in ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text()).body
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == attribute
        )
        assert ast.get_docstring(found)
        return
    try:
        assert getattr(import_module(module), attribute).__doc__
    except AttributeError:
        assert import_module(name).__doc__


def test_every_page_is_in_the_site() -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    docs = ROOT / "docs"
    assert [page for page in docs.rglob("*.md") if f": {page.relative_to(docs)}\n" not in menu] == []


@pytest.mark.slow  # the other tests here check links and names
@pytest.mark.skipif(find_spec("mkdocstrings") is None, reason="needs mkdocstrings: pip install '.[docs]'")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Takes one rank through its steps" in (tmp_path / "api.html").read_text()
    first_sentence = (ROOT / "README.md").read_text().splitlines()[2]
    assert first_sentence in (tmp_path / "readme.html").read_text()


def test_the_first_pages_are_short() -> None:
    assert words((ROOT / "README.md").read_text(), tables=True) <= 820
    assert len((ROOT / "CONTRIBUTING.md").read_text()) <= 6_000


def test_the_pages_for_users_are_short() -> None:
    """Without their tables, of which that of the settings is the longest."""
    pages = {page.name: words(page.read_text(), tables=False) for page in (ROOT / "docs").glob("*.md")}
    assert sum(pages.values()) - pages["settings.md"] <= 9_050, pages
