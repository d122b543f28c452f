"""Checkpoints between our package and the published one, in both directions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import START_TIMEOUT_S, ours_path
from published import REQUIREMENTS, published_path

ANSWER_TIMEOUT_S = 60


class Peer:
    """A process that runs checkpoint_peer.py with the torchft in `path`."""

    def __init__(self, path: Path) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("checkpoint_peer.py"))],
            env={**os.environ, "PYTHONPATH": str(path), "TORCHFT_HOST": "localhost"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert Path(self._read(START_TIMEOUT_S)["torchft"]) == path / "torchft"

    def ask(self, do: str, **args: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **args}) + "\n")
        self._process.stdin.flush()
        return self._read(ANSWER_TIMEOUT_S)

    def _read(self, timeout: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        killer = threading.Timer(timeout, self._process.kill)
        killer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            killer.cancel()
        if not line:
            self._log.seek(0)
            pytest.fail(f"the peer is gone or took more than {timeout} s: {self._log.read()[-3000:].decode()}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._process.stdout.close()
        self._log.close()


@pytest.fixture(scope="module")
def ours() -> Iterator[Peer]:
    peer = Peer(ours_path())
    yield peer
    peer.close()


@pytest.fixture(scope="module", params=sorted(REQUIREMENTS))
def published(request: pytest.FixtureRequest) -> Iterator[Peer]:
    peer = Peer(published_path(request.param))
    yield peer
    peer.close()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("num_chunks", [0, 1, 3])
@pytest.mark.parametrize("ours_serves", [True, False])
def test_a_state_goes_from_one_to_the_other(ours: Peer, published: Peer, ours_serves: bool, num_chunks: int) -> None:
    source, target = (ours, published) if ours_serves else (published, ours)
    metadata = source.ask("serve", num_chunks=num_chunks, step=7)["metadata"]
    assert target.ask("fetch", num_chunks=num_chunks, step=7, metadata=metadata) == {"received": True}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("ours_serves", [True, False])
def test_a_wrong_step_is_an_error_for_either(ours: Peer, published: Peer, ours_serves: bool) -> None:
    source, target = (ours, published) if ours_serves else (published, ours)
    metadata = source.ask("serve", num_chunks=0, step=7)["metadata"]
    error = target.ask("fetch", num_chunks=0, step=8, metadata=metadata)["error"]
    assert "400" in error and "7" in error and "8" in error
