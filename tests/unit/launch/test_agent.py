"""torchrun for a group on one host, and its exit status; test_torchft_run starts groups with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters

from torchft.launch import agent
from torchft.launch.agent import BACKEND, HostRendezvous
from torchft.launch.process_tree import kill_tree


def parameters(nodes: int) -> RendezvousParameters:
    return RendezvousParameters(BACKEND, "", "none", min_nodes=1, max_nodes=nodes)


def test_a_round_begins_with_an_empty_store_at_a_port_of_its_own() -> None:
    rendezvous = HostRendezvous(parameters(1))
    first, second = rendezvous.next_rendezvous(), rendezvous.next_rendezvous()
    assert (first.rank, first.world_size, rendezvous.num_nodes_waiting()) == (0, 1, 0)
    first.store.set("key", "of the first round")
    assert not second.store.check(["key"])
    ports = [round.bootstrap_store_info.master_port for round in (first, second)]
    assert len({0, *ports}) == 3
    assert [round.store.port for round in (first, second)] == ports  # type: ignore[attr-defined]


def test_several_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--nnodes 1:2 is not allowed .*; allowed: --rdzv-backend c10d or"):
        HostRendezvous(parameters(2))


SCRIPT = """
import os, signal, sys, time
from pathlib import Path

rank, life = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
own = Path(sys.argv[1]) / f"{life}-{rank}"

def drain(*_):
    own.write_text("drained")
    sys.exit()

signal.signal(signal.SIGTERM, drain)
own.write_text("runs")
if rank == "1" and life == "0":
    while not own.with_name("0-0").exists():
        time.sleep(0.01)
    sys.exit(1)
time.sleep(300)
"""


def test_a_failed_rank_ends_the_others_by_sigkill_and_torchrun_drains_on_sigterm(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    options = ["--rdzv_backend", BACKEND, "--rdzv_endpoint", "localhost", "--nproc_per_node", "2"]
    command = ["-m", "torchft.launch.agent", *options, "--max_restarts", "1", str(script), str(tmp_path)]
    agent = subprocess.Popen([sys.executable, *command])
    try:
        wait_for(agent, tmp_path / "1-0", tmp_path / "1-1")
        assert (tmp_path / "0-0").read_text() == "runs"
        agent.send_signal(signal.SIGTERM)
        agent.wait(timeout=120)
        assert [(tmp_path / f"1-{rank}").read_text() for rank in range(2)] == ["drained", "drained"]
    finally:
        kill_tree(agent)


def test_a_rank_that_stops_for_good_is_not_started_again(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    options = ["--rdzv_backend", BACKEND, "--rdzv_endpoint", "localhost", "--nproc_per_node", "1"]
    script = ["--no-python", "sh", "-c", f"echo x >> {starts}; exit 65"]
    command = [sys.executable, "-m", "torchft.launch.agent", *options, "--max_restarts", "3", *script]
    assert subprocess.run(command, timeout=240, capture_output=True).returncode == 65
    assert starts.read_text() == "x\n"


def wait_for(agent: subprocess.Popen[bytes], *files: Path) -> None:
    deadline = time.monotonic() + 240
    while not all(file.exists() and file.read_text() for file in files):
        assert agent.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("codes", "status"), [([3, 1], 3), ([1, 65], 65), ([-15, 65], 65), ([-9], 137), ([66], 66)]
)
def test_it_ends_with_the_status_of_the_rank_that_failed_first(
    codes: Sequence[int], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = {rank: ProcessFailure(rank, 100 + rank, code, "") for rank, code in enumerate(codes)}

    def fail() -> None:
        raise ChildFailedError("train.py", failures)

    monkeypatch.setattr(run, "main", fail)
    with pytest.raises(SystemExit) as ended:
        agent.main()
    assert ended.value.code == status
    assert f"exitcode  : {codes[0]} " in capsys.readouterr().err
