"""Every command in the documents is known to its program. Commands in shell blocks are run, or have a reason
not to be.

Sections of pages are run unchanged, except for ports and the length of the training. Commands without a test
here are listed in `CANNOT`, with the reason.
"""

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
import venv
from pathlib import Path

import pytest
from documents import (
    ROOT,
    SHELLS,
    Block,
    Command,
    block_commands,
    blocks,
    commands,
    documents,
    indented_commands,
)
from hosts import Hosts
from processes import free_port
from programs import check

from torchft.launch import process_tree

COMMANDS = [command for document, text in documents().items() for command in commands(document, text)]

# Sections (document, heading), and the number of their first shell blocks that a test runs.
RUN = {
    ("README.md", "Try it"): 2,
    ("docs/run.md", "Run a job"): 3,
    ("docs/operating.md", "Security"): 5,
    ("docs/internals/correctness.md", "The simulation"): 1,
    ("docs/deploy.md", "Start the lighthouse"): 1,
    ("docs/deploy.md", "Set the addresses and interfaces"): 2,
    ("docs/deploy.md", "Start the groups"): 2,
    ("docs/deploy.md", "Diagnosis of a hang"): 1,
    ("docs/kubernetes.md", "Security"): 2,  # test_kubernetes_example.py
    ("docs/kubernetes.md", "Alerts"): 1,
}
# Patterns of commands in shell blocks that no test can run unchanged, and the reason.
CANNOT = {
    r"make \S+( [A-Z]+=\S+)?": "installs into .venv and takes minutes; what the recipes start has separate "
    "tests "
    "(test_train_*.py, test_torchft_toolchain.py, the suite itself)",
    r"pip install .*": "downloads and builds for minutes; test_wheel.py does so",
    r"python python/bench/.*": "takes minutes on an idle machine, and most parts install upstream",
    r"python tests/process/chaos_faults\.py .*": "runs for an hour; test_chaos.py runs the same faults",
    r".*torchtitan\.experiments.*": "needs torchtitan and eight GPUs; test_torchtitan.py drives it on a CPU",
    r"torchft_lighthouse .* --cluster .*": "needs three hosts; test_torchft_run.py runs three on one",
    r"torchft_lighthouse --min_replicas 2|TORCHFT_LIGHTHOUSE=http://10\.0\.0\.1:29510 .*": "needs hosts; "
    "test_two_hosts runs those of docs/deploy.md",
    r"export (REPLICA_GROUP_ID|TORCHFT_HOST)=.*|torchrun --rdzv-backend torchft .*": "needs a host for each "
    "node; test_rendezvous.py runs torchrun with it",
    r"(srun|.*torchrun .*--no-python .*) torchft exec .*": "test_exec.py starts ranks by it",
    r"docker .*": "needs Docker, and downloads its images; test_dockerfile.py checks the file and these "
    "commands",
    r"torchft run .* --scale auto .*": "searches for minutes; test_torchft_run.py has a shorter search",
    r"torchft scale .* --(kubernetes|slurm) .*": "needs a cluster; tests/unit/scaling/test_places.py has "
    "stand-ins of its programs",
    r"kubectl .*": "needs a cluster; test_kubernetes_example.py checks the manifests",
    r"torchft doctor --node .*": "needs four hosts; tests/unit/node and tests/unit/cli/test_node.py run it",
    r"(sacct|scontrol) .*": "needs Slurm's controller",
    r"mkdir -p torchft-logs|export .*LIGHTHOUSE_JOB.*|sbatch .*|torchft (status|events)": "needs Slurm; "
    "tests/slurm/test_slurm.py runs these on one",
}


@pytest.mark.parametrize("command", [pytest.param(c, id=f"{c.document}: {c.text[:60]}") for c in COMMANDS])
def test_the_program_knows_the_command(command: Command) -> None:
    check(command.text)


def test_every_command_of_a_shell_block_is_run_or_has_a_reason() -> None:
    unexplained, used = [], set()
    for document, text in documents().items():
        for block in shell_blocks(document, text):
            if block in section_blocks(document, block.heading):
                continue
            for command in block_commands(block.text, console=block.language == "console"):
                reasons = [pattern for pattern in CANNOT if re.fullmatch(pattern, command)]
                used.update(reasons)
                if not reasons:
                    unexplained.append(f"{document}: {command}")
    assert unexplained == []
    assert set(CANNOT) - used == set(), "reasons without a command"


def test_no_command_is_in_an_indented_block() -> None:
    assert {d: found for d, text in documents().items() if (found := indented_commands(text))} == {}


def shell_blocks(document: str, text: str) -> list[Block]:
    return [block for block in blocks(document, text) if block.language in SHELLS]


def section_blocks(document: str, heading: str) -> list[Block]:
    """The blocks of a section that a test runs."""
    found = [block for block in shell_blocks(document, documents()[document]) if block.heading == heading]
    return found[: RUN.get((document, heading), 0)]


def section(document: str, heading: str) -> list[str]:
    found = [block.text for block in section_blocks(document, heading)]
    assert len(found) == RUN[document, heading], f"{document} has {len(found)} shell blocks under {heading!r}"
    return found


def needs(*programs: str) -> None:
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"the page's commands need {missing}")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a shell where torchft and PyTorch are installed, in a directory that contains only
    the training scripts.
    """
    for name in ("train_ddp.py", "python"):
        (tmp_path / name).symlink_to(ROOT / name)
    venv.create(tmp_path / ".venv", symlinks=True)
    folder = tmp_path / ".venv" / "bin"
    for name, code in (
        ("torchft", "from torchft.cli import entry; entry()"),
        ("torchft_lighthouse", "from torchft._torchft import lighthouse_main; lighthouse_main()"),
        ("torchrun", "from torch.distributed.run import main; main()"),
    ):
        command = folder / name
        command.write_text(f"#!{sys.executable}\nimport sys; sys.path.insert(0, {str(ROOT)!r})\n{code}\n")
        command.chmod(0o755)
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("TORCHFT_")},
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "NUM_REPLICA_GROUPS": "2",  # for train_demo.py, which stands for train_ddp.py
    }


@pytest.fixture
def terminal(environment: dict[str, str]) -> dict[str, str]:
    """The environment of a newly opened terminal, where .venv is not active."""
    return {**environment, "PATH": os.environ["PATH"]}


def with_ports_of_our_own(script: str, *ports: str) -> str:
    for port in ports:
        assert port in script
        script = script.replace(port, str(free_port()))
    return script


def bash(script: str, folder: Path, environment: dict[str, str], seconds: float) -> str:
    """Runs a script and returns its output. Its processes are always ended."""
    script = "set -e -m\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n" + script
    log = folder / "output"
    process = process_tree.start(["bash", "-c", script], log, {**environment, "PWD": str(folder)}, cwd=folder)
    try:
        assert process.wait(seconds) == 0, log.read_text()
    finally:
        process_tree.kill_tree(process)
    return log.read_text()


# train_ddp.py, which records its steps.
FOLLOWED = "python/examples/train_demo.py --events events"


def ends(folder: Path) -> list[dict[str, object]]:
    """The last event of the first rank of each of two groups."""
    logs = [
        (folder / "events" / f"group-{group}-rank-0.jsonl").read_text().splitlines() for group in range(2)
    ]
    return [json.loads(lines[-1]) for lines in logs]


@pytest.mark.slow  # test_torchft_run.py and tests/unit/cli test each of the commands
@pytest.mark.timeout(280)
def test_a_job_of_torchft_run_and_its_status(terminal: dict[str, str], tmp_path: Path) -> None:
    activate, run, look = section("docs/run.md", "Run a job")
    assert "--steps 5000" in run and run == section("README.md", "Try it")[1]
    terminal["XDG_RUNTIME_DIR"] = str(tmp_path)
    log = tmp_path / "run"
    job = process_tree.start(["bash", "-c", f"{activate}exec {run}"], log, terminal, cwd=tmp_path)
    try:
        deadline = time.monotonic() + 200
        while not re.search(r"^group 0 .* training", log.read_text(), re.M):
            assert job.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        # If another job has the default port, a free one is used; the typed commands only know the default
        # port.
        address = re.search(r"^lighthouse: (\S+)", log.read_text(), re.M)
        assert address
        if not address[1].endswith(":29510"):
            terminal["TORCHFT_LIGHTHOUSE"] = address[1]
        outputs = {}
        for command in block_commands(look):
            done = subprocess.run(
                ["bash", "-c", activate + command],
                env=terminal,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=100,
            )
            outputs[command] = done.stdout + done.stderr
            # The doctor exits with 1 if it finds a problem of this machine.
            assert done.returncode == 0 or (command == "torchft doctor" and done.returncode == 1), outputs
        assert re.search("group.*training|training", outputs["torchft status"]), outputs
        assert "joined" in outputs["torchft events"] or "quorum" in outputs["torchft events"], outputs
        assert (
            "the lighthouse answers" in outputs["torchft doctor"]
            and "not free" not in outputs["torchft doctor"]
        ), outputs
        job.send_signal(signal.SIGINT)
        assert job.wait(60) == 130, log.read_text()
    finally:
        process_tree.kill_tree(job)


@pytest.mark.slow  # tests/unit/test_security.py combines all settings
@pytest.mark.timeout(280)
def test_the_steps_that_protect_a_job(environment: dict[str, str], tmp_path: Path) -> None:
    needs("openssl", "curl", "bash")
    script = with_ports_of_our_own(
        "\n".join(section("docs/operating.md", "Security")), "29510", "29511", "29512"
    )
    assert script.count(" --steps 50 ") == 2
    script = script.replace("train_ddp.py --steps 50 ", f"{FOLLOWED} --steps 20 ")
    output = bash(script, tmp_path, environment, 250)
    assert re.search(r"Lighthouse listening on: https://", output), output

    status, _ = json.JSONDecoder().raw_decode(output[output.index("{\n") :])
    assert status["members"] == [], "the training has ended, and both groups have printed that"
    assert re.search(r'nobody\\?" is not known', output), output

    first, second = ends(tmp_path)
    assert first["event"] == second["event"] == "end" and first["sha256"] == second["sha256"]
    # A group fetched its first weights from the other one, so both ends used the token.
    assert re.search(r'msg="torchft: a member healed" member=train_ddp_\d\S* step=0 bytes=\d{4}', output), (
        output
    )


@pytest.mark.hosts
@pytest.mark.slow  # test_hosts.py tests groups on two hosts
@pytest.mark.timeout(280)
def test_two_hosts(environment: dict[str, str], tmp_path: Path) -> None:
    """Two groups, and then one group over both hosts: the page's commands with other addresses, and without a
    GPU.

    The two groups use the page's optional `--min_replicas 2`: neither trains before the other one has
    started.
    """
    (lighthouse,) = section("docs/deploy.md", "Start the lighthouse")
    settings, look = section("docs/deploy.md", "Set the addresses and interfaces")
    groups = section("docs/deploy.md", "Start the groups")
    (over_both,) = section("docs/deploy.md", "Diagnosis of a hang")
    with Hosts(2) as hosts, contextlib.ExitStack() as running:

        def start(host: int, script: str) -> subprocess.Popen[bytes]:
            script = (settings + script).replace("10.0.0.1", hosts.addresses[0])
            script = re.sub(r"train_ddp.py --steps \d+", f"{FOLLOWED} --steps 20", script)
            log = tmp_path / f"output-{len(started)}"
            # The first group waits for the second one as long as the test waits for both.
            env = {**environment, "TORCHFT_QUORUM_TIMEOUT_SEC": "200"}
            process = process_tree.start(
                [*hosts.command(host), "bash", "-ec", script], log, env, cwd=tmp_path
            )
            running.callback(process_tree.kill_tree, process)
            started.append(log)
            return process

        def end(*processes: subprocess.Popen[bytes]) -> None:
            for process in processes:
                assert process.wait(200) == 0, "\n".join(log.read_text() for log in started)

        started: list[Path] = []
        assert "--min_replicas 1 " in lighthouse
        of_two = start(0, lighthouse.replace("--min_replicas 1 ", "--min_replicas 2 "))
        end(*(start(host, f"until {look.strip()}; do sleep 0.1; done\n{groups[host]}") for host in range(2)))
        first, second = ends(tmp_path)
        assert first["event"] == second["event"] == "end" and first["sha256"] == second["sha256"]
        assert all("the lighthouse answers" in log.read_text() for log in started[1:])
        events = (tmp_path / "events" / "group-0-rank-0.jsonl").read_text().splitlines()
        assert any(json.loads(event).get("participants") == 2 for event in events)

        process_tree.kill_tree(of_two)
        shutil.rmtree(tmp_path / "events")
        start(0, lighthouse)
        one_group = (f"NUM_REPLICA_GROUPS=1 {command}" for command in block_commands(over_both))
        end(*(start(host, command) for host, command in enumerate(one_group)))
        ranks = [
            (tmp_path / "events" / f"group-0-rank-{rank}.jsonl").read_text().splitlines()[-1]
            for rank in range(2)
        ]
        first, second = map(json.loads, ranks)
        assert first["event"] == second["event"] == "end" and first["sha256"] == second["sha256"]


@pytest.mark.slow  # go test ./sim replays histories
@pytest.mark.timeout(280)
def test_a_history_is_replayed() -> None:
    needs("go")
    (text,) = section("docs/internals/correctness.md", "The simulation")
    first, second = block_commands(text)
    assert first in second
    done = subprocess.run(["bash", "-c", second], cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0 and "\nok " in done.stdout, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) > 99
