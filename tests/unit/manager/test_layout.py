"""Groups that reduce different tensors are detected before tensors are sent, and the group that joined last
ends.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any, Callable, Optional

import pytest
import torch
from torch import nn

from tests.unit.manager.conftest import Fixture, quorum
from torchft._agreement import LAYOUT, announce
from torchft._manager.checks import layout
from torchft._manager.checks.layout import (
    Layout,
    LayoutDiffers,
    announcement,
    check_layouts,
    digest,
    read_layout,
    refused,
)
from torchft._manager.quorum.plan import HealSource, Plan
from torchft.ddp import DistributedDataParallel, PureDistributedDataParallel
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo
from torchft.process_group.reconfigure import Handle

SHORT = timedelta(milliseconds=100)
OURS = ["model: weight float32[2]", "model: bias float32[2]"]
THEIRS = ["model: weight float32[3]", "model: bias float32[2]"]


LOADER, OTHER_LOADER = ["ElasticDataLoader: seed=0"], ["ElasticDataLoader: seed=1"]


def handle(i: int, lines: Optional[list[str]]) -> str:
    return announce(Handle(id=f"group{i}", store=f"host{i}:1").encode(), tuple(announcement(lines)))


def plan(groups: list[Optional[list[str]]], me: int, source: Optional[int] = None, max_step: int = 7) -> Plan:
    fields: dict[str, Any] = dict.fromkeys(Plan.__dataclass_fields__)
    fields.update(
        replica_rank=me,
        replica_ids=[f"group{i}" for i in range(len(groups))],
        handles=[handle(i, lines) for i, lines in enumerate(groups)],
        max_step=max_step,
        source=None if source is None else HealSource(source, "http://source", str(source)),
    )
    return Plan(**fields)


def outcome(the_plan: Plan, ours: Optional[list[str]], new_here: bool) -> str:
    try:
        check_layouts(the_plan, ours, new_here=new_here, read=lambda *_: THEIRS if ours == OURS else OURS)
    except LayoutDiffers as e:
        return "this group ends" if e.must_end else "another group ends"
    return "equal"


@pytest.mark.parametrize(
    ("groups", "me", "source", "max_step", "new_here", "expected"),
    [
        ([OURS, OURS], 0, None, 7, False, "equal"),
        ([OURS, None], 0, None, 7, False, "equal"),  # an upstream peer announces nothing
        ([OURS, THEIRS], 0, None, 7, False, "another group ends"),  # the other group joins, and heals
        ([LOADER, LOADER], 0, None, 7, False, "equal"),
        # A loader is needed in all groups or in none.
        ([LOADER, None], 0, None, 7, False, "another group ends"),
        ([LOADER, None], 1, 0, 7, True, "this group ends"),
        ([None, LOADER], 1, 0, 7, True, "this group ends"),
        ([LOADER, OURS], 0, None, 7, False, "another group ends"),
        ([LOADER, OTHER_LOADER], 1, 0, 7, True, "this group ends"),
        ([OURS, THEIRS], 1, 0, 7, True, "this group ends"),
        # The first group is not favored after step 0.
        ([THEIRS, OURS, OURS], 0, 2, 7, True, "this group ends"),
        ([THEIRS, OURS, OURS], 1, None, 7, False, "another group ends"),
        # Its source, group 2, has the same layout.
        ([THEIRS, OURS, OURS], 1, 2, 7, True, "another group ends"),
        ([OURS, THEIRS], 0, None, 0, True, "another group ends"),  # at step 0 the first group decides
        ([OURS, THEIRS], 1, 0, 0, True, "this group ends"),
        # At step 0, even if the first group heals from another.
        ([OURS, THEIRS], 0, 1, 0, True, "another group ends"),
        ([OURS, THEIRS], 1, None, 0, True, "this group ends"),  # no source at step 0: init_sync=False
        # All groups begin with a checkpoint of step 40.
        ([OURS, THEIRS], 1, None, 40, True, "this group ends"),
    ],
)
def test_which_group_has_to_end(
    groups: list[Optional[list[str]]],
    me: int,
    source: Optional[int],
    max_step: int,
    new_here: bool,
    expected: str,
) -> None:
    assert outcome(plan(groups, me, source, max_step), groups[me], new_here) == expected


def test_a_group_that_announces_nothing_is_not_compared() -> None:
    assert outcome(plan([None, THEIRS], 0), None, new_here=False) == "equal"


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        (THEIRS, r"model: weight float32\[2\] here, model: weight float32\[3\] in group1; allowed"),
        (OURS[:1], "model: bias float32.* here, nothing in group1"),
        (OURS[::-1], "the same, in another order"),
        ([f"line {i}" for i in range(10)], "line 5 and 4 more"),
        (None, "could not be read"),
    ],
)
def test_differences_are_named(theirs: Optional[list[str]], expected: str) -> None:
    with pytest.raises(LayoutDiffers, match="^what is reduced differs: .*" + expected):
        check_layouts(plan([OURS, THEIRS], 0), OURS, new_here=False, read=lambda *_: theirs)


def test_the_lines_are_in_the_store_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_FETCH_TIMEOUT", timedelta(seconds=30))
    pg = ProcessGroupGloo(timeout=timedelta(seconds=10))
    before = pg.get_reconfigure_handle()
    pg.announce_layout(digest(OURS), "\n".join(OURS))
    assert pg.get_reconfigure_handle() == before
    assert read_layout(Handle.decode(before).store, digest(OURS)) == OURS
    pg.shutdown()
    monkeypatch.setattr(layout, "_FETCH_TIMEOUT", SHORT)
    assert read_layout("localhost:1", "x") is None


def differing(me: int) -> Any:
    return quorum(
        quorum_id=5,
        replica_rank=me,
        replica_world_size=2,
        max_world_size=2,
        max_replica_rank=me,
        replica_ids=["group_0", "group_1"],
        reconfigure_handles=[handle(0, OURS), handle(1, THEIRS)],
    )


@pytest.fixture
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the wait for a store that does not exist."""
    monkeypatch.setattr(layout, "_FETCH_TIMEOUT", SHORT)


@pytest.mark.usefixtures("short_timeout")
def test_the_other_group_aborts_the_step_and_does_not_reconfigure(fixture: Fixture) -> None:
    manager = fixture.manager(use_async_quorum=False)
    manager.register_layout("model", [line.removeprefix("model: ") for line in OURS])
    fixture.client._quorum.return_value = differing(0)
    manager.start_quorum()
    assert fixture.pg.reconfigure_count == 0
    error = manager.errored()
    assert error is not None and "in group_1; allowed: the same tensors" in str(error.original_exception)
    assert not manager.should_commit() and fixture.votes() == [False]


@pytest.mark.usefixtures("short_timeout")
def test_start_quorum_raises_in_the_group_that_must_end(fixture: Fixture) -> None:
    manager = fixture.manager(use_async_quorum=False)
    manager.register_layout("model", [line.removeprefix("model: ") for line in THEIRS])
    fixture.client._quorum.return_value = differing(1)
    with pytest.raises(ValueError, match=r"what is reduced differs: .* in group_0; allowed"):
        manager.start_quorum()
    assert fixture.pg.reconfigure_count == 0


@pytest.mark.parametrize("new_here", [True, False])
def test_a_group_without_handles_cannot_be_in_a_job_with_a_loader(new_here: bool) -> None:
    """For example a group with torchft 0.2.0."""
    the_plan = replace(plan([LOADER, None], 0), handles=[], without_handles=["group1"], replica_world_size=2)
    with pytest.raises(
        LayoutDiffers, match="loader differs: 'ElasticDataLoader' here, 'none' in group1"
    ) as error:
        check_layouts(the_plan, LOADER, new_here=new_here, read=lambda *_: None)
    assert error.value.must_end is new_here
    check_layouts(the_plan, OURS, new_here=new_here, read=lambda *_: None)
    old_lighthouse = replace(the_plan, without_handles=["group0", "group1"])  # it passes no handles on
    with pytest.raises(LayoutDiffers, match="'none' in group1"):
        check_layouts(old_lighthouse, LOADER, new_here=new_here, read=lambda *_: None)


def test_differences_between_loaders_are_named() -> None:
    with pytest.raises(LayoutDiffers, match=f"differs: {OTHER_LOADER[0]} here, {LOADER[0]} in group0"):
        check_layouts(plan([LOADER, OTHER_LOADER], 1, 0), OTHER_LOADER, new_here=True, read=lambda *_: LOADER)
    for groups, me, text in [
        ([LOADER, None], 1, "'none' here, 'ElasticDataLoader' in group0"),
        ([None, LOADER], 1, "'ElasticDataLoader' here, 'none' in group0"),
    ]:
        with pytest.raises(LayoutDiffers, match="^the data loader differs: " + text):
            check_layouts(plan(groups, me, 0), groups[me], new_here=True, read=lambda *_: None)


# The parameters that wrappers register


def announced(*models: nn.Module, steps: Optional[list[nn.Parameter]] = None) -> str:
    layout = Layout(lambda digest, lines: None)
    for model in models:
        layout.add_parameters(model.named_parameters())
    if steps is not None:
        layout.add_optimizer(torch.optim.SGD(steps, lr=1.0))
    return layout.for_lighthouse()


def renamed(model: nn.Module) -> nn.Module:
    return nn.Sequential(model)


MODEL = nn.Linear(2, 3)


@pytest.mark.parametrize(
    ("other", "equal"),
    [
        (announced(nn.Linear(2, 3)), True),
        (announced(nn.Linear(2, 3).requires_grad_(False)), True),  # a part may be frozen only later
        (announced(nn.Linear(2, 3), steps=list(nn.Linear(2, 3).parameters())), False),
        (announced(MODEL, steps=list(MODEL.parameters())), True),  # the optimizer adds none
        (announced(nn.Linear(2, 4)), False),
        (announced(nn.Linear(3, 2)), False),  # as many elements
        (announced(nn.Linear(2, 3, bias=False)), False),
        (announced(nn.Linear(2, 3).double()), False),
        (announced(renamed(nn.Linear(2, 3))), False),
        (announced(nn.Linear(2, 3), nn.Linear(2, 3)), False),
    ],
)
def test_the_lighthouse_compares_names_shapes_and_types(other: str, equal: bool) -> None:
    assert (announced(MODEL) == other) is equal
    assert announced(MODEL).startswith("2 tensors of 9 elements, digest ")


def test_order_matters() -> None:
    weight, bias = MODEL.parameters()
    assert announced(steps=[weight, bias]) != announced(steps=[bias, weight])


def test_nothing_is_announced_without_parameters_or_for_a_loader_alone() -> None:
    assert announced() == ""
    loader = Layout(lambda digest, lines: None)
    loader.add("ElasticDataLoader", ["seed=0"])
    assert loader.for_lighthouse() == "" and loader.compared() == LOADER


def test_a_parameter_without_a_shape_yet() -> None:
    assert announced(nn.LazyLinear(3)).startswith("2 tensors, digest ")


def of_ddp(manager: Manager) -> None:
    DistributedDataParallel(manager, nn.Linear(2, 3))


def of_pure_ddp(manager: Manager) -> None:
    PureDistributedDataParallel(manager, nn.Linear(2, 3))


def of_optimizer(manager: Manager) -> None:
    OptimizerWrapper(manager, torch.optim.SGD(nn.Linear(2, 3).parameters(), lr=1.0))


def of_local_sgd(manager: Manager) -> None:
    model = nn.Linear(2, 3)
    LocalSGD(manager, model, torch.optim.SGD(model.parameters(), lr=1.0), sync_every=1)


def of_diloco(manager: Manager) -> None:
    model = nn.Linear(2, 3)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2)]
    DiLoCo(manager, [model], *optimizers, sync_every=1)


@pytest.mark.parametrize("wrap", [of_ddp, of_pure_ddp, of_optimizer, of_local_sgd, of_diloco])
def test_each_wrapper_announces_what_it_knows(fixture: Fixture, wrap: Callable[[Manager], None]) -> None:
    fixture.pg = ProcessGroupGloo(timeout=timedelta(seconds=10))  # type: ignore[assignment]
    fixture.client._quorum.side_effect = RuntimeError("no quorum in this test")
    manager = fixture.manager(use_async_quorum=False)
    wrap(manager)
    with pytest.raises(RuntimeError, match="no quorum in this test"):
        manager.start_quorum()
    assert "tensors" in manager._layout.for_lighthouse()
    lines = manager._layout.compared()
    assert any("weight float32[3, 2]" in line or "[0][0] float32[3, 2]" in line for line in lines or ())
    store = Handle.decode(fixture.pg.get_reconfigure_handle()).store
    assert read_layout(store, dict(manager._layout.announces)[LAYOUT]) == lines
    fixture.pg.shutdown()


def test_a_model_of_a_later_step_changes_nothing(fixture: Fixture) -> None:
    """A group that joins announces what it registered before its first step, so that of a running group
    stays.
    """
    fixture.client._quorum.side_effect = RuntimeError("no quorum in this test")
    manager = fixture.manager(use_async_quorum=False)
    of_ddp(manager)
    with pytest.raises(RuntimeError, match="no quorum in this test"):
        manager.start_quorum()
    before = manager._layout.for_lighthouse(), manager._layout.compared()
    of_ddp(manager)
    of_optimizer(manager)
    assert (manager._layout.for_lighthouse(), manager._layout.compared()) == before


# A refusal of the lighthouse

REFUSAL = (
    "no quorum: member b reduces other tensors than member a, which is in the job: "
    "rank 0 has x, that of a has y"
)
LIST = "; its list is in the store at host:1 under layout/ab12"


@pytest.mark.parametrize(
    ("error", "ours", "rank", "expected"),
    [
        (REFUSAL + LIST, OURS, 0, f"{REFUSAL}: here {OURS[0]}; there {THEIRS[0]}"),
        (REFUSAL + LIST, OURS, 1, REFUSAL),  # this rank may have the same
        (REFUSAL + LIST, None, 0, REFUSAL),
        (REFUSAL, OURS, 0, REFUSAL),  # a native handle has no list
        ("no quorum: world_size of member b is 2", OURS, 0, None),
    ],
)
def test_a_refused_rank_names_what_differs(
    error: str, ours: Optional[list[str]], rank: int, expected: Optional[str]
) -> None:
    def read(address: str, layout: str) -> list[str]:
        assert (address, layout) == ("host:1", "ab12")
        return THEIRS

    found = refused(RuntimeError(error), ours, rank, read)
    assert expected == (None if found is None else str(found))


def test_each_wait_for_a_refused_quorum_raises_the_same_error(fixture: Fixture) -> None:
    fixture.client._quorum.side_effect = RuntimeError(REFUSAL)
    manager = fixture.manager()
    manager.start_quorum()
    for _ in range(2):
        with pytest.raises(ValueError, match="member b reduces other tensors than member a") as error:
            manager.wait_quorum()
        assert str(error.value.__cause__) == REFUSAL
