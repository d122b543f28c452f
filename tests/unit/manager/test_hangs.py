"""What a rank reports while it makes no progress: its phase, its threads, its collective."""

from __future__ import annotations

import pdb
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from torchft._manager.observe import hangs
from torchft._torchft import MemberFailure
from torchft.process_group import ProcessGroupDummy

if TYPE_CHECKING:
    from tests.unit.manager.conftest import Fixture


class Probe(nn.Module):
    """A model that looks at the stack of its own thread from another one, as the listener does."""

    def __init__(self, between: bool) -> None:
        super().__init__()
        self.inner: nn.Module = nn.Identity()
        self.between = between
        self.seen = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = looked_at(self.between)
        return self.inner(x)


def looked_at(between: bool) -> str:
    found: list[str] = []
    mine = threading.get_ident()
    thread = threading.Thread(target=lambda: found.append(hangs.seen(mine, between)))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize(
    ("between", "training", "phase"),
    [
        (True, False, "EVALUATION"),
        (True, True, "BETWEEN_STEPS"),
        (False, False, ""),  # a teacher
        (False, True, ""),
    ],
)
def test_a_model_in_evaluation_mode_is_evaluated_between_two_steps(
    between: bool, training: bool, phase: str
) -> None:
    model = Probe(between).train(training)
    model(torch.zeros(1))
    assert model.seen == phase


@pytest.mark.parametrize("between", [False, True])
def test_a_breakpoint_is_seen(between: bool) -> None:
    seen: list[str] = []

    class Stopped(pdb.Pdb):
        def interaction(self, *args: object) -> None:
            seen.append(looked_at(between))
            self.set_continue()

    Stopped().set_trace()
    assert looked_at(between) == ("BETWEEN_STEPS" if between else "")
    assert seen == ["FIRST_STEPS"]


def test_the_outermost_module_decides() -> None:
    outer, inner = nn.Sequential(), Probe(True)
    outer.append(inner)
    inner.eval()  # a part that is frozen
    outer(torch.zeros(1))
    assert inner.seen == "BETWEEN_STEPS"


@pytest.mark.parametrize("between", [False, True])
def test_a_checkpoint_is_seen(tmp_path: Path, between: bool) -> None:
    seen: list[str] = []

    class Written:
        def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
            seen.append(looked_at(between))
            return dict, ()

    torch.save(Written(), tmp_path / "checkpoint.pt")
    assert seen == ["CHECKPOINT"]


def test_a_compilation_is_seen_and_compiled_code_is_none() -> None:
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        seen.append(looked_at(False))

        def compiled(*args: Any) -> Any:
            seen.append(looked_at(False))
            return graph.forward(*args)

        return compiled

    model = torch.compile(nn.Linear(2, 2), backend=backend)
    model(torch.ones(1, 2))
    model(torch.ones(1, 2))
    assert seen == ["FIRST_STEPS", "", ""]


def test_an_unknown_thread_shows_nothing() -> None:
    assert hangs.seen(-1, False) == ""
    assert hangs.seen(-1, True) == hangs.BETWEEN_STEPS


def test_the_stacks_name_all_threads() -> None:
    done = threading.Event()

    def hanging_here() -> None:
        done.wait()

    thread = threading.Thread(target=hanging_here)
    thread.start()
    try:
        text = hangs.stacks()
    finally:
        done.set()
        thread.join()
    assert "hanging_here" in text
    assert "test_the_stacks_name_all_threads" in text


def test_the_first_active_collective_of_the_flight_recorder() -> None:
    entry = {"profiling_name": "nccl:all_reduce", "input_sizes": [[3]], "process_group": ["0", "default_pg"]}
    trace = {
        "entries": [
            {**entry, "record_id": 1, "state": "completed"},
            {**entry, "record_id": 3, "state": "scheduled"},
            {**entry, "record_id": 2, "state": "started", "profiling_name": "nccl:broadcast"},
        ]
    }
    assert hangs.first_active(trace) == (
        "nccl:broadcast of [[3]] in process group ['0', 'default_pg'], started"
    )
    assert hangs.first_active({"entries": trace["entries"][:1]}) == ""
    assert hangs.first_active({}) == ""
    assert isinstance(hangs.awaited(), str)  # of this build of PyTorch


def test_a_phase_of_the_script_is_reported_and_answered(fixture: Fixture) -> None:
    manager = fixture.manager(pg=ProcessGroupDummy(0, 1))
    said: list[str] = []
    manager._logger.phase = said.append  # type: ignore[method-assign]
    with manager.phase("evaluation"):
        assert manager._failures.progress() == (False, "is in the phase 'evaluation'", "EVALUATION")
        with manager.phase("checkpoint"):
            pass
    assert said == ["EVALUATION", "CHECKPOINT", "EVALUATION", ""]
    with pytest.raises(ZeroDivisionError), manager.phase("compilation"):
        raise ZeroDivisionError
    assert said[4:] == ["FIRST_STEPS", ""]
    allowed = r"phase\('lunch'\): allowed are evaluation, checkpoint, compilation"
    with pytest.raises(ValueError, match=allowed), manager.phase("lunch"):
        pass


def test_between_two_steps_is_a_phase_of_its_own(fixture: Fixture) -> None:
    manager = fixture.manager(pg=ProcessGroupDummy(0, 1))
    assert manager._failures.progress()[2] == hangs.BETWEEN_STEPS
    manager.start_quorum()
    manager.wait_quorum()
    assert manager._failures.progress()[2] == ""


def test_a_stalled_rank_reports_its_stacks_and_others_do_not(fixture: Fixture) -> None:
    manager = fixture.manager(pg=ProcessGroupDummy(0, 1))
    stacks: list[str] = []
    manager._logger.stalled = lambda _, text: stacks.append(text)  # type: ignore[method-assign]
    manager._failures.stalled(MemberFailure(1, "another", "no progress", 0))
    assert stacks == []
    manager._failures.stalled(MemberFailure(1, manager._replica_id, "no progress", 0))
    assert "test_a_stalled_rank_reports" in stacks[0]
