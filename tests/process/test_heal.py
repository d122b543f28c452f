"""Heals between processes: a source that is killed, and a transfer over an isolated process group."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import START_TIMEOUT_S, Job, ours_path

from tests.promises import HEAL_ENDS_S, within
from torchft.checkpointing import HTTPTransport
from torchft.checkpointing.client.progress import TransferProgress
from torchft.checkpointing.native import core
from torchft.checkpointing.pg_transport import PGTransport
from torchft.checkpointing.transport import CheckpointError
from torchft.process_group import ProcessGroupBabyGloo

TIMEOUT = timedelta(seconds=60)


def test_a_source_that_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with Job() as job:
        env = {"TORCHFT_HOST": "localhost"}
        source = job.python("source", Path(__file__).with_name("heal_source.py"), path=ours_path(), env=env)
        job.wait(lambda: source.of("serving"), START_TIMEOUT_S, "the source serves")
        metadata = source.of("serving")[0]["metadata"]
        killed: list[float] = []

        def kill_when_it_runs(self: TransferProgress, received: int, total: int) -> None:
            if received > 0 and not killed:
                killed.append(time.monotonic())
                source.kill()

        monkeypatch.setattr(TransferProgress, "update", kill_when_it_runs)
        target: HTTPTransport[dict[str, torch.Tensor]] = HTTPTransport(TIMEOUT, 0)
        try:
            with pytest.raises(CheckpointError, match=f"step 1 .*{metadata}.*refused"):
                target.recv_checkpoint(0, metadata, 1, TIMEOUT)
            assert time.monotonic() - killed[0] < within(HEAL_ENDS_S)
            assert not core._registered
        finally:
            target.shutdown()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the size of a process is not known here")
def test_a_target_without_memory_for_the_state() -> None:
    """The allocation fails, as on a host without memory overcommit. The target retries later."""
    state = {"w": torch.zeros(512 << 20, dtype=torch.uint8)}
    state["w"][-1] = 7
    source: HTTPTransport[dict[str, torch.Tensor]] = HTTPTransport(TIMEOUT, 0)
    try:
        source.send_checkpoint([1], 1, state, TIMEOUT)
        target = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("heal_target.py")), source.metadata()],
            env={**os.environ, "PYTHONPATH": str(ours_path()), "TORCHFT_HOST": "localhost"},
            stdout=subprocess.PIPE,
            text=True,
            timeout=120,
        )
        assert target.returncode == 0
        failed, received = target.stdout.splitlines()
        assert f"no memory for a tensor of {512 << 20} bytes" in failed and source.metadata() in failed
        assert received == "7"
        began = time.monotonic()
        source.disallow_checkpoint()
        assert time.monotonic() - began < within(HEAL_ENDS_S)  # the source is not delayed
    finally:
        source.shutdown()


@pytest.mark.slow
def test_over_an_isolated_group() -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    groups = [ProcessGroupBabyGloo(timeout=TIMEOUT) for _ in range(2)]
    state = {"w": torch.randn(1_000_000), "half": torch.ones(3, 5, dtype=torch.bfloat16).T, "lr": 0.1}
    try:
        with ThreadPoolExecutor(2) as pool:
            addr = f"localhost:{store.port}/heal"
            list(pool.map(lambda rank: groups[rank].configure(addr, f"group{rank}", rank, 2), range(2)))
            source, target = (PGTransport(group, TIMEOUT, torch.device("cpu")) for group in groups)
            sent = pool.submit(source.send_checkpoint, [1], 3, state)
            got = target.recv_checkpoint(0, "", 3)
            sent.result(60)
    finally:
        for group in groups:
            group.shutdown()
    assert got["lr"] == 0.1 and torch.equal(got["w"], state["w"]) and torch.equal(got["half"], state["half"])
