"""The examples of docs/ftlib.md and docs/dlrover.md, of which the pages show parts, run."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from documents import ROOT, blocks
from processes import child_environment, free_port, ours_path

from tests.unit.children import run_python


@pytest.mark.parametrize("name", ["ftlib", "dlrover"])
def test_the_page_shows_a_part_of_the_example(name: str) -> None:
    (block,) = (
        b.text for b in blocks(name, (ROOT / f"docs/{name}.md").read_text()) if b.language == "python"
    )
    assert block in (ROOT / f"python/examples/{name}_loop.py").read_text()


def weights(*outputs: str) -> set[str]:
    return {found for text in outputs for found in re.findall(r"weights (\[\[.*?\]\])", text)}


@pytest.mark.slow
@pytest.mark.timeout(240)
# Slow with gossip: the script is the same, and tests/unit/ftlib/test_gossip.py trains with gossip in threads.
@pytest.mark.parametrize("consensus", ["shared_storage", pytest.param("gossip", marks=pytest.mark.slow)])
def test_two_members_of_ftlib_end(consensus: str, tmp_path: Path) -> None:
    script = ROOT / "python/examples/ftlib_loop.py"
    env = {"TORCHFT_HOST": "localhost"}
    if consensus == "gossip":
        ports = [str(free_port()) for _ in range(2)]
        arguments = [[port, *(f"localhost:{seed}" for seed in ports)] for port in ports]
    else:
        arguments = [[str(tmp_path)]] * 2
    with ThreadPoolExecutor(2) as pool:
        members = list(
            pool.map(lambda each: run_python(script.read_text(), *each, env=env, timeout=200), arguments)
        )
    assert [member.returncode for member in members] == [0, 0], [member.stderr for member in members]
    # The weights differ if one member ended before the other began; tests/process/test_ftlib.py compares
    # weights.
    assert [len(weights(member.stdout)) for member in members] == [1, 1]


@pytest.mark.slow  # 20 s; tests/unit/dlrover/test_optimizer.py has the same in threads
@pytest.mark.timeout(240)
def test_two_groups_with_distributed_optimizer_end_with_equal_weights(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torchft.cli", "run", "--replicas", "2", "--min-replicas", "2"]
    script = ROOT / "python/examples/dlrover_loop.py"
    env = child_environment(ours_path(), {"TORCHFT_HOST": "localhost", "MAX_WORKER_NUM": "2"})
    done = subprocess.run(
        [*command, script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    logs = [
        log.read_text(errors="replace") for log in (tmp_path / "torchft-logs").rglob("*") if log.is_file()
    ]
    assert len(weights(*logs)) == 1
