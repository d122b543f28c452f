"""Defaults for every test: no settings from the user's environment, and a limit for each wait (timeout in
pyproject.toml).
"""

from __future__ import annotations

import gc
import os

import pytest

pytest_plugins = ["tests.bounded", "tests.policy"]

# PyTorch's TCPStore looks up the name of every address that connects, even of loopback, and waits 5 s for a lost answer
# of the DNS. Tests that create dozens of stores meet this even where answers are rarely lost.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def pytest_collection_finish() -> None:
    """Excludes the modules imported so far from garbage collections, which take a tenth of a second for them.

    None of them may be Triton, which complains at the end of what is not collected: no test module imports it.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def state_of_lighthouses(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The lighthouse command keeps the last quorum of a job in the user's home directory; in a test, in the
    test's directory.
    """
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes settings of the user's shell, such as a lighthouse or host name. Tests set what they need."""
    for name in list(os.environ):
        if name.startswith("TORCHFT_"):
            monkeypatch.delenv(name)
