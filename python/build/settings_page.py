"""Writes the tables of docs/settings.md from the code: `.venv/bin/python python/build/settings_page.py`.

Arguments come from signatures and docstrings, variables from the `#:` comments above their names, flags from
`--help`. A test fails if the page is stale.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "settings.md"
_HEAD = "| setting | default | meaning |\n|---|---|---|\n"
_LIGHTHOUSE = "from torchft._torchft import lighthouse_main; lighthouse_main()"
# Arguments that a script gives in any case, or that stand for all others.
_NO_SETTINGS = ("self", "pg", "load_state_dict", "state_dict", "manager", "settings")


class Row(NamedTuple):
    """One setting: what sets it, its default, and what it means."""

    name: str
    default: str
    meaning: str


def of_help(usage: str) -> list[Row]:
    """The flags in a `--help` of argparse or pflag, whose lines are not wrapped."""
    found = re.findall(r"^ +(?:-\w, )?(--[\w-]+)(?: ([^\s,]+))?\s{2,}(\S.*)$", usage, re.MULTILINE)
    rows = []
    for name, kind, text in found:
        said = re.search(r"\s*\((?:default:? |environment: )?((?:[^()]|\([^()]*\))*)\)$", text)
        if name != "--help":
            nothing = "required" if "(required)" in text else "none" if kind else "off"
            default = said[1].strip('"') if said else nothing
            rows.append(Row(f"`{name}`", default, text[: said.start()] if said else text))
    return rows


def of_variables(source: str) -> dict[str, Row]:
    """The variables of the environment that a source of Python reads, from the comments above their names."""
    rows = {}
    for comment, name in re.findall(r'((?:^ *#: .*\n)+).*?"([A-Z_]+)"', source, re.MULTILINE):
        text = " ".join(line.strip().removeprefix("#: ") for line in comment.splitlines())
        meaning, _, default = text.removesuffix(".").partition(" Default: ")
        rows[name] = Row(name, default, meaning.removesuffix("."))
    return rows


def of_class(source: str, name: str) -> list[Row]:
    """The arguments of a class: their literal defaults, and what the docstring says."""
    tree = ast.parse(source)
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    (init,) = (node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    said = arguments(ast.get_docstring(found) or "")
    given = init.args
    plain = [*[None] * (len(given.args) - len(given.defaults)), *given.defaults]
    rows = []
    for arg, default in [
        *zip(given.args, plain, strict=True),
        *zip(given.kwonlyargs, given.kw_defaults, strict=True),
    ]:
        if arg.arg not in _NO_SETTINGS:
            if arg.arg not in said:
                raise ValueError(
                    f"{name}.{arg.arg} is not in the docstring of {name}: a line under Args: says it"
                )
            rows.append(_argument(arg.arg, default, said[arg.arg]))
    return rows


def arguments(docstring: str) -> dict[str, str]:
    """The texts in the part "Args:" of a docstring, as Markdown."""
    part = re.search(r"^Args:\n((?:    .*\n)+)", docstring + "\n", re.MULTILINE)
    found = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", part[1] if part else "", re.MULTILINE)
    return {name: _markdown(" ".join(text.split()).removesuffix(".")) for name, text in found}


def _markdown(text: str) -> str:
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text.replace("``", "`"))
    return re.sub(r"docs/([\w/]+)\.md", r"[\1](\1.md)", text)


def _argument(name: str, default: ast.expr | None, meaning: str) -> Row:
    literal = "required" if default is None else _literal(default)
    if said := re.search(r"[;.,]? default: ([^.;]+)", meaning):
        return Row(f"`{name}`", said[1], meaning[: said.start()] + meaning[said.end() :])
    # The default of the variable, which has its own comment, stands in the table.
    meaning = re.sub(r"[;.]? None: as TORCHFT_\w+ says \((?:[^()]|\([^()]*\))*\)", "", meaning)
    return Row(f"`{name}`", literal, meaning)


def _literal(default: ast.expr) -> str:
    text = ast.unparse(default)
    if duration := re.fullmatch(r"timedelta\((milli)?seconds=(\d+)\)", text):
        return f"{duration[2]} {'ms' if duration[1] else 's'}"
    return {"None": "none", "True": "on", "False": "off"}.get(text, text.rpartition(".")[2].strip("'\""))


def joined(rows: list[Row], variables: Mapping[str, Row]) -> tuple[list[Row], list[Row]]:
    """Arguments with the variables that set the same, whose comment begins with the argument's name, and the
    other variables.
    """
    of_argument = {
        match[1]: row for row in variables.values() if (match := re.match(r"(`\w+`)(?!=)", row.meaning))
    }
    both = []
    for row in rows:
        more = of_argument.pop(row.name, None)
        if more is not None:
            default = row.default if more.default == "the argument's" else more.default
            unit = more.meaning.removeprefix(row.name)
            row = Row(f"{row.name}; {more.name}{unit}", default, row.meaning)
        both.append(row)
    used = {name for row in both for name in re.findall(r"TORCHFT_\w+", row.name)}
    return both, [row for name, row in sorted(variables.items()) if name not in used]


def table(rows: list[Row]) -> str:
    lines = (
        f"| {row.name} | {row.default.replace('|', '/')} | {row.meaning.replace('|', '/')} |\n"
        for row in rows
    )
    return _HEAD + "".join(lines)


def _variables() -> dict[str, Row]:
    found: dict[str, Row] = {}
    for path in sorted((ROOT / "torchft").rglob("*.py")):
        found.update(of_variables(path.read_text()))
    return found


def _help(*command: str) -> list[Row]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHFT_")}
    done = subprocess.run(
        [sys.executable, *command, "--help"],
        env={**environment, "COLUMNS": "1000"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return of_help(done.stdout)


def tables() -> Iterator[tuple[str, str]]:
    """Each table of the page, by its name."""
    arguments_of_manager = of_class((ROOT / "torchft" / "manager.py").read_text(), "Manager")
    manager, variables = joined(arguments_of_manager, _variables())
    yield "job", table(of_class((ROOT / "torchft" / "job.py").read_text(), "Job"))
    yield "manager", table(manager)
    yield "variables", table(variables)
    yield "lighthouse", table(_help("-c", _LIGHTHOUSE))
    yield "run", table(_help("-m", "torchft.cli", "run"))
    yield "keeper", table(_help("-m", "torchft.cli", "keeper"))


def page(text: str) -> str:
    """The page with its tables written anew."""
    for name, rows in tables():
        begin, end = f"<!-- {name}: written by settings_page.py -->\n", f"<!-- end of {name} -->"
        before, found, rest = text.partition(begin)
        if not found or end not in rest:
            raise ValueError(f"{PAGE.name} has no place for the table {name!r}: {begin.strip()} … {end}")
        text = before + begin + rows + end + rest.partition(end)[2]
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
