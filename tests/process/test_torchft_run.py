"""`torchft run` on the command line: it restarts killed groups, adds and drains groups; Ctrl-C leaves no
process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import dropwhile
from pathlib import Path
from typing import Any

import pytest
from hosts import nameless
from processes import ours_path, processes_of

from tests.unit.waiting import wait_until
from torchft.launch import process_tree

MEMBER = Path(__file__).resolve().parent / "member.py"
FINISHED = Path(__file__).resolve().parent / "finished_script.py"
FOREVER = "1000000000"


class Command:
    """A running `torchft run`, and its output."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        output: str = "output",
        log_dir: str | None = "logs",
        prefix: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.log = folder / output
        self.env = {"PYTHONPATH": ours_path(), "XDG_RUNTIME_DIR": str(folder)}
        options = [*(["--log-dir", str(folder / log_dir)] if log_dir else []), *arguments]
        # Which is ignored here if the tests run under nohup.
        hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
        try:
            command = [*prefix, sys.executable, "-m", "torchft.cli", "run", *options]
            self.process = process_tree.start(command, self.log, self.env, cwd=folder)
        finally:
            signal.signal(signal.SIGHUP, hangup)

    def wait(self, until: Callable[[], object], what: str, seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds
        while not until():
            assert self.process.poll() is None, f"ended before: {what}\n{self.report()}"
            assert time.monotonic() < deadline, f"{seconds:g} s passed before: {what}\n{self.report()}"
            time.sleep(0.05)

    def shows(self, pattern: str) -> bool:
        return re.search(pattern, self.log.read_text(), re.M) is not None

    def commands(self) -> dict[int, str]:
        """The command line of each of its processes, by pid."""
        return {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in process_tree.tree(self.process.pid)}

    def report(self) -> str:
        logs = sorted(self.folder.glob("logs/*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in [self.log, *logs])


@contextmanager
def training(folder: Path) -> Iterator[Command]:
    """A job of one group that trains."""
    run = Command(folder, "--replicas", "1", str(MEMBER), FOREVER)
    try:
        run.wait(lambda: run.shows(r"^group 0 .* training"), "it trains")
        yield run
    finally:
        process_tree.kill_tree(run.process)


@pytest.mark.timeout(240)
def test_run_kills_and_restarts_groups(tmp_path: Path) -> None:
    run = Command(tmp_path, "--replicas", "2", "--kill-every", "2s", "--seed", "1", str(MEMBER), FOREVER)
    try:
        run.wait(lambda: run.shows(r"^group \d .* killed"), "one is killed")
        run.wait(lambda: run.shows(r"^group \d .* training.*\(started again"), "it trains again")
        end(run, 4)
    finally:
        process_tree.kill_tree(run.process)


@pytest.mark.slow  # tests/integration/test_standby.py has it with threads
@pytest.mark.timeout(240)
def test_a_standby_takes_the_place_of_a_killed_group_which_is_the_standby_then(tmp_path: Path) -> None:
    options = ["--replicas", "2", "--standby", "1", "--kill-every", "5s", "--seed", "1"]
    run = Command(tmp_path, *options, str(MEMBER), FOREVER)
    try:
        run.wait(lambda: run.shows(r"^group \d .* standby$"), "one stands by")
        run.wait(lambda: run.shows(r"^group \d .* killed"), "one is killed")
        run.wait(lambda: run.shows(r"^group \d .* standby .*\(started again"), "it stands by")
        end(run, 6)
    finally:
        process_tree.kill_tree(run.process)


def end(run: Command, at_least: int, number: int = signal.SIGINT) -> None:
    """Checks that at least this number of processes run, sends Ctrl-C, and checks that none of them is
    left.
    """
    assert len(process_tree.tree(run.process.pid)) >= at_least
    run.process.send_signal(number)
    assert run.process.wait(60) == 128 + number, run.report()
    assert_logs_are_named(run)
    # The keeper outlives the job for a minute, and ends with its folder.
    shutil.rmtree(os.environ["TORCHFT_SNAPSHOT_MEMORY"])
    deadline = time.monotonic() + 60
    while left := processes_of(run.folder):
        assert time.monotonic() < deadline, f"{left} are left"
        time.sleep(0.05)
    assert os.listdir(run.folder / "torchft") == [], "its socket is removed"


def assert_logs_are_named(run: Command) -> None:
    """The path of the logs is printed again at the end, when the first line has scrolled away."""
    assert run.log.read_text().splitlines()[-1] == f"logs: {run.folder / 'logs'}"


@pytest.mark.slow  # test_run_kills_and_restarts_groups ends with Ctrl-C
@pytest.mark.timeout(240)
def test_a_closed_terminal_leaves_no_process(tmp_path: Path) -> None:
    with training(tmp_path) as run:
        end(run, 3, signal.SIGHUP)


def agent_of(run: Command) -> int:
    (agent,) = (pid for pid, command in run.commands().items() if "-m\0torchft.launch.agent\0" in command)
    return agent


@pytest.mark.timeout(240)
def test_no_rank_outlives_its_agent_and_the_lighthouse_comes_back(tmp_path: Path) -> None:
    """A rank would train on beside the group that is started in its place, or in the next job on the port."""
    with training(tmp_path) as run:
        commands = run.commands()
        (rank,) = (pid for pid, command in commands.items() if f"-u\0{MEMBER}\0" in command)
        (stands_for,) = (
            pid for pid, command in commands.items() if "exec.py\0" in command and "-m\0" not in command
        )
        os.kill(agent_of(run), signal.SIGKILL)
        wait_until(lambda: not process_tree.alive([rank, stands_for]))

        run.wait(lambda: run.shows(r"^group 0 .*\(started again"), "its group is started again")
        commands = run.commands()
        (lighthouse,) = (pid for pid, command in commands.items() if "lighthouse_main" in command)
        os.kill(lighthouse, signal.SIGKILL)
        log = tmp_path / "logs" / "lighthouse.log"
        run.wait(lambda: log.read_text().count("Lighthouse listening on") == 2, "the lighthouse is back")
        os.kill(agent_of(run), signal.SIGKILL)
        run.wait(lambda: run.shows(r"^group 0 .*\(started again 2 times"), "a group joins it")
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(60) == 130, run.report()
        wait_until(lambda: not process_tree.alive(list(commands)))


@pytest.mark.timeout(240)
def test_no_step_is_lost_when_the_leading_lighthouse_is_killed(tmp_path: Path) -> None:
    run = Command(tmp_path, "--lighthouses", "3", "--replicas", "2", str(MEMBER), FOREVER)

    def steps() -> list[list[dict[str, Any]]]:
        """The steps of each group, from the first one with both."""
        logs = [run.folder / "logs" / f"group-{number}.log" for number in range(2)]
        lines = [log.read_text().rpartition("\n")[0].splitlines() for log in logs]
        found = [[json.loads(line) for line in each if line.startswith("{")] for each in lines]
        return [list(dropwhile(lambda step: step["members"] < 2, group)) for group in found]

    def more() -> Callable[[], bool]:
        counts = [len(group) + 20 for group in steps()]
        return lambda: all(len(group) >= count for group, count in zip(steps(), counts))

    def cluster() -> dict[str, Any]:
        command = [sys.executable, "-m", "torchft.cli", "cluster", "--json", "--lighthouse", addresses]
        return json.loads(
            subprocess.run(
                command, env={**os.environ, **run.env}, check=True, capture_output=True, timeout=60
            ).stdout
        )

    try:
        run.wait(
            lambda: run.shows(r"^group 0 .* training") and run.shows(r"^group 1 .* training"), "both train"
        )
        (addresses,) = re.findall(r"^lighthouses: (\S+)$", run.log.read_text(), re.M)
        run.wait(more(), "both train together")
        before = cluster()
        leader = before["leader"]
        bind = f"--bind\0{leader.removeprefix('http://')}\0"
        (pid,) = (pid for pid, command in run.commands().items() if bind in command)
        os.kill(pid, signal.SIGKILL)
        run.wait(more(), "they go on")
        # on a busy host the killed one may be back before the others have missed it, and lead again
        run.wait(
            lambda: (now := cluster())["leader"] and now["term"] > before["term"], "one leads in a later term"
        )
        run.wait(lambda: all(one["reached"] for one in cluster()["members"]), "the killed one is restarted")
        run.wait(more(), "they go on with three")
        for group in steps():
            assert all(step["committed"] and step["members"] == 2 for step in group)
            first = group[0]["step"]
            assert [step["step"] for step in group] == list(range(first, first + len(group)))
        end(run, 8)  # the command itself, three lighthouses, two agents and their workers
        assert list((tmp_path / "logs").glob("lighthouses-*")) == [], "no later job continues their state"
    finally:
        process_tree.kill_tree(run.process)


@pytest.mark.slow  # the test above starts and restarts groups; tests/unit/launch has the counts
@pytest.mark.timeout(240)
def test_it_grows_shrinks_and_ends(tmp_path: Path) -> None:
    """Without kills, because a kill could replace a drain."""
    run = Command(tmp_path, "--replicas", "2:3", str(MEMBER), FOREVER)
    try:
        run.wait(
            lambda: run.shows(r"^group 0 .* training") and run.shows(r"^group 1 .* training"), "both train"
        )
        scale = [sys.executable, "-m", "torchft.cli", "scale"]
        output = tmp_path / "scale"
        assert process_tree.start([*scale, "3"], output, run.env).wait(60) == 0, output.read_text()
        run.wait(lambda: run.shows(r"^group 2 .* training"), "a third one trains")
        assert process_tree.start([*scale, "2"], output, run.env).wait(60) == 0, output.read_text()
        run.wait(lambda: run.shows(r"^group 2 .* left"), "the third one has left")
        assert "left as asked (drain)" in (tmp_path / "logs" / "lighthouse.log").read_text()
        assert process_tree.start([*scale, "4"], output, run.env).wait(60) == 1
        assert "4 replica groups are not allowed; allowed: 1 (--min-replicas) to 3 " in output.read_text()

        end(run, 6)  # the command itself, the lighthouse, two agents and their workers
    finally:
        process_tree.kill_tree(run.process)


@pytest.mark.slow  # tests/unit/launch/test_automatic.py has it with a clock of its own
@pytest.mark.timeout(600)
def test_it_finds_the_number_of_groups(tmp_path: Path) -> None:
    """A further group of a script that computes nothing brings nothing."""
    run = Command(tmp_path, "--replicas", "1:3", "--scale", "auto", str(MEMBER), FOREVER)
    try:
        run.wait(lambda: run.shows(r"^1 -> 2 groups: .* with 1$"), "it tries two", 200)
        run.wait(lambda: run.shows(r"^group 1 .* training"), "the second one trains")
        run.wait(lambda: run.shows(r"^2 -> 1 group: .* of its share, less than 60%$"), "it goes back", 400)
        run.wait(lambda: run.shows(r"^group 1 .* left"), "the second one has left")
        output, torchft = tmp_path / "output-of-commands", [sys.executable, "-m", "torchft.cli"]
        (address,) = re.findall(r"^lighthouse: (\S+)", run.log.read_text(), re.M)
        asked = [*torchft, "events", "--lighthouse", address]
        assert process_tree.start(asked, output, run.env).wait(60) == 0
        assert re.findall(r"  scaled +(\d -> \d)", output.read_text()) == ["1 -> 2", "2 -> 1"]
        assert process_tree.start([*torchft, "scale", "3"], output, run.env).wait(60) == 0
        run.wait(lambda: run.shows(r"^3 groups, set by hand: this number stays$"), "the number stays")
        end(run, 6)
    finally:
        process_tree.kill_tree(run.process)


@pytest.mark.slow  # in the test above, a group without PyTorch joins in the same way
@pytest.mark.timeout(360)
def test_more_groups_of_the_training_script_join(tmp_path: Path) -> None:
    """Each group trains on its own shard of the data, so it must know the largest number of groups."""
    run = Command(tmp_path, "--replicas", "1:2", str(ours_path() / "train_ddp.py"), "--steps", "1000000")
    try:
        run.wait(lambda: run.shows(r"^group 0 .* training"), "the first one trains", 120)
        output = tmp_path / "scale"
        scale = [sys.executable, "-m", "torchft.cli", "scale", "2"]
        assert process_tree.start(scale, output, run.env).wait(60) == 0, output.read_text()
        run.wait(lambda: run.shows(r"^group 1 .* training"), "the second one trains", 120)
    finally:
        process_tree.kill_tree(run.process)


@pytest.mark.slow  # test_it_grows_shrinks_and_ends also ends
@pytest.mark.timeout(240)
def test_it_ends_when_all_groups_have_finished(tmp_path: Path) -> None:
    run = Command(tmp_path, "--replicas", "2", str(MEMBER), "50")
    try:
        assert run.process.wait(120) == 0, run.report()
        assert (
            run.shows(r"^group 0 .* done")
            and run.shows(r"^group 1 .* done")
            and run.shows(r"^done: 2 groups")
        )
        assert_logs_are_named(run)
    finally:
        process_tree.kill_tree(run.process)


@pytest.mark.slow  # tests/integration/test_job.py has it with threads
@pytest.mark.timeout(240)
def test_a_group_that_is_killed_after_the_end_trains_nothing_again(tmp_path: Path) -> None:
    """Group 1 is killed behind its loop, when group 0 has ended."""
    run = Command(tmp_path, "--replicas", "2", "--min-replicas", "2", str(FINISHED))
    pid = tmp_path / "pid-1"
    try:
        run.wait(lambda: pid.exists() and pid.read_text().endswith("\n"), "group 1 has left its loop", 120)
        run.wait(lambda: run.shows(r"^group 0 .* done"), "group 0 has ended")
        os.kill(int(pid.read_text()), signal.SIGKILL)
        assert run.process.wait(120) == 0, run.report()
    finally:
        process_tree.kill_tree(run.process)
    assert run.shows(r"^done: 2 groups"), run.report()
    log = (tmp_path / "logs" / "group-1.log").read_text()
    assert "this group trains nothing: " in log and "it was complete at step 8, before" in log, log
    lives = {name: (tmp_path / name).exists() for name in ("life-1-1", "step-1-0", "step-1-1")}
    assert lives == {"life-1-1": True, "step-1-0": True, "step-1-1": False}


@pytest.mark.slow  # tests/unit/launch/test_job.py has it without processes
@pytest.mark.timeout(240)
def test_an_error_behind_the_loop_of_all_groups_is_that_of_the_job(tmp_path: Path) -> None:
    """Each group comes back, is told that the training has ended, and trains nothing again."""
    run = Command(tmp_path, "--replicas", "2", "--min-replicas", "2", str(FINISHED), "result.pt")
    try:
        assert run.process.wait(180) == 1, run.report()
    finally:
        process_tree.kill_tree(run.process)
    told = r"its script ended with status 1 after the training was complete, and ran to its end in no life: "
    for group in range(2):
        assert run.shows(rf"group {group}: {told}OSError: result.pt: no space left"), run.report()
        assert not (tmp_path / f"step-{group}-1").exists(), run.report()
    assert not run.shows("^done"), run.report()


@pytest.mark.slow
@pytest.mark.hosts
@pytest.mark.timeout(240)
def test_a_job_on_a_host_that_cannot_resolve_localhost(tmp_path: Path) -> None:
    """Otherwise torchrun and each TCPStore of a group would try that for minutes."""
    script = tmp_path / "script.py"
    script.write_text((ours_path() / "python/examples/minimal.py").read_text().replace("8000", "320"))
    run = Command(tmp_path, "--replicas", "1", str(script), prefix=nameless(tmp_path))
    try:
        assert run.process.wait(200) == 0, run.report()
    finally:
        process_tree.kill_tree(run.process)
    assert run.shows(r"^done: 1 group") and "cannot be retrieved" not in run.report(), run.report()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_jobs_that_start_in_the_same_second_are_separate(tmp_path: Path) -> None:
    """Two pairs, in one folder. Otherwise two jobs write to the same logs, and both find the lighthouse of
    one there, or one ends because the lighthouse's port is taken.
    """
    found: set[tuple[str, str]] = set()
    for pair in range(2):
        runs = [
            Command(
                tmp_path, "--replicas", "1", str(MEMBER), FOREVER, output=f"{pair}-{number}", log_dir=None
            )
            for number in range(2)
        ]
        try:
            for run in runs:
                run.wait(lambda run=run: run.shows(r"^group 0 "), "it starts its group")  # type: ignore[misc]
            for run in runs:
                logs, lighthouse = run.log.read_text().splitlines()[:2]
                found.add((logs, f"{pair} {lighthouse}"))
                run.process.send_signal(signal.SIGINT)
            for run in runs:
                assert run.process.wait(60) == 130, run.report()
        finally:
            for run in runs:
                process_tree.kill_tree(run.process)
    for each in map(set, zip(*found)):
        assert len(each) == 4, found
    for logs, _ in found:
        assert (tmp_path / logs.removeprefix("logs: ") / "lighthouse.log").exists(), logs


@pytest.mark.parametrize(
    ("bind", "expected"),
    [
        # The program on the port accepts connections; the command must not take it for the lighthouse.
        (
            "127.0.0.1:{taken}",
            'bind is "127.0.0.1:{taken}": the port is in use by another process; choose another one, or 0',
        ),
        ("29510", 'bind is "29510": it must be host:port with a port between 0 and 65535'),
        (
            "127.0.0.1:65536",
            'bind is "127.0.0.1:65536": it must be host:port with a port between 0 and 65535',
        ),
        ("192.0.2.1:29509", 'bind is "192.0.2.1:29509", which cannot be listened on'),
    ],
)
def test_the_error_names_an_address_on_which_the_lighthouse_cannot_listen(
    bind: str, expected: str, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        run = Command(tmp_path, "--bind", bind.replace("{taken}", port), str(MEMBER), FOREVER)
        try:
            assert run.process.wait(120) == 1, run.report()
        finally:
            process_tree.kill_tree(run.process)
    output = run.log.read_text()
    why = re.escape(expected.replace("{taken}", port))
    assert re.search(rf"torchft run: a lighthouse ended with status \d before it listened: {why}", output)
    assert "lighthouse: http" not in output and not list(tmp_path.glob("logs/group-*")), (
        "no group was started"
    )
    wait_until(lambda: processes_of(tmp_path) == [])  # the kernel has killed the ready process
    assert not (tmp_path / "torchft").exists() or os.listdir(tmp_path / "torchft") == [], "nor a socket"


# One sample of the data set cannot be trained on. Each group that gets it ends with the same exception.
POISONED = """
import torch, torchft
from torch.utils.data import TensorDataset

job = torchft.Job()
net = torch.nn.Linear(1, 1)
model, optimizer = job.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
data = TensorDataset(torch.arange(64.0)[:, None])
for step in job.loader(data, global_batch_size=8, micro_batch_size=2, epochs=100):
    for (x,) in step:
        loss = model(x).square().mean() * 1e-6
        if job.step >= 3 and (x == 13).any():
            raise ValueError("sample 13 is poison")
        step.backward(loss)
    step.commit()
"""


@pytest.mark.timeout(400)
def test_a_sample_that_cannot_be_trained_on_stops_the_job_with_its_traceback(tmp_path: Path) -> None:
    script = tmp_path / "poisoned.py"
    script.write_text(POISONED)
    run = Command(tmp_path, "--replicas", "2", str(script))
    try:
        assert run.process.wait(380) == 65, run.report()
        shown = run.log.read_text()
    finally:
        process_tree.kill_tree(run.process)
    assert shown.count("torchft run: the job stops: the same exception has ended ") == 1, shown
    assert shown.count("Traceback (most recent call last):") == 1
    assert shown.count("ValueError: sample 13 is poison") == 1
    assert "poisoned.py:13 in <module> in step " in shown and ", unit " in shown
    logs = "".join(log.read_text() for log in (tmp_path / "logs").glob("group-*.log"))
    assert 1 <= logs.count("\nValueError: sample 13 is poison") <= 2, "a verdict after two failures"


@pytest.mark.slow  # the test above; tests/unit/manager/test_poison.py has the rule
@pytest.mark.timeout(400)
def test_a_unit_that_cannot_be_trained_on_is_left_out(tmp_path: Path) -> None:
    script = tmp_path / "poisoned.py"
    # in the second epoch, once
    script.write_text(POISONED.replace("epochs=100", 'epochs=2, on_poison="skip"').replace(">= 3", ">= 8"))
    run = Command(tmp_path, "--replicas", "2", str(script))
    try:
        assert run.process.wait(380) == 0, run.report()
    finally:
        process_tree.kill_tree(run.process)
    logs = "".join(log.read_text() for log in (tmp_path / "logs").glob("group-*.log"))
    assert logs.count(": ValueError: sample 13 is poison\n") == 2, "a verdict after two failures"
    (line,) = (tmp_path / "torchft_skipped_units.jsonl").read_text().splitlines()
    skipped = json.loads(line)
    assert 13 in skipped["indices"] and len(skipped["indices"]) == 2
    assert (skipped["epoch"], skipped["step"]) == (1, 8 + skipped["batch"])


@pytest.mark.slow  # tests/unit/launch/test_job.py has it without processes
@pytest.mark.timeout(240)
def test_a_script_that_raises_at_once_ends_the_job_with_its_error(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise RuntimeError('out of cheese')\n")
    run = Command(tmp_path, "--replicas", "1", str(script))
    try:
        assert run.process.wait(200) == 1
        shown = run.log.read_text()
        assert "torchft run: the script ends before its first step: RuntimeError: out of cheese\n" in shown
        assert re.search(
            r"\nthe end of \S+/group-0.log:\nTraceback.*\n(?: .*\n)+RuntimeError: out of cheese\n", shown
        )
        assert "torch/distributed/elastic" not in shown, "nor what torchrun says of it"
        assert not run.shows("started again 2 times")
        assert f"\nlogs: {tmp_path / 'logs'}\n" in run.log.read_text()
    finally:
        process_tree.kill_tree(run.process)
