"""What every test gets: no settings of the user's, and no wait without an end (timeout in pyproject.toml)."""

from __future__ import annotations

import gc
import os

import pytest

pytest_plugins = ["tests.bounded", "tests.policy"]

# PyTorch's TCPStore asks the name server for the name of every address that connects, also of a loopback one, and waits
# 5 s for a lost answer. Tests that create stores by the dozen meet that even where answers are rarely lost.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def pytest_collection_finish() -> None:
    """The garbage collector leaves out the modules that are imported by now: it takes a tenth of a second for them.

    None of them may be Triton, which complains at the end of what is not collected: no test module imports it.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def state_of_lighthouses(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The command keeps the last quorum of a job in the user's home; that of a test stays with the test."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests set what they need; a lighthouse or a host name of the user's shell must not reach them."""
    for name in list(os.environ):
        if name.startswith("TORCHFT_"):
            monkeypatch.delenv(name)
