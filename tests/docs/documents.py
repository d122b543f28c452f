"""Finds the commands for users in the documents, and counts words. Pure functions of the text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHELLS = ("sh", "bash", "console")
# Beginnings of commands in running text. `make` alone names the program; with an argument it is a command.
PROGRAMS = r"(?:make|python|pip|torchrun|torchft|torchft_lighthouse|torchx|sbatch|kubectl|cd)"


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, and the heading above it."""

    document: str
    heading: str
    language: str
    text: str


@dataclass(frozen=True)
class Command:
    """A command in a document; `inline` if it is in running text."""

    document: str
    text: str
    inline: bool = False


def documents() -> dict[str, str]:
    """The text of each document for users, by its path from the repository's root."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def blocks(document: str, text: str) -> list[Block]:
    """All fenced blocks. If a block names no language, its language is ``""``."""
    found: list[Block] = []
    heading, language, lines = "", None, []
    for line in text.splitlines():
        if language is None:
            if line.startswith("#"):
                heading = line.lstrip("#").strip()
            elif fence := re.fullmatch(r"\s*```(\w*)", line):
                language, lines = fence[1], []
        elif line.strip() == "```":
            found.append(Block(document, heading, language, "\n".join(lines) + "\n"))
            language = None
        else:
            lines.append(line)
    return found


def commands(document: str, text: str) -> list[Command]:
    """Every command in the document's shell blocks, and every command quoted in running text."""
    found = [
        Command(document, command)
        for block in blocks(document, text)
        if block.language in SHELLS
        for command in block_commands(block.text, console=block.language == "console")
    ]
    prose = re.sub(r"^\s*```.*?^\s*```", "", text, flags=re.DOTALL | re.MULTILINE)
    # A quoted command may continue in the next line.
    for quoted in re.findall(rf"`({PROGRAMS}\s[^`]+)`", prose):
        found.append(Command(document, " ".join(quoted.split()), inline=True))
    return found


def block_commands(text: str, console: bool = False) -> list[str]:
    """The commands of a shell block, without comments. Continued lines and here-documents are one command.

    In a `console` block only lines after the prompt ``$`` are commands.
    """
    return list(_commands(text.splitlines(), console))


def _commands(lines: list[str], console: bool) -> Iterator[str]:
    rest = iter(lines)
    for line in rest:
        if console:
            if not line.startswith("$ "):
                continue
            line = line[2:]
        while line.endswith("\\"):
            line = line[:-1].rstrip() + " " + next(rest).strip()
        if here := re.search(r"<<-?'?(\w+)'?", line):
            for more in rest:
                line += "\n" + more
                if more.strip() == here[1]:
                    break
        else:
            line = re.sub(r"(^|\s)#\s.*", "", line).strip()
        if line:
            yield line


def indented_commands(text: str) -> list[str]:
    """Commands in blocks that are indented instead of fenced, which the other functions do not find."""
    return re.findall(rf"^(?: {{4}}|\t)({PROGRAMS} .*)", text, re.MULTILINE)


def words(page: str, tables: bool) -> int:
    """The words to read on a page: without code blocks, pictures, targets of links and comments."""
    page = re.sub(r"^\s*```.*?^\s*```$|<!--.*?-->|^:::.*?$", "", page, flags=re.DOTALL | re.MULTILINE)
    if not tables:
        page = re.sub(r"^\|.*$", "", page, flags=re.MULTILINE)
    page = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", page)
    page = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", page)
    return sum(re.search(r"\w", word) is not None for word in page.split())
