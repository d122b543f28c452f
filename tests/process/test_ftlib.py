"""FTLib in four processes that train on digits, with each consensus: members are killed in turn, and at each
line of a rebuild.

The weights equal those of one process that repeats the recorded steps.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from causes import SILENCE_MS
from ftlib_worker import LR, digits, make_model, part
from processes import START_TIMEOUT_S, Child, Job, ours_path
from torch.nn.functional import cross_entropy

from torchft.ftlib import FTLib

HERE = Path(__file__).resolve().parent
CONSENSUS = ["lighthouse", "shared_storage", "gossip"]
AHEAD = 60  # steps
SOON_S = 120


class Members:
    """Four members of a job, by name."""

    def __init__(self, job: Job, consensus: str, settings: dict[str, Any], folder: Path, *more: str) -> None:
        self.job = job
        self.stop = folder / "stop"
        self._consensus, self._settings = consensus, settings
        self._args = ["--stop", str(self.stop), *more]
        self.now: dict[str, Child] = {}
        self.lives: list[Child] = []

    def start(self, name: str, *more: object) -> Child:
        settings = dict(self._settings)
        if self._consensus == "gossip":  # the running members are the seeds
            settings["seeds"] = [
                child.of("address")[0]["address"] for child in self.now.values() if child.of("address")
            ]
        args = [
            self._consensus,
            json.dumps(settings),
            *self._args,
            "--name",
            name,
            "--seed",
            len(self.lives),
            *more,
        ]
        child = self.job.python(
            name, HERE / "ftlib_worker.py", *args, path=ours_path(), env={"TORCHFT_HOST": "localhost"}
        )
        self.now[name] = child
        self.lives.append(child)
        return child

    def train_together(self, size: int) -> None:
        """Waits until all members have done another step in one view of this size."""
        before = {name: len(child.of("step")) for name, child in self.now.items()}

        def together() -> bool:
            last = []
            for name, child in self.now.items():
                steps = child.of("step")[before[name] :]
                last.append((steps[-1]["view"], steps[-1]["size"]) if steps else None)
            return None not in last and len(set(last)) == 1 and last[0][1] == size  # type: ignore[index]

        self.job.wait(together, START_TIMEOUT_S, f"{size} members train together")

    def end(self) -> None:
        last = max(child.of("step")[-1]["step"] for child in self.now.values())
        self.stop.with_suffix(".draft").write_text(str(last + AHEAD))
        self.stop.with_suffix(".draft").rename(self.stop)
        self.job.wait_exit(list(self.now.values()), SOON_S)

    def check_weights(self, most: int = 4) -> None:
        """Compares with one process. If a step was made in several views, the last one counts."""
        made: dict[int, tuple[int, int]] = {}
        for child in self.lives:
            for event in child.of("step"):
                made[event["step"]] = max(made.get(event["step"], (0, 0)), (event["view"], event["size"]))
        done = [child.of("done")[0] for child in self.now.values()]
        last = max((event["view"], event["step"]) for event in done)
        expected = one_process([made[step + 1][1] for step in range(last[1])])
        for event in done:
            if (event["view"], event["step"]) == last:
                torch.testing.assert_close(
                    torch.tensor(event["weights"], dtype=torch.float64), expected, rtol=1e-9, atol=1e-9
                )
        assert {size for _, size in made.values()} >= {3, most}


def one_process(sizes: list[int]) -> torch.Tensor:
    """Plain SGD with the first member's seed: the gradient of step n is the mean over the parts of
    ``sizes[n]`` members.
    """
    inputs, labels = digits()
    model = make_model(0)
    for step, size in enumerate(sizes):
        model.zero_grad()
        for rank in range(size):
            mine = part(step, rank, size, len(inputs))
            (cross_entropy(model(inputs[mine]), labels[mine]) / size).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LR * parameter.grad  # type: ignore[operator]
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def lines_of_rebuild() -> int:
    """The lines that run in a rebuild without an error."""
    source = inspect.getsource(FTLib._rebuild)
    return source[: source.index("except")].count("\n") - 2


def settings_of(consensus: str, job: Job, folder: Path) -> dict[str, Any]:
    if consensus == "lighthouse":
        _, address = job.lighthouse(
            ours_path(), min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=SILENCE_MS
        )
        return {"timeout": 60, "lighthouse_addr": address}
    if consensus == "gossip":
        return {"timeout": 60}
    return {"timeout": 60, "directory": str(folder / "shared"), "expiry": 3}


@pytest.mark.slow  # test_a_member_is_killed kills one
@pytest.mark.timeout(600)
@pytest.mark.parametrize("consensus", CONSENSUS)
def test_members_that_are_killed_and_join(consensus: str, tmp_path: Path) -> None:
    with Job() as job:
        settings = settings_of(consensus, job, tmp_path)
        members = Members(job, consensus, settings, tmp_path)
        for name in ("m0", "m1", "m2", "m3"):
            members.start(name)
            if name == "m0":
                members.train_together(1)  # so that all weights derive from the first member's seed
        members.train_together(4)
        for name in ("m0", "m1", "m2", "m3"):  # each in turn
            members.now.pop(name).kill()
            members.train_together(3)
            members.start(name)
            members.train_together(4)
        members.now.pop("m3").kill()
        for line in range(1, lines_of_rebuild() + 1):
            child = members.start("m3", "--fail-at", line)
            child.expected_to_live = False
            job.wait(lambda: child.returncode is not None, START_TIMEOUT_S, "it is killed")  # noqa: B023
            assert len(child.of("fails")) == 1, line
        del members.now["m3"]
        members.train_together(3)
        members.start("m3")
        members.train_together(4)
        members.end()
        members.check_weights()


def asked(consensus: str, settings: dict[str, Any], child: Child, name: str) -> bool:
    """Whether a process has requested to become a member."""
    if consensus == "gossip":  # there is no server that knows; the process reports it
        return bool(child.of("asks"))
    if consensus == "lighthouse":
        with urllib.request.urlopen(f"{settings['lighthouse_addr']}/status", timeout=10) as answer:
            return any(member["replica_id"].startswith(f"{name}:") for member in json.load(answer)["members"])
    return any(Path(settings["directory"]).rglob(f"member.{name}.*"))


@pytest.mark.slow  # tests/unit/ftlib/test_api.py has the same with threads
@pytest.mark.timeout(600)
@pytest.mark.parametrize("consensus", CONSENSUS)
def test_a_member_joins_at_each_line_of_a_rebuild(consensus: str, tmp_path: Path) -> None:
    with Job() as job:
        settings = settings_of(consensus, job, tmp_path)
        # few steps, because check_weights repeats all of them in one process
        members = Members(job, consensus, settings, tmp_path, "--pace", "0.1")
        members.start("m0")
        members.train_together(1)
        for name in ("m1", "m2"):
            members.start(name)
        members.train_together(3)
        for line in range(1, lines_of_rebuild() + 1):
            go = tmp_path / f"go-{line}"
            held = members.start(f"held-{line}", "--hold-at", line, "--hold-until", go)
            job.wait(lambda: held.of("holds"), START_TIMEOUT_S, f"it is at line {line}")  # noqa: B023
            joins = f"joins-{line}"
            child = members.start(joins)
            job.wait(lambda: asked(consensus, settings, child, joins), START_TIMEOUT_S, "another one asks")  # noqa: B023
            go.touch()
            members.train_together(5)
            for name in (f"held-{line}", joins):
                members.now.pop(name).kill()
            members.train_together(3)
        members.end()
        members.check_weights(5)


# Slow with the two others: their rules are tested in tests/unit/ftlib, and an example trains with the shared
# directory.
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "consensus",
    ["lighthouse", *(pytest.param(c, marks=pytest.mark.slow) for c in ("gossip", "shared_storage"))],
)
def test_a_member_is_killed(consensus: str, tmp_path: Path) -> None:
    """Averages overlap with the backward pass."""
    with Job() as job:
        settings = settings_of(consensus, job, tmp_path)
        members = Members(job, consensus, settings, tmp_path, "--overlap")
        members.start("m0")
        members.train_together(1)
        for name in ("m1", "m2", "m3"):
            members.start(name)
        members.train_together(4)
        members.now.pop("m1").kill()
        members.train_together(3)
        members.end()
        members.check_weights()


# With gossip only: tests/unit/ftlib/test_shared_storage.py has members that do not renew their records, and
# tests of the lighthouse have silent groups.
@pytest.mark.slow  # test_a_member_is_killed; go/gossip/node_test.go has members that stop answering
@pytest.mark.timeout(300)
def test_a_member_that_stops_answering_is_noticed_before_the_collective_times_out(tmp_path: Path) -> None:
    """Its connections stay open. It rejoins when it continues."""
    with Job() as job:
        members = Members(
            job, "gossip", settings_of("gossip", job, tmp_path), tmp_path, "--collective-timeout", "250"
        )
        for name in ("m0", "m1", "m2", "m3"):
            members.start(name)
            if name == "m0":
                members.train_together(1)
        members.train_together(4)
        stopped = members.now.pop("m2")
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            members.train_together(3)  # START_TIMEOUT_S is shorter than that timeout
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        members.now["m2"] = stopped
        members.train_together(4)
        members.end()
        members.check_weights()
