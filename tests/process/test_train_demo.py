"""A small version of `make train`: checks its output, and that no process is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from causes import check_killed_by_log

from tests.promises import KILL_S, within
from torchft.launch import process_tree
from torchft.launch.lighthouse import LaunchError

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "python" / "examples"
sys.path.insert(0, str(EXAMPLES))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Provides a torchft_lighthouse command, also if the package is on PYTHONPATH and not installed."""
    environment = dict(os.environ)
    if not shutil.which("torchft_lighthouse", path=str(Path(sys.executable).parent)):
        folder = tmp_path_factory.mktemp("bin")
        command = folder / "torchft_lighthouse"
        command.write_text(
            f"#!{sys.executable}\nfrom torchft._torchft import lighthouse_main\nlighthouse_main()\n"
        )
        command.chmod(0o755)
        environment["PATH"] = f"{folder}:{environment['PATH']}"
    return environment


def read_events(folder: Path, group: int) -> list[dict[str, Any]]:
    lines = (folder / "events" / f"group-{group}-rank-0.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


# Forty seconds of processor time: PyTorch starts seven times. test_torchft_run.py kills and restarts groups
# of torchrun, test_train_readme.py trains with them to the end, and test_hsdp.py heals one; test_chaos.py
# compares the weights of each step. The tests below have what the demo counts and prints.
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_group_is_killed_heals_and_ends_with_the_same_weights(
    environment: dict[str, str], tmp_path: Path
) -> None:
    command = [
        sys.executable,
        str(EXAMPLES / "demo.py"),
        "--steps",
        "100",
        "--kill-at",
        "30",
        "--logs",
        str(tmp_path),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""

    lines = done.stdout.splitlines()
    assert len(lines) < 60  # shows progress, but not too many lines
    for state in ("training", "killed", "starting again", "healed", "done"):
        assert any(line.startswith("group 1 [") and state in line for line in lines), done.stdout

    rows = {line[:34].strip(): line[34:].split() for line in lines}
    survivor, victim = (read_events(tmp_path, group) for group in (0, 1))
    commits = [event["step"] for event in survivor if event["event"] == "commit"]
    assert commits == list(range(commits[0], commits[0] + len(commits)))  # no step twice, and none skipped
    assert commits[-1] >= 100
    assert rows["steps committed"] == [
        str(sum(e["event"] == "commit" for e in es)) for es in (survivor, victim)
    ]
    assert rows["steps lost"] == [str(sum(e["event"] == "lost" for e in es)) for es in (survivor, victim)]
    assert int(rows["steps lost"][0]) <= 2
    again = [event["event"] for event in victim].index("start", 1)
    assert victim[again - 1]["step"] >= 30  # where it was killed
    back = next(event for event in victim[again:] if event["event"] == "commit")
    assert back["healing"] and back["step"] > 30
    check_killed_by_log((tmp_path / "lighthouse.log").read_text(), "train_ddp_1")
    next_commit, unit, killed = rows["from the kill to the next commit"]
    assert 0 < float(next_commit) < within(KILL_S) and unit == "s" and killed == "killed"
    heal, unit = rows["from its restart to healed"]
    assert 0 < float(heal) < 120 and unit == "s"
    phases = ["waiting for a quorum", "connecting to its peers", "fetching the weights", "loading them"]
    spent = [float(rows[phase][0]) for phase in phases]
    assert sum(spent) < float(heal)
    assert spent == [round(seconds, 2) for seconds in back["recovery"].values()] and sum(spent) > 0
    longest, median = (float(rows[name][0]) for name in ("longest step while it joins", "median step"))
    assert 0 < median < 10 and 0 < longest < float(heal) + 10
    assert all(90 < float(cell.rstrip("%")) <= 100 for cell in rows["accuracy on held-out images"])
    images, epochs = 1437, -(-100 // 23)  # the last of 23 steps
    assert rows["samples trained"] == [str(images * epochs)]
    assert rows["samples trained twice"] == rows["samples missed"] == ["0"]
    (difference,) = rows["weights, relative to one process"]
    assert float(difference) < 1e-9
    digests = re.findall(r"group \d rank 0  ([0-9a-f]{64})$", done.stdout, re.MULTILINE)
    assert len(digests) == 2 and len(set(digests)) == 1
    assert lines[-1] == "equal"
    assert rows_of(done.stdout.partition("group 0     group 1\n")[2]) == rows_of(table_of_the_page())
    assert re.fullmatch(r"\d\.\de-1\d", rows["weights, relative to one process"][0])


@pytest.mark.slow  # test_standby.py and test_torchft_run.py have standbys, too
@pytest.mark.timeout(420)
def test_a_standby_takes_the_place_of_the_killed_group(environment: dict[str, str], tmp_path: Path) -> None:
    steps = ["--steps", "300", "--kill-at", "30", "--logs", str(tmp_path)]
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--standby", *steps]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line[:38].strip(): line[38:].split() for line in done.stdout.splitlines()}
    heal, unit = rows["the standby, from the kill to healed"]
    assert 0 < float(heal) < 120 and unit == "s"
    assert done.stdout.splitlines()[-1] == "equal"
    first, *_ = (e for e in read_events(tmp_path, 2) if e["event"] == "commit")
    assert first["healing"] and first["step"] > 30


def test_steps_that_lie_partly_between_two_times(tmp_path: Path) -> None:
    import replica_group

    group = replica_group.Group(0, 2, tmp_path)
    group.events = [{"event": "commit", "time": time} for time in (1.0, 2.0, 4.0, 7.0, 8.0)]
    assert group.steps_between(2.5, 4.5) == [2.0, 3.0]
    assert group.steps_between(2.0, 4.0) == [2.0]
    assert group.steps_between(9.0, 10.0) == []


def test_only_a_group_that_returns_is_shown_as_healed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import replica_group

    monkeypatch.setattr(replica_group.ReplicaGroup, "start", lambda *_: None)
    group = replica_group.Group(0, 2, tmp_path)

    def starts_and_heals() -> str:
        group.start("", [])
        for healing in (True, False):
            group._take(
                {"event": "commit", "step": 5, "time": time.time(), "healing": healing, "participants": 2}
            )
        return group.state

    assert starts_and_heals() == "training", (
        "at the start of the job it took over the weights of the first group"
    )
    assert starts_and_heals() == "training, healed"


def table_of_the_page() -> str:
    """The table of `make train` in docs/run.md, below the names of the groups."""
    return (ROOT / "docs" / "run.md").read_text().partition("group 0     group 1\n")[2].partition("```")[0]


def rows_of(table: str) -> list[str]:
    """The label of each line of a table."""
    return [line[: 14 if line.startswith("group") else 34].strip() for line in table.splitlines()]


@pytest.mark.slow  # test_reproducible.py has it with threads
@pytest.mark.timeout(240)
def test_a_reproducible_run_ends_equal_bit_for_bit(environment: dict[str, str], tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(EXAMPLES / "demo.py"),
        "--steps",
        "150",
        "--kill-at",
        "40",
        "--reproducible",
    ]
    done = subprocess.run(
        [*command, "--logs", str(tmp_path)], env=environment, capture_output=True, text=True, timeout=220
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line[:34].strip(): line[34:].strip() for line in done.stdout.splitlines()}
    assert rows["samples trained twice"] == rows["samples missed"] == "0"
    assert rows["weights, relative to one process"] == "equal bit for bit"
    assert done.stdout.splitlines()[-1] == "equal"


def trained(step: int, quorum: int, *indices: int, epoch: int = 0) -> dict[str, Any]:
    return {"event": "trained", "step": step, "quorum": quorum, "epoch": epoch, "indices": list(indices)}


def committed(step: int, quorum: int) -> dict[str, Any]:
    return {"event": "commit", "step": step + 1, "quorum": quorum}


@pytest.mark.parametrize(
    ("survivor", "other", "counted", "why"),
    [
        (
            [trained(0, 1, 0, 1), committed(0, 1)],
            [trained(0, 1, 2, 3), committed(0, 1)],
            (4, 0, 0),
            "all is well",
        ),
        (
            [trained(0, 1, 0, 1), committed(0, 1)],
            [trained(0, 1, 2, 3)],
            (4, 0, 0),
            "it is killed after its vote",
        ),
        (
            [trained(0, 1, 0, 1), trained(0, 2, 0, 1, 2, 3), committed(0, 2)],
            [trained(0, 1, 2, 3)],
            (4, 0, 0),
            "it is killed in the step, which is repeated",
        ),
        (
            [trained(0, 1, 0, 1), trained(0, 2, 0, 1, 2, 3), committed(0, 2)],
            [trained(0, 1, 2, 3), committed(0, 1)],
            (4, 0, 0),
            "it committed alone, and is killed with that",
        ),
        (
            [],
            [trained(0, 1, 0, 1, 2, 3), committed(0, 1)],
            (4, 0, 0),
            "the survivor joined later, and healed",
        ),
        (
            [trained(0, 1, 0, 1), committed(0, 1)],
            [trained(0, 1, 1, 2), committed(0, 1)],
            (4, 1, 1),
            "a wrong cut",
        ),
        (
            [trained(0, 1, 0, 1, 2, 3), committed(0, 1), trained(1, 1, 0, 1, 2, epoch=1), committed(1, 1)],
            [],
            (7, 0, -3),
            "an epoch more than there should be shows",
        ),
    ],
)
def test_which_samples_count(
    survivor: list[dict[str, Any]], other: list[dict[str, Any]], counted: tuple[int, int, int], why: str
) -> None:
    from accounting import samples

    assert samples(survivor, [*survivor, *other], length=4, epochs=1) == counted, why


@pytest.mark.parametrize(
    ("counted", "equal", "reproducible", "message"),
    [
        ((8, 0, 0), False, False, None),
        ((8, 0, 0), True, True, None),
        ((8, 1, 1), False, False, "trained twice"),
        ((8, 0, 0), False, True, "bit for bit"),
    ],
)
def test_required_output_of_a_run(
    counted: tuple[int, int, int], equal: bool, reproducible: bool, message: str | None
) -> None:
    import demo

    proof = demo.Proof(demo.Samples(*counted), 1e-12, equal, reproducible)
    problem = proof.problem()
    assert problem is None if message is None else message in str(problem)
    assert dict(proof.rows())["weights, relative to one process"] == (
        "equal bit for bit" if reproducible and equal else "1.0e-12"
    )


@pytest.mark.slow  # test_torchft_run.py ends the command with Ctrl-C
@pytest.mark.timeout(240)
def test_ctrl_c_ends_the_demo_and_every_process_it_started(
    environment: dict[str, str], tmp_path: Path
) -> None:
    log = tmp_path / "output"
    demo = process_tree.start(
        [sys.executable, str(EXAMPLES / "demo.py"), "--logs", str(tmp_path / "logs")], log, environment
    )
    try:
        deadline = time.monotonic() + 120
        # With the lighthouse, two agents, two workers, two loader processes at least.
        while "training" not in log.read_text() or len(process_tree.tree(demo.pid)) < 8:
            assert demo.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        pids = process_tree.tree(demo.pid)
        demo.send_signal(signal.SIGINT)
        assert demo.wait(timeout=60) == 130, log.read_text()
        assert log.read_text().splitlines()[-1] == f"interrupted; the logs are in {tmp_path / 'logs'}"
        deadline = time.monotonic() + 60
        while left := process_tree.alive(pids):
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
    finally:
        process_tree.kill_tree(demo)


@pytest.mark.parametrize(
    ("ends", "healed", "why"),
    [
        ([("end", 9, "a"), ("end", 9, "a")], 1.0, None),
        ([("end", 9, "a"), ("end", 9, "b")], 1.0, "the weights differ"),
        ([("end", 9, "a"), ("end", 8, "a")], 1.0, "the weights differ"),
        ([("end", 9, "a"), ("commit", 9, None)], 1.0, "a rank did not reach the end"),
        ([("end", 9, "a"), ("end", 9, "a")], None, "the killed group did not heal"),
    ],
)
def test_failures_of_a_run(ends: list[tuple[str, int, str]], healed: float | None, why: str | None) -> None:
    import demo

    groups = [
        SimpleNamespace(
            log=Path("log"),
            ends=lambda end=end: [dict(zip(("event", "step", "sha256"), end))],
            time_to_heal=lambda: healed,
        )
        for end in ends
    ]
    with pytest.raises(LaunchError, match=why) if why else contextlib.nullcontext():
        demo.check(groups)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("steps", "kills", "now", "why"),
    [
        ([19, 20], 0, False, "one has not joined yet"),
        ([20, 21], 0, True, "all are"),
        ([20, 89], 1, True, "all have, and there is time to return"),
        ([90, 90], 1, False, "the groups might end before it returns"),
        ([600, 600], 1, False, "they wait for it in order to end"),
    ],
)
def test_a_group_is_not_killed_again_when_the_others_end(
    steps: list[int], kills: int, now: bool, why: str
) -> None:
    import demo

    assert demo.time_to_kill(steps, kill_at=20, end=100, kills=kills) is now, why


def test_a_state_just_before_the_kill_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import demo

    class Quick(demo.Group):
        """Between two polls it trains past the step of the kill, and after the next one to the end."""

        def start(self, *_: object) -> None:
            self.state = "starting again" if self.events else "starting"
            # the survivor waits until the other group has returned
            self._left = [10, 90] if self.number else [10, 10, 10, 10, 60]
            self._pause = True

        def follow(self) -> None:
            if self._pause or not self._left:
                self._pause = False
                return
            healing = bool(self.events) and self._left == [10, 90]
            step = self.step() + self._left.pop(0)
            self._take(
                {"event": "commit", "step": step, "time": time.time(), "healing": healing, "participants": 2}
            )
            if not self._left:
                self._take({"event": "end", "step": step})

        def kill(self) -> list[int]:
            self.state = "killed"
            return []

        @property
        def started(self) -> float:
            return 0.0

        @property
        def status(self) -> int | None:
            return 0 if self.state == "done" else None

    monkeypatch.setattr(sys, "argv", ["demo.py", "--steps", "100", "--kill-at", "5"])
    demo.train(demo.parse_args(), [Quick(number, 2, tmp_path) for number in range(2)], "")
    shown = [
        line.rsplit("  ", 1)[1] for line in capsys.readouterr().out.splitlines() if line.startswith("group 1")
    ]
    assert shown[:4] == ["starting", "training", "killed", "starting again"] and shown[-1] == "done"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--groups", "1"], "--groups must be at least 2, got 1"),
        (["--nproc", "0"], "--nproc must be at least 1, got 0"),
        (["--steps", "10", "--kill-at", "10"], "--kill-at must lie between 0 and --steps (10), got 10"),
    ],
)
def test_bad_options_are_named(options: list[str], message: str) -> None:
    command = [sys.executable, str(EXAMPLES / "demo.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert message in done.stderr
