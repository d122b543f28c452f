"""torchrun with `--rdzv-backend torchft`: nodes are killed and come while it runs, and the lighthouse is restarted."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import ours_path

from torchft.coordination import LighthouseServer
from torchft.launch import process_tree

WORKER = Path(__file__).resolve().parent / "rendezvous_worker.py"
pytestmark = pytest.mark.timeout(240)


class Nodes:
    """Agents of torchrun, one node each, and the rounds in which their workers were."""

    def __init__(self, folder: Path, endpoint: str, nnodes: str = "1:2", conf: str = "last_call_timeout=1") -> None:
        self.folder = folder
        self.command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", nnodes, "--nproc-per-node", "1"),
            *("--max-restarts", "9", "--monitor-interval", "0.1", "--local-addr", "127.0.0.1"),
            *("--rdzv-backend", "torchft", "--rdzv-endpoint", endpoint, "--rdzv-id", "job/0"),
            *("--rdzv-conf", f"{conf},join_timeout=120", str(WORKER)),
        ]
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *names: str) -> None:
        env = {"EVENTS": str(self.folder), "PYTHONPATH": str(ours_path()), "OMP_NUM_THREADS": "1"}
        for name in names:
            log = self.folder / f"{name}.log"
            self.agents[name] = process_tree.start(self.command, log, {**env, "NODE": name})

    def kill(self, name: str) -> None:
        process_tree.kill_tree(self.agents.pop(name))

    def sizes(self, name: str) -> list[int]:
        """Of the rounds of a node."""
        events = self.folder / "events.jsonl"
        lines = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
        return [line["size"] for line in lines if line["node"] == name]

    def wait(self, true: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 100
        while not true():
            ended = [name for name, agent in self.agents.items() if agent.poll() is not None]
            logs = "".join(f"\n{log}\n{log.read_text()[-4000:]}" for log in self.folder.glob("*.log"))
            assert not ended, f"{ended} ended before: {what}{logs}"
            assert time.monotonic() < deadline, f"100 s passed before: {what}{logs}"
            time.sleep(0.05)

    def meet(self, size: int, *names: str) -> None:
        self.wait(lambda: all(self.sizes(name)[-1:] == [size] for name in names), f"{names} train with {size}")

    def finish(self) -> None:
        (self.folder / "end").touch()
        for name, agent in self.agents.items():
            assert agent.wait(100) == 0, (self.folder / f"{name}.log").read_text()[-4000:]


@pytest.fixture
def lighthouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    token = tmp_path / "token"
    token.write_text("secret\n")
    monkeypatch.setenv("TORCHFT_TOKEN_FILE", str(token))
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    yield f"127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


@pytest.fixture
def nodes(tmp_path: Path, lighthouse: str) -> Iterator[Nodes]:
    made = Nodes(tmp_path, lighthouse)
    yield made
    for name in list(made.agents):
        made.kill(name)


def test_a_node_is_lost_and_another_one_comes(nodes: Nodes) -> None:
    nodes.start("a", "b")
    nodes.meet(2, "a", "b")
    nodes.kill("b")
    nodes.meet(1, "a")
    nodes.start("c")
    nodes.meet(2, "a", "c")
    nodes.finish()
    assert nodes.sizes("a") == [2, 1, 2]
    assert nodes.sizes("c") == [2]
