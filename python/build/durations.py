"""Prints the seconds of `make test` by file; with `--write` into docs/internals/tests.md, too.

Reads build/test, which `make test` writes: pytest's junit files, and Go's lines in the log. The seconds were
measured while other parts ran.
"""

from __future__ import annotations

import argparse
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "internals" / "tests.md"
BEGIN, END = "<!-- durations: written by durations.py -->", "<!-- end of durations -->"


def of_pytest(junit: Path) -> tuple[dict[str, float], Counter[str]]:
    """Return seconds and number of tests by file, from pytest's junit files."""
    seconds: dict[str, float] = defaultdict(float)
    tests = Counter[str]()
    for case in ElementTree.parse(junit).iter("testcase"):
        words = case.get("classname", "").split(".")
        # In tests.unit.test_x.TestClass, the file is the last word in lower case.
        name = "/".join(word for word in words if word == word.lower()) + ".py"
        seconds[name] += float(case.get("time", 0))
        tests[name] += 1
    return seconds, tests


def of_go(log: str) -> dict[str, str]:
    """Return the seconds of each Go package, or "(cached)"."""
    return dict(re.findall(r"^ok\s+\S+?/(go/\S+)\s+([\d.]+|\(cached\))", log, re.MULTILINE))


def table(folder: Path, most: int) -> str:
    seconds: dict[str, float] = defaultdict(float)
    tests = Counter[str]()
    for junit in sorted(folder.glob("*.xml")):
        of_file, found = of_pytest(junit)
        tests.update(found)
        for name, took in of_file.items():
            seconds[name] += took
    packages = of_go((folder / "go.log").read_text()) if (folder / "go.log").exists() else {}
    for name, duration in packages.items():
        seconds[name] = 0.0 if duration == "(cached)" else float(duration)
    lines = ["| seconds | tests | file or package |", "|---|---|---|"]
    shown = sorted(seconds.items(), key=lambda item: item[1], reverse=True)[:most]
    for name, took in shown:
        lines.append(f"| {took:.1f} | {tests[name] or ''} | `{name}` |")
    rest = [name for name in seconds if name not in dict(shown)]
    if rest:
        lines.append(
            f"| {sum(seconds[n] for n in rest):.1f} | {sum(tests[n] for n in rest)} | {len(rest)} others |"
        )
    lines.append(f"| {sum(seconds.values()):.1f} | {sum(tests.values())} | all |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder", nargs="?", type=Path, default=ROOT / "build/test", help="default: %(default)s"
    )
    parser.add_argument("--most", type=int, default=20, help="lines (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help=f"write them into {PAGE.name}")
    args = parser.parse_args()
    rows = table(args.folder, args.most)
    print(rows)
    if args.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{rows}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
