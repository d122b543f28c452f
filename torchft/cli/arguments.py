"""Parses arguments: types of values, and errors that suggest the nearest known option or command."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable
from typing import Any, NoReturn, Sequence

from torchft._lighthouse_http import LIGHTHOUSE_ENV
from torchft._security import JOB_ENV

_SECONDS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


class Parser(argparse.ArgumentParser):
    """Accepts flags with hyphens or underscores, and suggests the nearest flag for an unknown one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        self._negative_number_matcher = re.compile(r"-\d")  # "-3s" is a malformed value, not a flag

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        parsed, unknown = self.parse_known_args(sys.argv[1:] if args is None else args, namespace)
        if unknown:
            flags = [
                flag for action in self._actions for flag in action.option_strings if flag.startswith("--")
            ]
            self.error(f"{unknown[0]} is not understood{nearest(unknown[0], flags)}; see {self.prog} --help")
        return parsed

    def _parse_optional(self, arg_string: str) -> Any:
        name, equals, value = arg_string.partition("=")
        return super()._parse_optional(
            name.replace("_", "-") + equals + value if name.startswith("--") else arg_string
        )

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(2)


def ask_of(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that select the lighthouse and the job."""
    ask_lighthouse(parser)
    parser.add_argument(
        "--job", metavar="ID", help=f"one of the jobs that it serves (environment: {JOB_ENV})"
    )


def ask_lighthouse(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that selects the lighthouse."""
    about = f"http://host:port, or those of a cluster separated by commas (environment: {LIGHTHOUSE_ENV})"
    parser.add_argument("--lighthouse", metavar="ADDRESS", help=about)


def nearest(word: str, known: Iterable[str]) -> str:
    """`` (did you mean X?)`` or nothing."""
    found = difflib.get_close_matches(word.partition("=")[0].replace("_", "-"), list(known), n=1, cutoff=0.5)
    return f" (did you mean {found[0]}?)" if found else ""


def duration(text: str) -> float:
    """Parses seconds: ``10s``, ``1.5m``, ``500ms``, ``10``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|)", text)
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed; allowed: a time above 0 like 500ms, 10s or 2m"
        )
    return float(match[1]) * _SECONDS[match[2]]


def natural(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed; allowed: a whole number of at least {least}"
        )
    return int(text)


def positive(text: str) -> int:
    return natural(text, 1)


def lighthouse_count(text: str) -> int:
    """Parses the number of lighthouses of a job: one, or the odd number of a cluster."""
    if text not in ("1", "3", "5", "7"):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: 1, 3, 5 or 7")
    return int(text)


def replicas(text: str) -> tuple[int, int]:
    """Parses the number of replica groups, initial and maximum: ``2`` or ``2:8``."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least = int(match[1]) if match else 0
    most = int(match[2] or least) if match else 0
    if not 1 <= least <= most:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed; allowed: N or N:MAX with N of at least 1 and MAX not below it"
        )
    return least, most
