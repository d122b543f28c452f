"""The output of a script in the log of its group, beside which torchrun writes its report of each failure."""

from __future__ import annotations

import re
from pathlib import Path

# The line that torchrun's agent logs when a worker has failed. If it does not start the worker again, its own
# traceback follows, without the cause, and a box between two lines of "=".
_REPORT = re.compile(r"torch/distributed/elastic/\S+ failed \(exitcode: (-?\d+)")
_TRACEBACK = "Traceback (most recent call last):"
_RANK = re.compile(r"\[rank\d+\]: ?")  # before each line of a traceback, where torch.distributed is used
_BORDER = re.compile(r"={20,}")
# What Triton's library says when a process ends that has imported it, torchrun's after its report.
_AT_EXIT = re.compile(r"nanobind: | - leaked | - \.\.\. skipped|See https://nanobind")


def tail(log: Path, lines: int = 20) -> str:
    """The last lines that the script wrote in its last life, without torchrun's report of that failure."""
    return "\n".join(_last_life(log)[-lines:])


def error_of(log: Path) -> str:
    """The last line of the traceback with which the script ended in its last life; empty if there is none."""
    found = ""
    lines = [_RANK.sub("", line, 1) for line in _last_life(log)]
    for number, line in enumerate(lines):
        ignored = number > 0 and lines[number - 1].startswith("Exception ignored in")
        if line == _TRACEBACK and not ignored:
            found = next((after for after in lines[number + 1 :] if after and not after[0].isspace()), found)
    return found


def exit_code(log: Path) -> int:
    """The exit code of the rank that ended the last life, as torchrun reports it: negative for a signal; 0 if
    there is no report.
    """
    codes = _REPORT.findall(log.read_text(errors="replace")) if log.exists() else []
    return int(codes[-1]) if codes else 0


def _last_life(log: Path) -> list[str]:
    """The lines of the last life that has any; all lines if torchrun alone has written."""
    text = log.read_text(errors="replace").splitlines() if log.exists() else []
    last: list[str] = []
    life: list[str] = []
    borders = 0  # until the end of a report
    for number, line in enumerate(text):
        if borders:
            borders -= _BORDER.fullmatch(line) is not None
        elif _REPORT.search(line):
            last, life = life or last, []
            borders = 2 if text[number + 1 : number + 2] == [_TRACEBACK] else 0
        elif (line or life) and _AT_EXIT.match(line) is None:
            life.append(line)
    return life or last or text
