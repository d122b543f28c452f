"""The fingerprint of a unit's gradient: the same in each group, whether it counts the unit or not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, Optional
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.unit.data.test_loader import Alone, make
from tests.unit.manager.conftest import Fixture
from torchft._agreement import AUDITS, KEEPS, announce
from torchft._manager.checks.audit import Row
from torchft._manager.checks.audits import Audits, CorruptedGradient
from torchft._manager.quorum.plan import Plan
from torchft.data import ElasticDataLoader

OURS = "1/1.0 host"
INDICES = (3, 4, 5, 6, 7)


def plan(rank: Optional[int], *texts: str, **others: Any) -> Plan:
    """The plan of one of several groups, which announce these texts."""
    fields: dict[str, Any] = dict.fromkeys(Plan.__dataclass_fields__)
    fields.update(
        participating_rank=rank,
        participants=len(texts),
        replica_rank=rank,
        replica_world_size=len(texts),
        replica_ids=[f"group_{number}" for number in range(len(texts))],
        handles=[announce('{"id": "a handle"}', ((AUDITS, text),)) for text in texts],
        without_handles=[],
        max_step=0,
        num_up_to_date=len(texts),
        speeds=(),
        skipped=(),
        in_background=True,
    )
    return Plan(**{**fields, **others})


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def audits(rate: float = 1.0) -> Audits:
    return Audits(rate, 0, [], MagicMock())


def attempt(of: Optional[Plan] = None) -> Any:
    """An attempt at a step."""
    return SimpleNamespace(plan=of, inputs=MagicMock())


def measure(
    model: nn.Module,
    loss: Callable[[nn.Module], torch.Tensor],
    discard: bool,
    exact: bool = True,
    audit: Optional[Audits] = None,
) -> Row:
    """The row of a unit in one group."""
    torch.use_deterministic_algorithms(exact)
    audit, text = audit or audits(), "1/1.0 host"
    step = attempt(plan(1, text, text))
    assert audit.begin(step, step.plan, 0, 3)
    with audit.measured((model,), INDICES, discard):
        loss(model).backward()
    torch.use_deterministic_algorithms(True)
    table = audit.table(step, torch.device("cpu"))
    assert table is not None and not table[0].any()
    return Row.of(table[1].tolist())


def data() -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(2))


class Twice(nn.Module):
    """Uses one layer twice, another one never, and has a sparse gradient, a complex one, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.unused, self.norm = nn.Linear(4, 4), nn.Linear(2, 2), nn.BatchNorm1d(4)
        self.table = nn.Embedding(10, 4, sparse=True)
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.large = nn.Parameter(torch.randn(3, 4099))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.layer(self.layer(x))) + self.table(torch.tensor([1, 2, 1, 4, 5])) * self.frozen
        return x.sum(1) + (self.phase * self.phase.conj()).real.sum() + (self.large**2).mean()


def total(model: nn.Module) -> torch.Tensor:
    return model(data()).square().sum()


class Sharded(nn.Linear):
    """As a module of FSDP2: the pass computes with a whole weight, which parameters() does not show."""

    set_requires_gradient_sync = None

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.whole = [nn.Parameter(self.weight.detach().clone())]
        self._shown = [self.weight]
        self.register_forward_pre_hook(lambda *_: self._swap(self.whole[0]), prepend=True)
        self.register_forward_hook(lambda *_: self._swap(self._shown[0]))

    def _swap(self, weight: nn.Parameter) -> None:
        self._parameters["weight"] = weight


def test_gradients_of_whole_parameters_of_fsdp2() -> None:
    torch.manual_seed(1)
    sharded = nn.Sequential(nn.Linear(4, 4), Sharded())
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    plain.load_state_dict(sharded.state_dict(), strict=False)

    def loss(model: nn.Module) -> torch.Tensor:
        # as with activation checkpointing, which repeats the pass
        return sum((model(data()).square().sum() for _ in range(2)), torch.zeros(()))

    expected = measure(plain, loss, discard=False)
    (whole,) = sharded[1].whole
    assert measure(sharded, loss, discard=True) == expected
    assert not whole.grad.any() and not whole._backward_hooks
    assert measure(sharded, loss, discard=False) == expected
    assert torch.equal(whole.grad, plain[1].weight.grad)
    # The gradient of a module that is not called would count.
    with pytest.raises(ValueError, match="Sharded, a module of FSDP2, was not called"):
        measure(sharded, lambda model: model[1].forward(model[0](data())).sum(), discard=True)


def test_a_group_that_counts_the_unit_and_one_that_does_not_have_the_same_row() -> None:
    counts, other = Twice(), Twice()
    total(counts).backward()  # of another unit, before
    other.layer.weight.grad = torch.ones(4, 4)
    before = copy.deepcopy(other.state_dict())
    ours, theirs = measure(counts, total, discard=False), measure(other, total, discard=True)
    assert ours == theirs and ours.kind and ours.bound == 0

    plain = Twice()
    total(plain).backward()
    given = [p.grad for p in plain.parameters() if p.grad is not None]
    gradients = [each.to_dense() if each.is_sparse else each for each in given]
    norm = sum(each.abs().double().square().sum() for each in gradients) ** 0.5
    by_size = measure(Twice(), total, discard=False, exact=False)
    assert by_size == measure(Twice(), total, discard=True, exact=False)
    assert by_size.sizes[0] == pytest.approx(float(norm), rel=1e-6)
    torch.testing.assert_close(counts.layer.weight.grad, 2 * plain.layer.weight.grad)
    assert torch.equal(other.layer.weight.grad, torch.ones(4, 4))
    assert all(p.grad is None for name, p in other.named_parameters() if name != "layer.weight")
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    assert not any(p._backward_hooks for p in other.parameters()) and not other._forward_pre_hooks


@pytest.mark.parametrize("name", ["layer.weight", "norm.bias", "table.weight", "phase", "large"])
def test_a_flipped_bit_of_any_gradient_changes_the_digest(name: str) -> None:
    def corrupt(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.coalesce() if gradient.is_sparse else gradient.clone()
        values = gradient.values() if gradient.is_sparse else gradient
        flat = (torch.view_as_real(values) if values.is_complex() else values).view(-1)
        flat.view(torch.int32)[-1] ^= 1
        return gradient

    wrong = Twice()
    wrong.get_parameter(name).register_hook(corrupt)
    right = measure(Twice(), total, discard=False)
    assert measure(wrong, total, discard=False).digest != right.digest


def test_models_that_do_not_have_all_gradients_are_refused() -> None:
    first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    both = torch.optim.SGD([*first.parameters(), *second.parameters()])
    audit = Audits(0.5, 0, [both], MagicMock())
    for models in ((), (first,)):
        with pytest.raises(ValueError, match=r"audit=0.5: accumulate\(\) did not get all models"):
            audit.check(models)
    audit.check((first, second))
    second.requires_grad_(False)
    audit.check((first,))


def test_the_bound_is_that_of_the_least_precise_dtype() -> None:
    def cast(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(data()).float().sum()

    def bound(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> float:
        return measure(model, loss, discard=False, exact=False).bound

    linear = nn.Linear(4, 2)
    assert bound(linear, total) == pytest.approx(2**-11.5)
    assert bound(linear, cast) == pytest.approx(2**-3.5)
    half = nn.Linear(4, 2).to(torch.bfloat16)
    assert bound(half, lambda model: model(data().bfloat16()).sum()) == pytest.approx(2**-3.5)
    assert measure(linear, total, discard=False).bound == 0


class Average(nn.Linear):
    """Multiplies by a moving average of its inputs."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.register_buffer("average", torch.ones(4))
        self.register_buffer("unset", torch.full((2,), float("nan")))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            assert isinstance(self.average, torch.Tensor)
            self.average.data.lerp_(x.mean(0), 0.1)  # without a trace in its version
        return super().forward(x * self.average)


@pytest.mark.parametrize(
    ("model", "buffer"),
    [
        (Average(), "'1.average' of Average"),
        (Average().eval(), None),
        (nn.BatchNorm1d(4), None),
        (nn.InstanceNorm1d(2, track_running_stats=True), None),
        (
            nn.utils.parametrizations.spectral_norm(nn.Linear(4, 64)),
            "'1.parametrizations.weight.0._u' of _Sp",
        ),
        (nn.utils.spectral_norm(nn.Linear(4, 3)), "'1.weight_u' of Linear"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("rate", [1.0, 1e-9])
def test_a_buffer_that_makes_the_gradients_of_healthy_groups_differ_is_refused(
    rate: float, model: nn.Module, buffer: Optional[str]
) -> None:
    """In an audited unit, and in the first one of all."""
    manager, model = Pair(0), nn.Sequential(nn.Linear(4, 4), copy.deepcopy(model))
    manager._audits = audits(rate)
    before = copy.deepcopy(model.state_dict())
    loader: ElasticDataLoader = make(TensorDataset(torch.randn(8, 4)), manager, reproducible_rng=True)
    unit = next(iter(next(loader)))
    with ExitStack() as stack:
        if buffer is not None:
            match = f"audit={rate:g}: the forward pass of a unit changes the buffer {buffer}"
            stack.enter_context(pytest.raises(ValueError, match=match))
        with unit.accumulate(model):
            model(unit.data[0]).sum().backward()
    assert (
        not unit.audit
        or not model.training
        or all(
            torch.equal(value, before[name]) or value.isnan().any()
            for name, value in model.state_dict().items()
        )
    )


def test_reproducible_sums_do_not_make_kernels_deterministic(fixture: Fixture) -> None:
    audit = fixture.manager(audit=1.0, reproducible_reduction=True)._audits
    assert measure(nn.Linear(4, 2), total, discard=False, exact=False, audit=audit).bound > 0
    assert measure(nn.Linear(4, 2), total, discard=False, exact=True, audit=audit).bound == 0


def test_a_change_of_a_large_gradient_is_in_its_projections() -> None:
    right, wrong = Twice(), Twice()
    wrong.large.register_hook(lambda g: torch.where(torch.arange(g.numel()).view_as(g) == 12000, 50.0, g))
    one, other = (measure(model, total, discard=False, exact=False) for model in (right, wrong))
    assert [abs(a - b) for a, b in zip(one.sizes[1:], other.sizes[1:])] == pytest.approx([50.0] * 4, rel=0.01)


def tables(first: float, second: float, tries: int = 0) -> tuple[Audits, Any]:
    """A group, and its step, in which it sees the gradients of two."""
    audit = audits()
    step = attempt(plan(1, "1/1.0 here", "1/1.0 there"))
    audit.begin(step, step.plan, 0, 3)
    model = nn.Linear(4, 1, bias=False)
    with audit.measured((model,), INDICES, discard=True):
        (model(data()).sum() * second).backward()
    table = audit.table(step, torch.device("cpu"))
    assert table is not None
    mine = Row.of(table[1].tolist())
    table[0] = torch.tensor(mine._replace(digest=mine.digest + (first != second), tries=tries).words)
    work = MagicMock()
    work.wait.return_value = True
    audit.sent(step, table, work)
    return audit, step


def test_what_differs_is_named_with_rank_host_samples_and_digests() -> None:
    audit, step = tables(1.0, 1.0)
    audit.verify(step)
    audit, step = tables(1.0, 2.0)
    with pytest.raises(CorruptedGradient) as e:
        audit.verify(step)
    text = str(e.value)
    assert text.startswith("step 0, samples 3, 4, 5, 6, …: the gradient of group_0 (rank 0 on here, ")
    assert "group_1 (rank 0 on there, " in text and text.endswith("the step is made again (attempt 1 of 3)")
    audit.check_ends()  # it is not known which of them is wrong
    last, step = tables(1.0, 2.0, tries=2)
    last.verify(step)
    (text, groups, certain), reports = last._logger.audit_event.call_args  # type: ignore[attr-defined]
    assert text.endswith("the step is committed (attempt 3 of 3)")
    assert (groups, certain, reports) == (["group_0", "group_1"], False, {"reports": True})


@pytest.mark.parametrize(
    ("texts", "others", "why"),
    [
        ([OURS, OURS], {}, None),
        ([OURS], {}, "one group takes part"),
        ([OURS, ""], {}, "group_1 have another rate or none"),
        (["", ""], {}, "the process group of this group cannot announce the rate to the others"),
        (
            [],
            {"replica_world_size": 1, "replica_ids": ["a"], "without_handles": ["a"]},
            "the process group of this group cannot announce the rate to the others",
        ),
        ([OURS, "1/0.5 b", "2/1.0 c"], {}, "group_1, group_2 have another rate or none"),
        ([OURS, OURS], {"replica_world_size": 3, "without_handles": ["c"]}, "c have another rate or none"),
    ],
)
def test_when_nothing_is_compared(texts: list[str], others: dict[str, Any], why: Optional[str]) -> None:
    audit, step = audits(), attempt()
    for _ in range(2):
        assert audit.begin(step, plan(0, *texts, **others), 7, 3) is (why is None)
    said = audit._logger.warn.call_args_list  # type: ignore[attr-defined]
    assert [call.args[0] for call in said] == (
        [] if why is None else [f"audit=1: gradients are not compared: {why}"]
    )


def test_a_step_of_which_groups_keep_gradients_is_not_audited() -> None:
    kept = announce('{"id": "a handle"}', ((AUDITS, OURS), (KEEPS, "7 1 0.0 1-2")))
    audit, step = audits(), attempt()
    audit.begin(step, plan(0, OURS, OURS), 7, 3)
    assert audit.begin(step, plan(0, OURS, OURS, handles=[kept, kept]), 7, 3) is False
    assert audit.table(step, torch.device("cpu")) is None


class Pair(Alone):
    """The Manager of one of two groups, which audit each step."""

    def __init__(self, rank: int, group_rank: int = 0, group_world_size: int = 1, step: int = 0) -> None:
        super().__init__(group_rank, group_world_size)
        self._rank = rank
        self._number = step
        object.__setattr__(self._settings, "audit", 1.0)
        self._audits = audits()
        self._current = attempt()

    def current_step(self) -> int:
        return self._number

    def _begin_batch(self) -> Plan:
        self._current.plan = plan(self._rank, OURS, OURS)
        return self._current.plan


@pytest.mark.parametrize("num_workers", [0, 1])
def test_both_groups_read_the_unit_with_the_same_random_numbers(num_workers: int) -> None:
    """Dropout, and a dataset that draws random numbers: each has those of the unit."""

    class Noisy:
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> torch.Tensor:
            return index + torch.rand(6)

    rows, number = {}, {}
    for rank in range(2):
        manager = Pair(rank)
        loader: ElasticDataLoader = make(
            Noisy(), manager, global_batch_size=16, reproducible_rng=True, num_workers=num_workers
        )
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))
        torch.manual_seed(rank)
        units = list(next(loader))
        number[rank] = [unit.audit for unit in units]
        assert sum(len(unit.indices) for unit in units if not unit.audit) == 8
        for unit in units:
            with unit.accumulate(model):
                (model(unit.data).square().mean() * unit.weight).backward()
        table = manager._audits.table(manager._current, torch.device("cpu"))
        assert table is not None
        rows[rank] = Row.of(table[rank].tolist())
        loader._stop_reading()
    assert rows[0] == rows[1] and rows[0].digest
    assert sorted(map(sum, number.values())) == [0, 1], "one of them has a unit more"
    assert all(not any(marks[1:]) for marks in number.values()), "and computes it first"


@pytest.mark.parametrize(("units", "audited"), [(1, 0), (3, 1), (4, 1), (9, 1)])
def test_the_ranks_of_a_group_run_as_many_passes(units: int, audited: int) -> None:
    """Also where a data rank of a group has no unit that counts."""
    data = TensorDataset(torch.arange(2 * units))
    settings: dict[str, Any] = dict(global_batch_size=2 * units, reproducible_rng=True)
    for number in range(2):
        marks = [
            [
                [unit.audit for unit in next(make(data, Pair(group, rank, 2, number), **settings))]
                for rank in range(2)
            ]
            for group in range(2)
        ]
        for first, second in marks:
            assert first == second
        assert sum(sum(first) for first, _ in marks) == audited
