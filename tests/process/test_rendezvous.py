"""torchrun with `--rdzv-backend torchft`: nodes are killed and join during the job, and the lighthouse is
restarted.

tests/unit/dlrover/test_rendezvous.py tests nodes in one process, and go/rendezvous tests the decisions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import Job, ours_path
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from torchft.coordination import LighthouseServer
from torchft.dlrover import LighthouseRendezvousHandler
from torchft.launch import process_tree

HERE = Path(__file__).resolve().parent
WORKER = HERE / "rendezvous_worker.py"
pytestmark = pytest.mark.timeout(240)


class Nodes:
    """torchrun agents, one for each node, and the rounds of their workers."""

    def __init__(
        self, folder: Path, endpoint: str, nnodes: str = "1:2", conf: str = "last_call_timeout=1"
    ) -> None:
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
        """The sizes of a node's rounds."""
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
        self.wait(
            lambda: all(self.sizes(name)[-1:] == [size] for name in names), f"{names} train with {size}"
        )

    def finish(self) -> None:
        (self.folder / "end").touch()
        for name, agent in self.agents.items():
            assert agent.wait(100) == 0, (self.folder / f"{name}.log").read_text()[-4000:]


class Lighthouse:
    """A lighthouse that can be restarted; it has no state on disk."""

    def __init__(self) -> None:
        self._server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
        self.endpoint = f"127.0.0.1:{self._server.address().rpartition(':')[2]}"

    def restart(self) -> None:
        self.shutdown()
        self._server = LighthouseServer(bind=self.endpoint, min_replicas=1)

    def shutdown(self) -> None:
        self._server.shutdown()


@pytest.fixture
def lighthouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lighthouse]:
    token = tmp_path / "token"
    token.write_text("secret\n")
    monkeypatch.setenv("TORCHFT_TOKEN_FILE", str(token))
    made = Lighthouse()
    yield made
    made.shutdown()


@pytest.fixture
def nodes(tmp_path: Path, lighthouse: Lighthouse) -> Iterator[Nodes]:
    made = Nodes(tmp_path, lighthouse.endpoint)
    yield made
    for name in list(made.agents):
        made.kill(name)


@pytest.mark.slow
def test_torchrun_trains_with_a_round_of_the_backend(nodes: Nodes) -> None:
    nodes.start("a")
    nodes.meet(1, "a")
    nodes.finish()


# Slow, because it starts PyTorch in eight processes. In `make test`,
# test_torchrun_trains_with_a_round_of_the_backend runs torchrun, test_an_agent_is_killed_at_a_moment kills a
# node, and tests/unit/dlrover/test_rendezvous.py restarts rounds for failed workers and further nodes, and
# continues one without its lighthouse.
@pytest.mark.slow
def test_a_node_fails_and_another_one_joins(nodes: Nodes, lighthouse: Lighthouse) -> None:
    nodes.start("a", "b")
    nodes.meet(2, "a", "b")
    lighthouse.restart()  # this causes no delay
    nodes.kill("b")
    nodes.meet(1, "a")
    nodes.start("c")
    nodes.meet(2, "a", "c")
    nodes.finish()
    assert nodes.sizes("a") == [2, 1, 2]
    assert nodes.sizes("c") == [2]


# Each moment costs a start of PyTorch; go/rendezvous tests other moments in failure.txt and
# lost_connection.txt.
@pytest.mark.parametrize(
    "moment", [*(pytest.param(m, marks=pytest.mark.slow) for m in ("started", "asked", "met")), "released"]
)
def test_an_agent_is_killed_at_a_moment(
    lighthouse: Lighthouse, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The killed node is the first of three, which gets rank 0. The others train without it."""
    monkeypatch.setattr("torchft.dlrover.rendezvous._MEET_SEC", 2.0)
    with Job() as job:
        token = {"TORCHFT_TOKEN_FILE": os.environ["TORCHFT_TOKEN_FILE"]}
        first = job.python(
            "first", HERE / "rendezvous_node.py", lighthouse.endpoint, 3, moment, path=ours_path(), env=token
        )
        first.expected_to_live = False
        asked = "started" if moment == "started" else "asked"
        job.wait(lambda: any(event["event"] == asked for event in first.events), 120, asked)
        where = RendezvousParameters(
            "torchft",
            lighthouse.endpoint,
            "job/0",
            1,
            3,
            local_addr="127.0.0.1",
            last_call_timeout=2,
            join_timeout=100,
        )
        others = [LighthouseRendezvousHandler.from_parameters(where) for _ in range(2)]
        with ThreadPoolExecutor(2) as threads:

            def meet() -> list[tuple[int, int]]:
                infos = [threads.submit(other.next_rendezvous) for other in others]
                return sorted((info.result(100).rank, info.result().world_size) for info in infos)

            met = meet()
            if moment == "met" and met != [
                (0, 2),
                (1, 2),
            ]:  # some nodes had met before the kill
                job.wait(lambda: first.returncode is not None, 60, "the first node ends")
                met = meet()  # because their workers fail
        assert met == [(0, 2), (1, 2)]
        for other in others:
            other.shutdown()
