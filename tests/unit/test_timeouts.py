"""Errors of timeouts, compatible with scripts for upstream: their class, and "timed out" in their text."""

from __future__ import annotations

import ast
import re
import socket
from datetime import timedelta
from multiprocessing import Pipe
from pathlib import Path
from typing import Iterator

import pytest
import torch

import torchft
from torchft.checkpointing import HTTPTransport
from torchft.checkpointing._rwlock import RWLock
from torchft.checkpointing.transport import CheckpointError, CheckpointTimeout
from torchft.coordination import LighthouseClient, LighthouseServer
from torchft.futures import future_timeout, future_wait
from torchft.multiprocessing import _MonitoredPipe

SHORT = timedelta(seconds=0.05)
SOURCES = Path(torchft.__file__).parent
GO = SOURCES.parent / "go"
# Messages for operators: the command `torchft`, and the lighthouse's reason for an eviction.
NOT_TO_SCRIPTS = {"torchft/launch/lighthouse.py", "torchft/_lighthouse_http.py", "go/lighthouse/watch.go"}


def texts_of_timeouts() -> Iterator[tuple[str, str]]:
    """Returns the places where an error of a timeout is made, and the constant parts of its text."""
    for source in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(source.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id in ("TimeoutError", "CheckpointTimeout", "WorkerTimedOut"):
                parts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                name = source.relative_to(SOURCES).as_posix()
                yield f"{name}:{node.lineno}", "".join(part for part in parts if isinstance(part, str))


def test_every_timeout_says_timed_out() -> None:
    texts = dict(texts_of_timeouts())
    assert len(texts) > 15
    silent = {where: text for where, text in texts.items() if "timed out" not in text}
    assert not silent, silent


def test_errors_with_a_time_limit_say_timed_out() -> None:
    """Errors of other classes, and of the Go core, whose text contains "within" and a time."""
    within, found = re.compile(r"within (\{|%[vs])"), 0
    sources = [p for p in (*SOURCES.rglob("*.py"), *GO.rglob("*.go")) if not p.name.endswith("_test.go")]
    for source in sources:
        for line in source.read_text().splitlines():
            raised = "raise " in line or "Error(" in line or "Errorf(" in line
            if (
                raised
                and within.search(line)
                and source.relative_to(SOURCES.parent).as_posix() not in NOT_TO_SCRIPTS
            ):
                found += 1
                assert "timed out" in line, f"{source}: {line}"
    assert found > 4


def test_the_text_of_a_call_of_the_core() -> None:
    server = LighthouseServer(bind="[::]:0", min_replicas=2)
    try:
        client = LighthouseClient(server.address(), timedelta(seconds=10))
        error = ""
        for seconds in (0.2, 2, 20):  # longer if the lighthouse, which answers 50 ms earlier, was late
            with pytest.raises(TimeoutError) as raised:
                client.quorum("a", timedelta(seconds=seconds))
            error = str(raised.value)
            if "min_replicas is 2" in error:
                break
        assert re.search(r"quorum call to lighthouse at .* timed out: .*min_replicas is 2", error), error
    finally:
        server.shutdown()


def test_the_text_of_a_future() -> None:
    future: torch.futures.Future[None] = torch.futures.Future()
    with pytest.raises(TimeoutError, match="timed out"):
        future_wait(future, SHORT)
    with pytest.raises(TimeoutError, match="timed out"):
        future_timeout(future, SHORT).wait()


def test_the_text_of_a_pipe_and_of_a_lock() -> None:
    ours, theirs = Pipe()
    with ours, theirs, pytest.raises(TimeoutError, match=r"timed out after 0\.05 seconds"):
        _MonitoredPipe(ours).recv(SHORT)
    lock = RWLock(timeout=0.01)
    with lock.w_lock(), pytest.raises(TimeoutError, match="timed out"):
        lock.r_acquire()


def test_a_heal_that_times_out_is_not_retried() -> None:
    """A source accepts the connection and never answers: it is asked once, and the error is a TimeoutError
    and a RuntimeError.
    """
    asked = []
    target: HTTPTransport[object] = HTTPTransport(timedelta(seconds=10), num_chunks=0)
    try:
        with socket.create_server(("localhost", 0)) as silent:
            address = f"http://localhost:{silent.getsockname()[1]}/checkpoint/"
            with pytest.raises(TimeoutError, match=r"step 1 .*timed out after 0\.2 seconds") as caught:
                target.recv_checkpoint(0, address, 1, timedelta(seconds=0.2))
            silent.settimeout(0)
            while True:
                try:
                    asked.append(silent.accept()[0])
                except BlockingIOError:
                    break
    finally:
        target.shutdown()
        for connection in asked:
            connection.close()
    assert isinstance(caught.value, RuntimeError) and isinstance(caught.value, CheckpointTimeout)
    assert not isinstance(caught.value, CheckpointError), "a transfer is tried again after those"
    assert len(asked) == 1
