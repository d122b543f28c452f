"""Adds pages to the site for files outside of docs/: the README and similar files, and scripts that pages
link to.

In the repository, pages link to files outside of docs/ (`../train_ddp.py`). In the site, these links lead to
copies. MkDocs calls these functions by their names (mkdocs.yml, hooks).
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
BESIDE_DOCS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE")
LANGUAGES = {".py": "python", ".proto": "protobuf", ".sbatch": "bash", ".yaml": "yaml"}


def on_files(files: Files, config: Any) -> Files:
    """Adds a page for each file outside of docs/ that a page links to."""
    wanted = dict.fromkeys(BESIDE_DOCS)
    for path in sorted((ROOT / "docs").rglob("*.md")):
        page = path.relative_to(ROOT / "docs").as_posix()
        links = re.findall(r"\]\((\.\./[^)#]+)", path.read_text())
        wanted.update(dict.fromkeys(name for link in links if (name := outside(page, link))))
    for name in BESIDE_DOCS[:-1]:
        wanted.update(dict.fromkeys(n for n in re.findall(r"\]\(([^):#]+)\)", (ROOT / name).read_text())))
    for name in wanted:
        if (ROOT / name).is_file() and not name.startswith("docs/"):
            files.append(File.generated(config, page_of(name), content=content_of(name)))
    return files


def page_of(name: str) -> str:
    """The page of the site for a file of the repository."""
    return name.lower() if name in BESIDE_DOCS[:-1] else f"source/{name}.md"


def content_of(name: str) -> str:
    text = (ROOT / name).read_text()
    if name in BESIDE_DOCS[:-1]:
        return re.sub(r"\]\((?!\w+:)([^)]+)\)", lambda link: f"]({_from_root(link[1])})", text)
    # `search: exclude`, because a search should not find the code of examples.
    language = LANGUAGES.get(Path(name).suffix, "")
    return f"---\nsearch:\n  exclude: true\n---\n# {name}\n\n````{language}\n{text}\n````\n"


def _from_root(target: str) -> str:
    return target.removeprefix("docs/") if target.startswith("docs/") else page_of(target)


def outside(page: str, link: str) -> str | None:
    """The file of the repository that a page of docs/ links to; None if it is in docs/, too."""
    name = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if name.startswith("docs/") else name


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Redirects links to files outside of docs/ to their pages."""
    if page.file.generated_by is not None:
        return markdown
    here = page.file.src_uri

    def redirected(link: re.Match[str]) -> str:
        name = outside(here, link[1])
        return f"]({posixpath.relpath(page_of(name), posixpath.dirname(here))}" if name else link[0]

    return re.sub(r"\]\((\.\./[^)#]+)", redirected, markdown)
