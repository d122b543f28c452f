from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Optional

import pytest
import torch

from torchft.data.exact_sum import ExactSum, ScalesDiffer
from torchft.data.position import DataPlan, DataPosition

Gradients = dict[str, Optional[torch.Tensor]]


class Rank:
    """A rank with its own parameters."""

    def __init__(
        self, shapes: dict[str, Sequence[int]], max_units: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.parameters = {
            name: torch.nn.Parameter(torch.zeros(list(shape), dtype=dtype)) for name, shape in shapes.items()
        }
        self.sum = ExactSum(self.parameters.items(), max_units)

    def compute(self, units: Sequence[Gradients]) -> None:
        self.sum.begin()
        for unit in units:
            for name, gradient in unit.items():
                self.parameters[name].grad = None if gradient is None else gradient.clone()
            self.sum.add()

    def gradients(self) -> dict[str, Optional[torch.Tensor]]:
        return {name: parameter.grad for name, parameter in self.parameters.items()}

    @property
    def exponents(self) -> dict[str, int]:
        exponents: dict[str, int] = self.sum.state_dict()["exponents"]
        return exponents


def reduce(ranks: Sequence[Rank]) -> None:
    for buffers in zip(*(rank.sum.buffers for rank in ranks)):
        total = torch.stack(buffers).sum(0)
        for buffer in buffers:
            buffer.copy_(total)


def step(ranks: Sequence[Rank], shares: Sequence[Sequence[Gradients]]) -> int:
    """Commits a step. Returns how many times it was repeated, which must be equal on all ranks."""
    for repeated in range(3):
        for rank, share in zip(ranks, shares):
            rank.compute(share)
        reduce(ranks)
        (complete,) = {rank.sum.read() for rank in ranks}
        assert {rank.sum.units for rank in ranks} == {sum(map(len, shares))}
        if complete:
            for rank in ranks:
                rank.sum.commit()
            return repeated
    raise AssertionError("repeated without end")


def one(*values: float) -> Rank:
    """Returns a rank with a parameter "a" that has committed a step with these gradients, one unit each."""
    rank = Rank({"a": [1]}, max_units=4)
    step([rank], [units(*values)])
    return rank


def units(*values: float, dtype: torch.dtype = torch.float32) -> list[Gradients]:
    return [{"a": torch.tensor([value], dtype=dtype)} for value in values]


def bits(rank: Rank) -> dict[str, Optional[list[int]]]:
    """The gradients as integers, so that zeros and NaN are compared by their bits."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return {
        name: None if gradient is None else gradient.view(kinds[gradient.element_size()]).flatten().tolist()
        for name, gradient in rank.gradients().items()
    }


# Any division among ranks, any order


def some_units(random_: random.Random, generator: torch.Generator, dtype: torch.dtype) -> list[Gradients]:
    """Gradients of all sizes. Some units lack them, and a few are not finite."""
    found: list[Gradients] = []
    size = {
        name: random_.choice([-150, -40, -20, -8, 8, 40]) if random_.random() < 0.1 else 0 for name in "abc"
    }
    for _ in range(random_.randint(1, 9)):
        unit: Gradients = {}
        for name, shape in SHAPES.items():
            gradient = torch.randn(list(shape), generator=generator, dtype=torch.float64).mul_(
                2.0 ** size[name]
            )
            if random_.random() < 0.02:
                gradient.view(-1)[0] = random_.choice([math.inf, -math.inf, math.nan])
            choice = random_.random()
            unit[name] = (
                None if choice < 0.1 else gradient.zero_().to(dtype) if choice < 0.2 else gradient.to(dtype)
            )
        found.append(unit)
    return found


SHAPES: dict[str, Sequence[int]] = {"a": [3, 5], "b": [7], "c": []}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_the_bits_are_those_of_one_process_however_the_units_are_cut(seed: int, dtype: torch.dtype) -> None:
    random_, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    alone, ranks = Rank(SHAPES, 16, dtype), [Rank(SHAPES, 16, dtype) for _ in range(4)]
    repeats, finite = 0, 0
    for _ in range(20):
        batch = some_units(random_, generator, dtype)
        repeated = step([alone], [batch])
        random_.shuffle(batch)
        cuts = sorted(random_.randint(0, len(batch)) for _ in range(3))
        shares = [batch[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(batch)])]
        assert step(ranks, shares) == repeated
        repeats += repeated
        for rank in ranks:
            assert bits(rank) == bits(alone)
            assert rank.sum.state_dict() == alone.sum.state_dict()
        finite += all(g is None or bool(g.isfinite().all()) for g in alone.gradients().values())
    assert 1 <= repeats < 20 and finite >= 5  # there are repeated steps, and steps with finite gradients only


def train(kill: bool) -> list[torch.Tensor]:
    """Trains one process, or three groups: the last group leaves before attempt 5, and attempts 2 and 7
    fail.
    """
    plan = DataPlan(length=48, global_batch_size=12, micro_batch_size=2, epochs=3)
    data = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
    groups = 3 if kill else 1
    models = []
    for _ in range(groups):
        torch.manual_seed(0)
        models.append(torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2)))
    sums = [ExactSum(model.named_parameters(), max_units=6) for model in models]
    position, number = DataPosition(), 0
    while position != plan.end:
        number += 1
        if kill and number == 5:
            groups = 2
        for rank in range(groups):
            sums[rank].begin()
            for unit in plan.share(position, rank, groups).units:
                samples = data[list(unit.indices)]
                (models[rank](samples).square().mean() * unit.weight).backward()
                sums[rank].add(counted=unit.weight > 0)
        total = torch.stack([sums[rank].buffers[0] for rank in range(groups)]).sum(0)
        if kill and number in (2, 7):  # the last group does not get the sum; the others learn that later
            for rank in range(groups - 1):
                sums[rank].buffers[0].copy_(total)
                sums[rank].read()
            for rank in range(groups):
                sums[rank].abandon()
            continue
        for rank in range(groups):
            sums[rank].buffers[0].copy_(total)
        complete = [sums[rank].read() for rank in range(groups)]
        assert {sums[rank].units for rank in range(groups)} == {plan.num_units(position)}
        if all(complete):
            for rank in range(groups):
                with torch.no_grad():
                    for parameter in models[rank].parameters():
                        assert parameter.grad is not None
                        parameter -= 0.1 * parameter.grad
                sums[rank].commit()
            position = plan.advance(position)
    return [parameter.detach() for parameter in models[0].parameters()]


def test_weights_are_those_of_one_process_with_any_failures() -> None:
    torch.manual_seed(0)
    for ours, alone, start in zip(train(kill=True), train(kill=False), torch.nn.Linear(6, 9).parameters()):
        assert torch.equal(ours, alone)
        assert not torch.equal(ours, start)


# Error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("max_units", [8, 255, 2**20])
@pytest.mark.parametrize("shrinks", [0, 7, 15])
def test_the_error_is_within_the_documented_bound(dtype: torch.dtype, max_units: int, shrinks: int) -> None:
    """Compared with exact fractions: in a first step, and after gradients have decreased without a repeated
    step.
    """
    rank, generator = Rank({"a": [200]}, max_units, dtype), torch.Generator().manual_seed(0)
    numbers = [torch.randn(200, generator=generator).mul_(3.0).to(dtype) for _ in range(8)]
    step([rank], [[{"a": each} for each in numbers]])
    if shrinks:
        numbers = [each * 2.0**-shrinks for each in numbers]
        assert step([rank], [[{"a": each} for each in numbers]]) == 0
    result = rank.gradients()["a"]
    assert result is not None
    exact = [sum(map(Fraction, column)) for column in zip(*(each.tolist() for each in numbers))]
    largest = Fraction(max(float(each.abs().max()) for each in numbers))
    lost = Fraction(2) ** ((31 if shrinks else 15) - (63 - max_units.bit_length()))
    rounding = Fraction(torch.finfo(dtype).eps)
    for ours, expected in zip(result.tolist(), exact):
        assert abs(Fraction(ours) - expected) <= len(numbers) * largest * lost + abs(expected) * rounding
    # More precise than the bound: nothing is lost.
    if dtype == torch.float32 and not shrinks and max_units == 8:
        assert result.tolist() == [float(torch.tensor(float(each))) for each in exact]


def test_float64_has_less_than_its_precision() -> None:
    alone = Rank({"a": [1]}, 255, torch.float64)
    step([alone], [units(1.0, 2.0**-50, dtype=torch.float64)])
    assert alone.gradients()["a"] == torch.tensor([1.0])
    step([alone], [units(1.0, 2.0**-40, dtype=torch.float64)])
    assert alone.gradients()["a"] == torch.tensor([1.0 + 2.0**-40])


def test_the_last_bit_is_rounded_to_the_nearest_and_to_even() -> None:
    rank, last = Rank({"a": [6]}, max_units=2**20), 2.0 ** (16 - 42)
    step(
        [rank], [[{"a": torch.tensor([1.0, 0.75 * last, -0.75 * last, 0.5 * last, 1.5 * last, 0.25 * last])}]]
    )
    result = rank.gradients()["a"]
    assert result is not None
    assert result.tolist() == [1.0, last, -last, 0.0, 2 * last, 0.0]


@pytest.mark.parametrize("max_units", [1, 3, 4, 255, 256])
@pytest.mark.parametrize("sign", [1, -1])
def test_as_many_units_as_allowed_fit_at_their_largest(max_units: int, sign: int) -> None:
    rank = Rank({"a": [1]}, max_units, torch.float64)
    step([rank], [units(1.0, dtype=torch.float64)])
    assert rank.exponents == {"a": 16}
    largest = math.nextafter(2.0**16, 0)  # just fits at 2**16
    assert step([rank], [units(*[sign * largest] * max_units, dtype=torch.float64)]) == 0
    result = rank.gradients()["a"]
    assert result is not None
    assert result.item() == pytest.approx(sign * max_units * largest, rel=2.0**-50)


# Scales


@pytest.mark.parametrize(
    ("before", "after", "repeats", "exponent"),
    [
        ([1.0], [1.0], 0, 16),
        ([1.0], [0.5, -1.0, 0.25], 0, 16),
        ([1.0], [255.5], 0, 16),
        ([1.0], [-256.0], 0, 24),
        ([1.0], [2.0**16 - 2.0**-8], 0, 24),  # the largest that fits
        ([1.0], [2.0**15], 0, 24),
        ([1.0], [0.5, -(2.0**16)], 1, 32),
        ([1.0], [2.0**60], 1, 72),
        ([1.0], [2.0**127], 1, 136),
        ([255.0], [1.0], 0, 16),
        ([1.0], [0.5], 0, 8),
        ([1.0], [0.25], 0, 8),
        ([1.0], [2.0**-8], 0, 8),
        ([1.0], [2.0**-10], 0, 8),  # needs two exponents less, and a step lowers the scale by one
        ([1.0], [2.0**-16], 0, 8),
        ([1.0], [2.0**-17], 1, -8),
        ([1.0], [2.0**-149], 1, -128),
        ([1.0], [0.0, 0.0], 0, 16),  # carries no information
        ([0.0], [0.0], 0, -128),
        ([0.0], [2.0**-130], 0, -120),
        ([0.0], [2.0**-136], 0, -120),
        ([0.0], [2.0**-137], 0, -128),
        ([0.0], [1.0], 1, 16),
    ],
)
def test_scales_follow_the_gradients(
    before: list[float], after: list[float], repeats: int, exponent: int
) -> None:
    rank = one(*before)
    assert step([rank], [units(*after)]) == repeats
    assert rank.exponents == {"a": exponent}
    result = rank.gradients()["a"]
    assert result is not None
    assert result.item() == sum(after)


@pytest.mark.parametrize("bits_a_step", [8, -8])
@pytest.mark.parametrize("first", [1.0, 2.0**-15, 255.0])
def test_a_gradient_that_changes_steadily_repeats_no_step(bits_a_step: int, first: float) -> None:
    rank = one(first)
    assert [step([rank], [units(first * 2.0 ** (bits_a_step * number))]) for number in range(1, 12)] == [
        0
    ] * 11


def test_a_first_step_is_repeated_once_and_finds_the_scales_of_all() -> None:
    rank = Rank({"a": [2], "b": [3], "c": [1]}, max_units=2)
    unit: Gradients = {"a": torch.tensor([1.0, 2.0**-30]), "b": torch.full([3], 2.0**-60), "c": None}
    assert rank.exponents == {"a": -128, "b": -128, "c": -128}
    assert step([rank], [[unit]]) == 1
    assert rank.exponents == {"a": 16, "b": -48, "c": -128}
    assert rank.gradients()["a"] is not None and torch.equal(rank.gradients()["a"], unit["a"])  # type: ignore
    assert step([rank], [[unit]]) == 0


def test_a_unit_that_does_not_fit_on_one_rank_is_noticed_by_all() -> None:
    ranks = [one(1.0) for _ in range(3)]
    for rank, share in zip(ranks, [units(1.0), units(2.0**40), []]):
        rank.compute(share)
    reduce(ranks)
    assert [rank.sum.read() for rank in ranks] == [False] * 3
    assert {rank.exponents["a"] for rank in ranks} == {16}  # nothing is committed
    assert step(ranks, [units(1.0), units(2.0**40), []]) == 0


def test_a_repetition_that_fails_begins_as_the_first_attempt_did() -> None:
    rank = one(1.0)
    rank.compute(units(2.0**40))
    assert not rank.sum.read()
    rank.sum.abandon()
    assert step([rank], [units(2.0**40)]) == 1


def test_a_rank_that_has_not_abandoned_an_attempt_is_noticed_by_all() -> None:
    ranks = [one(1.0), one(1.0)]
    ranks[0].compute(units(2.0**40))
    assert not ranks[0].sum.read()
    for rank in ranks:
        rank.compute(units(1.0))
    reduce(ranks)
    for rank in ranks:
        with pytest.raises(ScalesDiffer, match=r"1 parameters .* first a: "):
            rank.sum.read()
        rank.sum.abandon()
    assert step(ranks, [units(1.0), units(1.0)]) == 0


@pytest.mark.parametrize("reads_before_it_loads", [True, False])
def test_a_rank_that_heals_gets_the_gradients_and_the_scales_of_the_others(
    reads_before_it_loads: bool,
) -> None:
    """The state may arrive during the step: the healing rank adds nothing, and the sum contains all that it
    needs.
    """
    others, healing = [one(2.0**20), one(2.0**20)], Rank({"a": [1]}, max_units=4)
    state = others[0].sum.state_dict()
    if not reads_before_it_loads:
        healing.sum.load_state_dict(state)
    ranks = [*others, healing]
    for repeated in (True, False):
        for rank, share in zip(ranks, [units(2.0**50), units(1.0), []]):
            rank.compute(share)
        reduce(ranks)
        assert {rank.sum.read() for rank in ranks} == {not repeated}
    if reads_before_it_loads:
        healing.sum.load_state_dict(state)
    for rank in ranks:
        rank.sum.commit()
    assert bits(healing) == bits(others[0])
    assert healing.sum.state_dict() == others[0].sum.state_dict() != state


# Missing gradients, and gradients that are not finite


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_tensor_that_is_not_finite_on_one_rank_is_nan_on_all(value: float) -> None:
    ranks = [Rank({"a": [2], "b": [2]}, max_units=4) for _ in range(3)]
    unit: Gradients = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([1.0, 2.0])}
    bad: Gradients = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([1.0, value])}
    step(ranks, [[unit], [unit], [unit]])
    assert step(ranks, [[unit], [unit, bad], []]) == 0
    for rank in ranks:
        assert bits(rank) == bits(ranks[0])
        result = rank.gradients()
        assert result["a"] is not None and result["a"].tolist() == [3.0, 6.0]
        assert result["b"] is not None and bool(result["b"].isnan().all())
        assert rank.exponents == {"a": 16, "b": 16}
    assert step(ranks, [[unit], [unit], [unit]]) == 0


def test_nothing_is_repeated_for_a_tensor_that_is_nan() -> None:
    rank = one(1.0)
    assert step([rank], [units(math.nan, 2.0**60)]) == 0
    assert step([rank], [units(math.nan)]) == 0
    result = rank.gradients()["a"]
    assert result is not None and result.isnan().all()


def test_a_gradient_that_no_unit_has_is_none_and_zero_where_some_have_it() -> None:
    ranks = [Rank({"a": [2], "b": [2], "c": [2]}, max_units=4) for _ in range(2)]
    zeros = torch.zeros(2)
    first: Gradients = {"a": None, "b": None, "c": zeros}
    second: Gradients = {"a": None, "b": torch.ones(2), "c": None}
    step(ranks, [[first, second], []])
    for rank in ranks:
        result = rank.gradients()
        assert result["a"] is None
        assert result["b"] is not None and result["b"].tolist() == [1.0, 1.0]
        assert result["c"] is not None and result["c"].tolist() == [0.0, 0.0]


def test_a_unit_that_another_rank_counts_leaves_nothing() -> None:
    rank = one(1.0)
    rank.sum.begin()
    rank.parameters["a"].grad = torch.tensor([math.nan])
    rank.sum.add(counted=False)
    rank.parameters["a"].grad = torch.tensor([3.0])
    rank.sum.add()
    assert rank.parameters["a"].grad is None
    assert rank.sum.read()
    assert rank.parameters["a"].grad is not None and rank.parameters["a"].grad.tolist() == [3.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_gradient_that_is_referenced_elsewhere_is_not_changed(dtype: torch.dtype) -> None:
    rank, held = Rank({"a": [1]}, 4, dtype), torch.tensor([3.0], dtype=dtype)
    rank.sum.begin()
    rank.parameters["a"].grad = held
    rank.sum.add()
    assert held.tolist() == [3.0]


def test_gradients_of_the_last_step_are_no_part_of_the_next() -> None:
    rank = one(1.0)
    rank.sum.begin()
    assert rank.parameters["a"].grad is None


# Shapes


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(6, 4).t(),
        lambda: torch.randn(0, 3),
        lambda: torch.randn(()),
        lambda: torch.randn(2**17 + 3),  # more than one piece
        lambda: torch.randn(2**9 + 1, 2**9).t(),
    ],
    ids=["channels_last", "transposed", "empty", "scalar", "pieces", "transposed pieces"],
)
def test_any_shape_and_layout(make: Callable[[], torch.Tensor]) -> None:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(make())
    gradient = make()
    total = ExactSum([("a", parameter)], max_units=2)
    for complete in (False, True) if gradient.numel() else (True,):
        total.begin()
        for each in (gradient, gradient.contiguous()):
            parameter.grad = each.clone()
            total.add()
        assert total.read() == complete
    assert parameter.grad is not None
    torch.testing.assert_close(parameter.grad, 2 * gradient, rtol=0, atol=2.0**-30)
    assert parameter.grad.stride() == torch.empty_like(parameter).stride()


def test_parameters_that_need_no_gradient_are_not_changed() -> None:
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    total = ExactSum(model.named_parameters(), max_units=1)
    assert list(total.state_dict()["exponents"]) == ["weight"]
    total.begin()
    model.bias.requires_grad_(True)
    with pytest.raises(RuntimeError, match="requires_grad has changed of bias since"):
        total.begin()


# Misuse


@pytest.mark.parametrize("max_units", [0, -1, 2**20 + 1, 1.5, True])
def test_a_number_of_units_that_is_out_of_range(max_units: int) -> None:
    with pytest.raises(ValueError, match=r"max_units is .*: allowed are whole numbers from 1 to 2\*\*20"):
        Rank({"a": [1]}, max_units)


@pytest.mark.parametrize("then", [ExactSum.begin, ExactSum.abandon])
def test_a_commit_without_gradients(then: Callable[[ExactSum], None]) -> None:
    rank = one(1.0)
    rank.compute(units(1.0))
    assert rank.sum.read()
    then(rank.sum)
    with pytest.raises(RuntimeError, match=r"commit\(\) without gradients"):
        rank.sum.commit()


def test_a_unit_after_the_sum() -> None:
    rank = one(1.0)
    with pytest.raises(RuntimeError, match=r"add\(\) after read\(\): begin\(\) comes first"):
        rank.sum.add()


def test_parameters_that_cannot_be_summed() -> None:
    with pytest.raises(TypeError, match=r"parameter a is of torch.complex64: allowed are torch.float16, "):
        Rank({"a": [1]}, 1, torch.complex64)
    with pytest.raises(ValueError, match="none that requires a gradient"):
        ExactSum([], 1)
    embedding = torch.nn.Embedding(3, 2, sparse=True)
    total = ExactSum(embedding.named_parameters(), 1)
    total.begin()
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(
        TypeError, match=r"the gradient of weight is of torch\.sparse_coo: allowed are dense ones"
    ):
        total.add()


# State


def test_state_is_the_committed_scales() -> None:
    rank, other = one(1.0), Rank({"a": [1]}, max_units=255)
    assert rank.sum.state_dict() == {"format": 1, "exponents": {"a": 16}}
    other.sum.load_state_dict(rank.sum.state_dict())
    assert step([other], [units(1.0)]) == 0


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "format None: this version reads 1"),
        ({"format": 2}, "format 2: this version reads 1"),
        ({"format": 1, "exponents": {"b": 0}}, r"missing are \['a'\], unknown are \['b'\]"),
        (
            {"format": 1, "exponents": {"a": 3}},
            "the exponent of a is 3: allowed are -128 to 136 in steps of 8",
        ),
        (
            {"format": 1, "exponents": {"a": 144}},
            "the exponent of a is 144: allowed are -128 to 136 in steps of 8",
        ),
    ],
)
def test_state_of_another_model(state: dict[str, object], message: str) -> None:
    rank = one(1.0)
    with pytest.raises(ValueError, match=message):
        rank.sum.load_state_dict(state)
    assert rank.exponents == {"a": 16}
