"""Installs packages that tests need in addition to this environment: upstream, and clients of torchft.

Tests and benchmarks run upstream in separate processes, with PYTHONPATH set to the directory that `install`
returns. torch is not installed there, so both sides use the torch of this environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

REQUIREMENTS = {"nightly": "torchft-nightly==2026.10.26", "stable": "torchft==0.2.0"}

# Dependencies of both upstream versions, without torch.
DEPENDENCIES = [
    "opentelemetry-api>=1.39.0",
    "opentelemetry-sdk>=1.39.0",
    "opentelemetry-exporter-otlp-proto-http>=1.39.0",
]

# Other projects that call torchft, with the dependencies that our tests of them import. All of their
# dependencies would take hundreds of MB, and include old releases of packages of which other tests need newer
# ones.
CLIENTS = {
    "torchtitan": ["torchtitan==0.3.0", "spmd_types==0.2.3", "tyro", "docstring_parser"],
    "torchx": [
        *("torchx==0.7.0", "docstring_parser", "importlib_metadata", "lazy_importer", "mypy_extensions"),
        *("typing_inspect", "zipp"),
    ],
    "lightning": [
        "lightning==2.6.6",
        "lightning-utilities==0.15.3",
        "torchmetrics==1.9.0",
        "packaging",
        "tqdm",
    ],
    "transformers": ["transformers==5.23.0", "accelerate==1.15.0", "psutil", "regex", "safetensors", "tqdm"],
}
# Further dependencies of some of them, installed with their own dependencies, none of which is torch.
NEEDED_BY = {"transformers": ["huggingface_hub==2.4.0", "tokenizers==0.23.3", "typer"]}

CACHE_ENV = "TORCHFT_UPSTREAM_DIR"
INSTALL_TIMEOUT_S = 300


class UpstreamUnavailable(RuntimeError):
    """A package could not be installed; the message says why."""


def upstream_path(name: str) -> Path:
    """Return the PYTHONPATH entry for "nightly" or "stable".

    If it cannot be installed (no network, no wheel for this Python) the test is skipped. With CI=true it
    fails instead, since only these tests prove that both packages can share a job. With an older PyTorch it
    is always skipped.
    """
    import pytest
    from torch.distributed import ProcessGroupGloo

    if not hasattr(ProcessGroupGloo._Options, "global_ranks_in_group"):
        pytest.skip("upstream's groups set options that this release of PyTorch does not have")
    return _or_skip(lambda: install(name))


def client_path(name: str) -> Path:
    """Return the path entry for one of CLIENTS, to be put last. Skips and fails like
    :func:`upstream_path`.
    """
    steps = [["--no-deps", *CLIENTS[name]]] + ([NEEDED_BY[name]] if name in NEEDED_BY else [])
    return _or_skip(lambda: _cached(CLIENTS[name][0], *steps))


def _or_skip(installed: Callable[[], Path]) -> Path:
    import pytest

    try:
        return installed()
    except UpstreamUnavailable as e:
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(f"CI must run the tests against other packages: {e}")
        pytest.skip(str(e))


def install(name: str) -> Path:
    """Install the package once per version, Python and platform; return its directory.

    Raises:
        ValueError: unknown name.
        UpstreamUnavailable: pip could not install it.
    """
    if name not in REQUIREMENTS:
        raise ValueError(f"upstream package {name!r}: allowed are {', '.join(REQUIREMENTS)}")
    return _cached(REQUIREMENTS[name], ["--no-deps", REQUIREMENTS[name]], DEPENDENCIES)


def _cached(requirement: str, *steps: list[str]) -> Path:
    """Install packages in several calls of pip into a folder named after a requirement, and return the
    folder.
    """
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    target = _cache_dir() / f"{requirement.replace('==', '-')}-{python}-{sysconfig.get_platform()}"
    if target.is_dir():
        return target

    target.parent.mkdir(parents=True, exist_ok=True)
    # Renamed into place when complete, so that an interrupted run or two simultaneous ones never leave an
    # incomplete package.
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        for step in steps:
            _install_into(unfinished, step)
        try:
            unfinished.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _install_into(directory: Path, what: list[str]) -> None:
    command = [
        *_installer(),
        "--quiet",
        "--only-binary",
        ":all:",
        "--upgrade",
        "--target",
        str(directory),
        *what,
    ]
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise UpstreamUnavailable(f"{' '.join(what)}: not installed within {INSTALL_TIMEOUT_S} s") from None
    if result.returncode != 0:
        reason = (result.stderr or result.stdout).strip()[-1500:]
        raise UpstreamUnavailable(f"{' '.join(what)} could not be installed: {reason}")


def _installer() -> list[str]:
    """Return this environment's pip, or uv if the environment was made without pip."""
    pip = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, timeout=60)
    if pip.returncode == 0:
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    beside = Path(sys.executable).parent / "uv"
    uv = os.environ.get("UV") or (str(beside) if beside.exists() else shutil.which("uv"))
    if uv:
        return [uv, "pip", "install", "--python", sys.executable]
    raise UpstreamUnavailable(f"neither pip nor uv found for {sys.executable}")


def _cache_dir() -> Path:
    if chosen := os.environ.get(CACHE_ENV):
        return Path(chosen)
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "torchft-tests"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "torchft-tests"
    return Path.home() / ".cache" / "torchft-tests"
