"""A native library that does not load names the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchft import _libraries


def test_a_library_that_was_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [str(_libraries.PACKAGE.parent)])
    expected = r"does not load \(No module named 'torchft._missing'\): build it with `pip install \.`, or"
    with pytest.raises(ImportError, match=expected):
        _libraries.load("torchft._missing")


def test_sources_that_hide_the_installed_package_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `pip install .`, a script in the clone imports the sources beside it, which have no library."""
    sources, installed = (tmp_path / place / "torchft" for place in ("clone", "site-packages"))
    installed.mkdir(parents=True)
    (installed / "_torchft_go.abi3.so").touch()
    monkeypatch.setattr(_libraries, "PACKAGE", sources)
    monkeypatch.setattr("sys.path", [str(sources.parent), str(installed.parent)])
    with pytest.raises(ImportError) as error:
        _libraries.load("torchft._missing")
    assert f"the source folder {sources} hides the package that is installed in {installed}, " in str(error.value)
    assert str(error.value).endswith(f"start from another folder, or build it with `pip install -e {sources.parent}`")
