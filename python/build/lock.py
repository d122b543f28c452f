"""The versions of what `make` installs for tests, linters and docs: constraints.txt beside this file.

`make lock` moves them to the newest releases. PyTorch, and what it needs, has no version there: the tests run
with its newest release, and `make test-all` runs some with the oldest of each package that users install
(oldest.py).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCK = Path(__file__).with_name("constraints.txt")
# The extras that the targets of the Makefile install.
EXTRAS = ("generate", "lint", "lock", "ray", "test", "train", "plot", "docs")
OLDEST_PYTHON = "3.10"
HEADER = """\
# The versions of what make installs, but PyTorch: written by `make lock`, and constraints of pip and uv.
"""
NO_TORCH = 'torch ; python_version < "3"'


def newest() -> str:
    """Returns the lock with the newest releases, one `name==version ; marker` a line.

    Raises:
        RuntimeError: the index of packages does not answer, or no versions fit together; with uv's message.
    """
    with tempfile.TemporaryDirectory() as folder:
        override = Path(folder) / "override.txt"
        override.write_text(NO_TORCH)
        command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--quiet", "--universal"]
        command += [
            "--python-version",
            OLDEST_PYTHON,
            "--no-python-downloads",
            "--no-annotate",
            "--no-header",
        ]
        command += ["--override", str(override), *(f"--extra={extra}" for extra in EXTRAS)]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired as e:
            raise RuntimeError(f"lock: uv had no answer within {e.timeout:.0f} s") from None
    if done.returncode:
        raise RuntimeError(f"lock: {done.stderr.strip()}")
    return done.stdout


def versions(lock: str) -> dict[str, str]:
    """The version of each package, by `name` or `name ; marker`."""
    lines = re.findall(r"^([\w.-]+)==(\S+)(.*)$", lock, re.MULTILINE)
    return {name + marker: version for name, version, marker in lines}


def moved(old: str, new: str) -> list[str]:
    """Describes the packages of `old` that have another version in `new`."""
    now = versions(new)
    return [
        f"{name} {version} -> {now[name]}"
        for name, version in versions(old).items()
        if now.get(name, version) != version
    ]


def newer() -> str:
    """A line that names the packages with newer releases, why they are not known, or nothing."""
    try:
        found = moved(LOCK.read_text(), newest())
    except RuntimeError as e:
        return f"newer tools are not looked for: {e}"
    return f"newer tools exist, `make lock` takes them: {', '.join(found)}" if found else ""


def main() -> int:
    argparse.ArgumentParser(description="Move constraints.txt to the newest releases.").parse_args()
    try:
        new = newest()
    except RuntimeError as e:
        print(e, file=sys.stderr)
        return 1
    old = LOCK.read_text() if LOCK.exists() else ""
    LOCK.write_text(HEADER + new)
    print("\n".join(moved(old, new)) or "no newer releases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
