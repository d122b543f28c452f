"""A small version of `make train-diloco`: a group is killed, heals, and all groups end with the same
global parameters.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_train_demo import EXAMPLES, ROOT, environment, read_events

import train_diloco
from python.examples import parts

__all__ = ["environment"]  # a fixture

SMALL = ["--width", "32", "--layers", "1", "--text-bytes", "100000", "--batch-size", "8", "--sync-every", "6"]


@pytest.mark.slow  # tests/integration/test_local_sgd.py has groups that fail in each phase
@pytest.mark.timeout(240)
def test_a_group_is_killed_heals_and_all_end_with_equal_parameters(
    environment: dict[str, str], tmp_path: Path
) -> None:
    picture = tmp_path / "loss.png"
    plot = ["--plot", str(picture)] if find_spec("matplotlib") else []
    command = [
        *(sys.executable, str(EXAMPLES / "demo.py"), "--script", "train_diloco", *plot),
        # Steps take milliseconds, and the demo polls ten times a second, so the kills must not come too late.
        *("--steps", "300", "--kill-at", "20", "--kill-every", "100"),
        *("--time-limit", "200", "--logs", str(tmp_path / "logs")),
        *("--", *SMALL),
    ]
    done = subprocess.run(
        command, env={**environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=220
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for state in ("training", "killed", "starting again", "done"):
        assert any(line.startswith("group 1 [") and state in line for line in done.stdout.splitlines()), (
            done.stdout
        )
    digests = re.findall(r"group \d rank \d  ([0-9a-f]{64})$", done.stdout, re.MULTILINE)
    assert len(digests) == 2 and len(set(digests)) == 1 and "equal" in done.stdout.splitlines()
    assert picture.is_file() == bool(plot)
    bits = re.search(r"bits per byte of held-out text +(\d\.\d+) +(\d\.\d+)", done.stdout)
    assert bits and bits[1] == bits[2] and float(bits[1]) < 7  # an untrained model needs 8 bits

    survivor, victim = (read_events(tmp_path / "logs", group) for group in (0, 1))
    commits = [event["step"] for event in survivor if event["event"] == "commit"]
    assert commits == list(range(commits[0], commits[0] + len(commits))) and commits[-1] >= 300
    kills = sum(event["event"] == "start" for event in victim) - 1
    assert sum(event["event"] == "lost" for event in survivor) <= kills
    assert {event["participants"] for event in survivor if event["event"] == "commit"} == {1, 2}
    again = [event["event"] for event in victim].index("start", 1)
    healed = next(event for event in victim[again:] if event["event"] == "commit")
    assert healed["healing"] and healed["step"] > victim[again - 1]["step"] >= 20


def test_the_text_is_the_standard_library() -> None:
    train, held_out = train_diloco.standard_library(limit=50_000)
    assert (len(train), len(held_out)) == (50_000, 5_000)
    assert b"import" in bytes(train) and bytes(held_out) not in bytes(train)


def test_pieces_and_the_bytes_that_follow_them() -> None:
    pieces = train_diloco.Pieces(torch.arange(101, dtype=torch.uint8), context=10)
    assert len(pieces) == 10
    for bytes_in, bytes_out in (pieces[0], pieces[9]):
        assert bytes_in.shape == bytes_out.shape == (10,)
        assert torch.equal(bytes_out, bytes_in + 1)


def test_an_untrained_model_needs_eight_bits() -> None:
    net = train_diloco.language_model(width=32, layers=1, context=8)
    for p in net[-1].parameters():
        torch.nn.init.zeros_(p)
    assert parts.bits_per_byte(net, torch.randint(256, (100,)), context=8) == pytest.approx(8)


def test_predictions_do_not_see_later_bytes() -> None:
    net = train_diloco.language_model(width=32, layers=2, context=8)
    text = torch.randint(256, (1, 8))
    changed = text.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = net(text), net(changed)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-6) and not torch.allclose(
        before[:, 5:], after[:, 5:]
    )


def test_the_picture_has_a_curve_per_group_and_a_mark_at_the_kill(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib: pip install '.[plot]'")
    import loss_curves

    def group(number: int, *steps: list[int]) -> Any:
        events = []
        for life in steps:
            events += [
                {"event": "start"},
                *({"event": "commit", "step": step, "loss": 1 / step} for step in life),
            ]
        return SimpleNamespace(number=number, events=[*events, {"event": "lost"}, {"event": "end"}])

    path = tmp_path / "loss.svg"
    groups = [group(0, list(range(1, 30))), group(1, [1, 2, 3], [], [20, 21])]
    loss_curves.draw(groups, path)
    picture = path.read_text()
    assert "group 0 -->" in picture and "group 1 killed" in picture and "group 0 killed" not in picture
    assert [len(life) for life in loss_curves.lives(groups[1].events)] == [3, 0, 2]
    assert loss_curves.smoothed([4.0, 2.0]) == [4.0, 3.0] and len(loss_curves.smoothed([1.0] * 50)) == 50
