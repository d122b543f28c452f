"""A group of two ranks is drained from a running train_ddp.py: it ends without an error, and no step is
lost.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import ours_path
from waiting import wait_for

from torchft.coordination import LighthouseServer
from torchft.launch import process_tree

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python" / "examples"))

from replica_group import Group  # noqa: E402


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=2000)
    yield server.address()
    server.shutdown()


def history(lighthouse: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{lighthouse}/api/v1/history", timeout=10) as answer:
        return list(json.load(answer)["events"])


def lost(group: Group) -> int:
    return sum(event["event"] == "lost" for event in group.events)


@pytest.mark.slow  # test_torchft_commands drains a group without PyTorch
@pytest.mark.timeout(300)
def test_a_drained_group_ends_and_the_other_one_loses_no_step(lighthouse: str, tmp_path: Path) -> None:
    groups = [Group(number, 2, nproc=2, folder=tmp_path) for number in range(2)]
    try:
        for group in groups:
            group.start(lighthouse, ["--steps", "1000000"])
        wait_for(lambda: all(group.step() >= 10 for group in groups), "both train", *groups, seconds=200)
        before = lost(groups[0])

        output = tmp_path / "output"
        drain = [
            sys.executable,
            "-m",
            "torchft.cli",
            "drain",
            "--lighthouse",
            lighthouse,
            "--wait",
            "60s",
            "train_ddp_1",
        ]
        assert process_tree.start(drain, output, {"PYTHONPATH": ours_path()}).wait(90) == 0, (
            output.read_text()
        )
        assert (
            "asked to leave at the end of a step" in output.read_text() and "has left" in output.read_text()
        )
        wait_for(lambda: groups[1].status == 0, "it ends well", *groups, seconds=100)
        assert len({end["step"] for end in groups[1].ends()}) == 1, "its ranks left at the same step"

        left_at = groups[1].ends()[0]["step"]
        wait_for(lambda: groups[0].step() >= left_at + 10, "the other one continues", *groups, seconds=100)
        assert lost(groups[0]) == before
        kinds = [event["kind"] for event in history(lighthouse)]
        assert "drained" in kinds and "failed" not in kinds, kinds
        assert "left as asked (drain)" in history(lighthouse)[-1]["reason"]
    finally:
        for group in groups:
            group.kill()
