"""The examples in the docs run unchanged. The README's is python/examples/minimal.py, which has other
tests.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore
from upstream import client_path

from torchft.coordination import LighthouseServer

ROOT = Path(__file__).resolve().parents[2]


LOOPS = (ROOT / "docs" / "training_loops.md").read_text()
MIGRATING = (ROOT / "docs" / "migrating.md").read_text()
# Without the module's docstring.
MINIMAL = (ROOT / "python" / "examples" / "minimal.py").read_text().partition('"""\n\n')[2]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def test_the_readme_shows_minimal_py() -> None:
    assert blocks((ROOT / "README.md").read_text(), "python") == [MINIMAL]


def sides(diff: str) -> tuple[str, str]:
    """The script before and after a diff."""
    lines = [(line[:1] or " ", line[1:]) for line in diff.splitlines()]
    assert {mark for mark, _ in lines} == {" ", "-", "+"}
    before, after = ("".join(f"{text}\n" for mark, text in lines if mark != other) for other in "+-")
    return before, after


DDP, FSDP2, UPSTREAM = (sides(diff) for diff in blocks(MIGRATING, "diff"))


def test_two_of_the_diffs_lead_to_minimal_py() -> None:
    assert DDP[1] == UPSTREAM[1] == re.sub(r"  # .*", "", MINIMAL)


@pytest.mark.slow  # test_the_example_trains_in_two_groups_and_ends runs the other sides
@pytest.mark.timeout(240)
@pytest.mark.parametrize("plain", [DDP[0], FSDP2[0]])
def test_the_scripts_without_torchft_train(plain: str, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(plain)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([*torchrun, "plain.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    weights = re.findall(r"weights (\[\[.*?\]\])", done.stdout)
    assert len(weights) == 2 * plain.count("print(")
    assert all(json.loads(found) == [[pytest.approx(1, abs=0.1)] * 2] for found in weights)


# How a script names the number of committed steps, by what it calls.
ENDS = {
    "torchft.Job(": "job.step",
    "TorchftStrategy(": "trainer.global_step",
    "TorchftTrainer(": "trainer.state.global_step",
    "": "manager.current_step()",
}
SCRIPTS = [ROOT / "python" / "examples" / name for name in ("huggingface_loop.py", "lightning_loop.py")]
# The first example has FSDP2. The others are slow, for example those of Lightning and Transformers; a
# script in upstream's style is in test_script_unchanged.py.
EXAMPLES = [
    pytest.param(text, id=str(i), marks=[pytest.mark.slow] if i else [])
    for i, text in enumerate(
        [*blocks(LOOPS, "python"), UPSTREAM[0], FSDP2[1], *(script.read_text() for script in SCRIPTS)]
    )
]


@pytest.mark.timeout(900)  # the first run installs the packages of an example
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_example_trains_in_two_groups_and_ends(example: str, tmp_path: Path) -> None:
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    path += [
        str(client_path(p))
        for p in ("lightning", "transformers")
        if re.search(rf"^(from|import) {p}\b", example, re.M)
    ]
    script = tmp_path / "example.py"
    ends = next(step for begin, step in ENDS.items() if begin in example)
    script.write_text(f"{example}\nprint('ended at step', {ends})\n")
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=100)
    # As under torchrun, for a group of one rank.
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    groups = []
    try:
        for store in stores:
            env = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path),
                "TORCHFT_LIGHTHOUSE": lighthouse.address(),
                "RANK": "0",
                "WORLD_SIZE": "1",
                "CUDA_VISIBLE_DEVICES": "",  # both groups would have the same device
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            command = [sys.executable, str(script)]
            groups.append(
                subprocess.Popen(
                    command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
                )
            )
        for group in groups:
            output, _ = group.communicate(timeout=200)
            assert group.returncode == 0, output
            assert output.splitlines()[-1] == "ended at step 100", output
    finally:
        for group in groups:
            group.kill()
            group.communicate()
        lighthouse.shutdown()
