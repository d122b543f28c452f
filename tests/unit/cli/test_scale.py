"""`torchft scale`: which scaler it uses, and what it says of an error."""

from __future__ import annotations

from typing import Any

import pytest

from torchft.cli import main, scale
from torchft.launch import control
from torchft.scaling import Kubernetes, ScalerError, Slurm


@pytest.mark.parametrize(("given", "number"), [("4", 4), ("auto", "auto")])
def test_a_job_of_this_machine(given: str, number: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(control, "scale", lambda *arguments: asked.append(arguments) or "done")
    assert main(["scale", given, "--pid", "7"]) == 0
    assert asked == [(number, 7)]


def test_a_range_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[Any] = []
    monkeypatch.setattr(
        scale, "follow", lambda scaler, *range_, **options: followed.append((scaler, range_, options))
    )
    where = ["--lighthouse", "http://a:1", "--job", "j"]
    assert main(["scale", "2:8", *where, "--sizes", "2/4", "--kubernetes", "team/groups"]) == 0
    script = ["groups.sbatch", "train.py", "--max_steps", "5"]
    assert main(["scale", "2:8", "--name", "mine", "--slurm", *script]) == 0
    (pods, range_, options), (tasks, *_) = followed
    assert isinstance(pods, Kubernetes) and isinstance(tasks, Slurm)
    assert (range_, options) == ((2, 8, "2/4"), {"lighthouse": "http://a:1", "job": "j"})


def test_a_number_is_set_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sets: list[Any] = []
    monkeypatch.setattr(Kubernetes, "set", lambda self, groups: sets.append(groups))
    assert main(["scale", "4", "--kubernetes", "groups"]) == 0
    assert sets == [4] and capsys.readouterr().out == "4 replica groups\n"


def test_the_error_of_a_scaler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(self: Kubernetes, groups: int) -> None:
        raise ScalerError("kubectl: No such file or directory")

    monkeypatch.setattr(Kubernetes, "set", fails)
    assert main(["scale", "4", "--kubernetes", "groups"]) == 1
    assert capsys.readouterr().err == "torchft scale: kubectl: No such file or directory\n"
    assert main(["scale", "2:8", "--sizes", "odd", "--kubernetes", "groups"]) == 1
    assert "torchft scale: sizes='odd' is not allowed" in capsys.readouterr().err
