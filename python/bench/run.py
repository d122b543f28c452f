"""Measures ours and upstream side by side: `make bench`, or some parts of it:

    python python/bench/run.py step startup --rounds 4 --no-write
    python python/bench/run.py --rewrite

Prints a table for each part, writes the tables into docs/internals/benchmarks.md and all figures into
docs/internals/benchmarks.json. A repeated part replaces only its own table. `--rewrite` measures nothing:
after a change of a table's form, it writes all tables again from the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import again
import commands
import divergence
import heal
import heal_sources
import heal_stall
import loader
import local_sgd
import process_groups
import quantized
import recovery
import recovery_churn
import replay
import restart
import slow_group
import startup
import step
import throughput
import unauthenticated
from common import REPOSITORY, Side
from processes import JobFailed, ours_path
from upstream import REQUIREMENTS, UpstreamUnavailable, install

PARTS = {
    "startup": startup,
    "commands": commands,
    "step": step,
    "throughput": throughput,
    "loader": loader,
    "heal": heal,
    "heal_sources": heal_sources,
    "heal_stall": heal_stall,
    "process_groups": process_groups,
    "quantized": quantized,
    "recovery": recovery,
    "churn": recovery_churn,
    "restart": restart,
    "local_sgd": local_sgd,
    "replay": replay,
    "again": again,
    "slow_group": slow_group,
    "divergence": divergence,
    "unauthenticated": unauthenticated,
}
ROUNDS = {
    "startup": 10,
    "commands": 10,
    "step": 20,
    "throughput": 12,
    "loader": 10,
    "heal": 5,
    "heal_sources": 5,
    "heal_stall": 10,
    "process_groups": 8,
    "recovery": 10,
    "churn": 1,
    "restart": 5,
    "local_sgd": 5,
    "quantized": 8,
    "replay": 10,
    "again": 7,
    "slow_group": 5,
    "divergence": 10,
    "unauthenticated": 7,
}
OURS, UPSTREAM = "ours", "upstream"


def main() -> int:
    args = _parse()
    if args.rewrite:
        _rewrite(Path(args.docs))
        return 0
    try:
        upstream = Side(REQUIREMENTS[args.upstream].replace("==", " "), install(args.upstream))
    except UpstreamUnavailable as e:
        print(f"nothing to compare with: {e}", file=sys.stderr)
        return 1
    ours = Side(OURS, Path(args.ours).resolve() if args.ours else _built())

    began = time.monotonic()

    def progress(line: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {line}", flush=True)

    for name in args.parts or PARTS:
        result = PARTS[name].measure(ours, upstream, args.rounds or ROUNDS[name], progress)
        figures = _rounded({**result, "upstream": upstream.name, "machine": machine()})
        print(f"\n{name}\n\n{table(name, figures)}\n", flush=True)
        if not args.no_write:
            # After each part, so that an interrupted run keeps its figures.
            _write(Path(args.docs), name, figures)
    return 0


def table(name: str, figures: dict[str, Any]) -> str:
    """Format the table of a part from its figures in benchmarks.json."""
    measured = {key: value for key, value in figures.items() if key not in ("upstream", "machine")}
    return PARTS[name].tables(_renamed(measured, figures["upstream"]), OURS, UPSTREAM)


def _renamed(value: Any, release: str) -> Any:
    """Return the figures with `upstream` as a key instead of upstream's release, which the line above a table
    names.
    """
    if isinstance(value, dict):
        return {key.replace(release, UPSTREAM): _renamed(item, release) for key, item in value.items()}
    return value


def _built() -> Path:
    """Return the directory of the torchft that this Python imports, else of this checkout, built in place."""
    try:
        return ours_path()
    except JobFailed:
        return REPOSITORY


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure ours and upstream side by side.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}; default: all")
    parser.add_argument("--rounds", type=int, help="rounds of a part; default: " + str(ROUNDS))
    parser.add_argument("--upstream", choices=sorted(REQUIREMENTS), default="nightly")
    parser.add_argument(
        "--ours",
        help="directory that holds our torchft; default: that of the importable torchft, else this checkout",
    )
    folder = str(REPOSITORY / "docs" / "internals")
    parser.add_argument("--docs", default=folder, help="folder of benchmarks.md and .json")
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--rewrite", action="store_true", help="measure nothing, write all tables again")
    args = parser.parse_args()
    for part in args.parts:
        if part not in PARTS:
            parser.error(f"part {part!r}: allowed are {', '.join(PARTS)}")
    if args.rounds is not None and args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: allowed is 1 or more")
    return args


def _write(docs: Path, name: str, figures: dict[str, Any]) -> None:
    """Replace one part's table between its markers, and its figures in the JSON file."""
    store = docs / "benchmarks.json"
    known = json.loads(store.read_text()) if store.exists() else {}
    known[name] = figures
    store.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    _rewrite(docs, {name: str(date.today())})


def _rewrite(docs: Path, days: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write every table from the figures. Tables keep their dates, except those in ``days``.

    The page names the machine of most parts once; a table only states the differences for its part.
    """
    page = docs / "benchmarks.md"
    known = json.loads((docs / "benchmarks.json").read_text())
    places = {name: f"{figures['machine']}; against {figures['upstream']}" for name, figures in known.items()}
    usual = Counter(places.values()).most_common(1)[0][0]
    _put(page, "machine", f"{usual}.")
    usual_parts = re.split("[,;] ", usual)
    for name, figures in known.items():
        above = page.read_text().partition(f"<!-- {name}: written by run.py -->\n")[2]
        day = days.get(name) or above.partition("\n")[0].rstrip(".").rpartition(", ")[2]
        different = [part for part in re.split("[,;] ", places[name]) if part not in usual_parts]
        _put(page, name, f"{', '.join([*different, day])}.\n\n{table(name, figures)}")


def _put(page: Path, name: str, content: str) -> None:
    """Replace the text between the markers of this name."""
    text = page.read_text()
    begin, end = f"<!-- {name}: written by run.py -->", f"<!-- end of {name} -->"
    if begin not in text or end not in text:
        raise SystemExit(f"{page} lacks the markers {begin!r} and {end!r}")
    before, after = text[: text.index(begin)], text[text.index(end) :]
    page.write_text(f"{before}{begin}\n{content}\n{after}")


def _rounded(value: Any) -> Any:
    """Round to five digits, more than the spread justifies, to keep the file readable."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def machine() -> str:
    """Describe the machine of the measurements, without its name."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line
        ]
        model = models[0] if models else model
    return (
        f"{os.cpu_count()} cores ({model}), {platform.system()}, Python {platform.python_version()}, "
        f"PyTorch {version('torch')}"
    )


if __name__ == "__main__":
    sys.exit(main())
