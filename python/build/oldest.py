"""Runs the tests of units and of threads as replicas with the oldest releases that users may install.

These are the lower bounds in pyproject.toml, of `dependencies` and of the extras that users install; the rest
is as in the lock. The environment in build/oldest is made once, and again when one of the two changes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

from lock import LOCK, ROOT

FOLDER = ROOT / "build" / "oldest"
# The extras of users that have a lower bound.
EXTRAS = ("otel", "ray", "torchx")
# The packages that the tests need besides these.
TOOLS = ("pytest", "pytest-rerunfailures", "pytest-timeout", "pyyaml", "setuptools", "numpy", "scikit-learn")
TESTS = ("tests/unit", "tests/integration")


def lowest(pyproject: str) -> dict[str, str]:
    """Returns the lower bound of each package that users install, from the text of pyproject.toml.

    Raises:
        ValueError: an extra of EXTRAS, or `dependencies`, is missing or has no lower bound.
    """
    found: dict[str, str] = {}
    for name in ("dependencies", *EXTRAS):
        wanted = re.search(rf"^{name} = \[(.*?)\]$", pyproject, re.MULTILINE | re.DOTALL)
        bounds = dict(re.findall(r'"([\w-]+(?:\[\w+\])?)>=([\d.]+)"', wanted[1] if wanted else ""))
        if not bounds:
            raise ValueError(f"pyproject.toml: {name} has no package with a lower bound, such as torch>=2.7")
        found |= bounds
    return found


def requirements(pyproject: str, lock: str) -> str:
    """Returns what to install, a line each: the lower bounds, of which the newest patch counts, and the
    tools.
    """
    tools = [line for line in lock.splitlines() if line.partition("==")[0] in TOOLS]
    return "\n".join([*(f"{name}=={version}.*" for name, version in lowest(pyproject).items()), *tools, ""])


def environment() -> Path:
    """Returns the interpreter of an environment with these packages."""
    wanted = requirements((ROOT / "pyproject.toml").read_text(), LOCK.read_text())
    python, made = FOLDER / "bin" / "python", FOLDER / "requirements.txt"
    if not made.exists() or made.read_text() != wanted:
        made.unlink(missing_ok=True)
        venv.create(FOLDER, clear=True, with_pip=True)
        wants = FOLDER / "wanted.txt"
        wants.write_text(wanted)
        print(
            "Installing the oldest releases:",
            *lowest((ROOT / "pyproject.toml").read_text()).items(),
            flush=True,
        )
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", wants],
            check=True,
        )
        wants.rename(made)
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description="Run tests with the oldest releases that users may install.")
    parser.add_argument("tests", nargs="*", default=TESTS, help="what pytest runs (default: %(default)s)")
    args = parser.parse_args()
    python = environment()
    # Not installed there: the source tree, with the library that make has built for every Python, and the
    # entry points.
    subprocess.run([python, "setup.py", "--quiet", "egg_info", "--egg-base", FOLDER], cwd=ROOT, check=True)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(FOLDER)])}
    env.pop("CI", None)  # what old releases lack is skipped
    return subprocess.call(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *args.tests], cwd=ROOT, env=env
    )


if __name__ == "__main__":
    sys.exit(main())
