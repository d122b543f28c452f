"""Adds pages to the site for files outside of docs/: the README and similar files, and scripts that pages
link to.

In the repository, pages link to files outside of docs/ (`../train_ddp.py`). In the site, these links lead to
copies. MkDocs calls these functions by their names (mkdocs.yml, hooks).
"""

from __future__ import annotations

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
    for path in sorted((ROOT / "docs").glob("*.md")):
        wanted.update(dict.fromkeys(re.findall(r"\]\(\.\./([^)#]+)", path.read_text())))
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


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Redirects links to files outside of docs/ to their pages."""
    if page.file.generated_by is not None:
        return markdown
    return re.sub(r"\]\(\.\./([^)#]+)", lambda link: f"]({page_of(link[1])}", markdown)
