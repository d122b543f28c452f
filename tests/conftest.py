"""What every test gets: no settings of the user's, and no wait without an end (timeout in pyproject.toml)."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests set what they need; a lighthouse or a host name of the user's shell must not reach them."""
    for name in list(os.environ):
        if name.startswith("TORCHFT_"):
            monkeypatch.delenv(name)
