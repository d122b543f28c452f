"""The effects of a synchronization on a fragment, the values that it sends, and the state for a healing
peer.
"""

from __future__ import annotations

import copy
import logging
from typing import Any, Iterator, Optional

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from tests.unit.local_sgd.one_group import OneGroup
from torchft.local_sgd import DiLoCo, LocalSGD, extract_local_tensor


def numbers(*values: float) -> nn.ParameterList:
    """A model with one parameter for each value."""
    return nn.ParameterList([nn.Parameter(torch.full((2,), float(value))) for value in values])


def step(model: nn.Module, inner: torch.optim.Optimizer, gradient: float = 1.0) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, gradient) if p.requires_grad else None
    inner.step()


def values(model: nn.Module) -> list[float]:
    return [round(p.detach().flatten()[0].item(), 5) for p in model.parameters()]


def outer_sgd(model: nn.Module, **settings: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.5, "momentum": 0.0, **settings})


def test_one_outer_optimizer_for_several_fragments_steps_only_the_one_that_is_due() -> None:
    """The gradients of the other fragments belong to the inner step."""
    model = numbers(1, 2)
    fragments = [nn.ParameterList([p]) for p in model.parameters()]
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(OneGroup(), fragments, inner, outer_sgd(model), sync_every=2):  # type: ignore[arg-type]
        step(model, inner)
        assert values(model) == [0.95, 1.9]
        assert model[1].grad is not None and model[1].grad[0] == 1
        step(model, inner)
        assert values(model) == [0.85, 1.9]  # 2 - 0.5 * (2 - 1.8)


@pytest.mark.parametrize(("alpha", "expected"), [(0.0, 0.95), (0.25, 0.9375), (1.0, 0.9)])
def test_alpha_is_the_share_of_ones_own(alpha: float, expected: float) -> None:
    model = numbers(1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = OneGroup()
    settings: Any = dict(sync_every=1, fragment_update_alpha=alpha)
    with DiLoCo(manager, [model], inner, outer_sgd(model), **settings) as diloco:  # type: ignore[arg-type]
        step(model, inner)
        assert values(model) == [expected]
        (_, read) = manager.state_fns["StreamingDiLoCoFragment_0"]
        assert read()["original_parameters"]["0"].tolist() == [torch.tensor(0.95)] * 2  # with any alpha
        diloco.restore_global_parameters()
        assert values(model) == [0.95]


def test_frozen_parameters_are_sent_and_unchanged() -> None:
    """Upstream sends frozen parameters, so torchft does, too. The outer step's weight decay does not apply to
    them.
    """
    model = numbers(1, 2)
    model[1].requires_grad_(False)
    inner = torch.optim.SGD([model[0]], lr=0.1)
    manager = OneGroup()
    with DiLoCo(manager, [model], inner, outer_sgd(model, weight_decay=0.1), sync_every=1):  # type: ignore[arg-type]
        step(model, inner)
    assert manager.taken() == ["quorum", ("allreduce", (2,), False), ("allreduce", (2,), False), "vote"]
    assert values(model) == [0.9, 2.0]


def test_an_outer_step_that_raises_leaves_the_last_global_parameters() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            raise MemoryError("outer step")

    model = numbers(1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = Failing(model.parameters(), lr=0.5)
    diloco = DiLoCo(OneGroup(), [model], inner, outer, sync_every=1, fragment_update_alpha=0.5)  # type: ignore[arg-type]
    with diloco, pytest.raises(MemoryError):
        step(model, inner)
    assert values(model) == [1.0] and model[0].grad is None


def test_a_gradient_that_the_caller_keeps_is_not_written_to() -> None:
    model = numbers(1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = torch.full((2,), 3.0)
    with DiLoCo(OneGroup(), [model], inner, outer_sgd(model), sync_every=1):  # type: ignore[arg-type]
        model[0].grad = kept
        inner.step()
    assert kept.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("bucketed", [False, True])
def test_the_values_that_are_sent(bucketed: bool) -> None:
    model = nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = OneGroup()
    settings: Any = dict(sync_every=1, should_quantize=True, use_bucketization=bucketed)
    with DiLoCo(manager, [model], inner, outer_sgd(model), **settings):  # type: ignore[arg-type]
        step(model, inner)
    expected = (
        [("allreduce", (8,), True)] if bucketed else [("allreduce", (2, 3), True), ("allreduce", (2,), True)]
    )
    assert manager.taken() == ["quorum", *expected, "vote"]


# Healing


def trained(**settings: Any) -> tuple[OneGroup, nn.Module, torch.optim.Optimizer, DiLoCo]:
    model = numbers(1, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = OneGroup()
    outer = outer_sgd(model, momentum=0.9, nesterov=True)
    return manager, model, inner, DiLoCo(manager, [model], inner, outer, sync_every=1)  # type: ignore[arg-type]


def test_a_fragment_takes_over_global_parameters_and_outer_momentum() -> None:
    source, model, inner, diloco = trained()
    with diloco:
        step(model, inner)
        step(model, inner)
        sent = copy.deepcopy(source.state_fns["StreamingDiLoCoFragment_0"][1]())
        assert sent.keys() == {"outer_optimizer", "original_parameters"}
        target, other, other_inner, other_diloco = trained()
        other.load_state_dict(model.state_dict())  # the part of the state that the script transfers
        target.state_fns["StreamingDiLoCoFragment_0"][0](sent)
        with other_diloco:
            step(model, inner)
            step(other, other_inner)
    assert values(model) == values(other)


def test_a_job_resumes_from_a_checkpoint_of_its_script() -> None:
    """The checkpoint has the global parameters and both optimizers, which are loaded before DiLoCo is
    made.
    """

    def train(steps: int, saved: Optional[dict[str, Any]]) -> dict[str, Any]:
        model = numbers(1, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        outer = outer_sgd(model, momentum=0.9, nesterov=True)
        parts: dict[str, Any] = {"model": model, "inner": inner, "outer": outer}
        for name, state in (saved or {}).items():
            parts[name].load_state_dict(state)
        with DiLoCo(OneGroup(), [model], inner, outer, sync_every=2) as diloco:  # type: ignore[arg-type]
            for _ in range(steps):
                step(model, inner)
            diloco.restore_global_parameters()
        return {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}

    def values_of(saved: dict[str, Any]) -> list[float]:
        return [value[0].item() for value in saved["model"].values()]

    halfway = train(4, None)
    assert values_of(train(4, halfway)) == values_of(train(8, None))
    del halfway["outer"]
    assert values_of(train(4, halfway)) != values_of(train(8, None))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("1"), r"it lacks \['1'\]|here.*lacks"),
        (lambda p: p.update(new=torch.ones(2)), r"it also has \['new'\]"),
        (lambda p: p.update({"0": torch.ones(3)}), r"'0' is float32\[2\] here and float32\[3\] there"),
        (
            lambda p: p.update({"0": torch.ones(2).double()}),
            r"'0' is float32\[2\] here and float64\[2\] there",
        ),
    ],
)
def test_another_model_is_refused_before_anything_is_sent(change: Any, message: str) -> None:
    manager, model, inner, diloco = trained()
    load, read = manager.state_fns["StreamingDiLoCoFragment_0"]
    state = copy.deepcopy(read())
    change(state["original_parameters"])

    def heal() -> None:
        with pytest.raises(ValueError, match=message):  # the Manager keeps the error and continues
            load(state)

    manager.on_quorum = heal
    with (
        diloco,
        pytest.raises(ValueError, match=r"model_fragments\[0\] differs from that of the group to heal from"),
    ):
        step(model, inner)
    assert manager.taken() == ["quorum"]
    assert isinstance(manager.reported, ValueError)
    assert values(numbers(1, 2)) == [round(t[0].item(), 5) for t in read()["original_parameters"].values()]

    # After a later heal from a group with the same model there is no error.
    state = copy.deepcopy(trained()[0].state_fns["StreamingDiLoCoFragment_0"][1]())
    manager.on_quorum = lambda: load(state)
    with diloco:
        step(model, inner)
    assert manager.taken()[-1] == "vote"


# NaN and Inf


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("ours", [True, False])
def test_nan_and_inf_are_counted_and_logged(bad: float, ours: bool, caplog: pytest.LogCaptureFixture) -> None:
    """As in upstream, NaN and Inf are averaged like other values, so all groups get them."""
    model = numbers(1, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)

    def peer(tensor: torch.Tensor) -> None:
        if not ours and torch.isfinite(tensor).all():
            tensor[1] = bad

    manager = OneGroup(peers=peer)
    with DiLoCo(manager, [model], inner, outer_sgd(model), sync_every=1) as diloco:  # type: ignore[arg-type]
        if ours:
            step(model, inner, gradient=bad)
        else:
            step(model, inner)
        assert diloco.nonfinite_syncs == manager.nonfinite == 1
        assert not torch.isfinite(model[0]).all()
        assert f"what this group sent was {'not' if ours else 'finite'}" in caplog.text


def test_healthy_averages_are_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for build in (
        lambda manager, model, inner: DiLoCo(manager, [model], inner, outer_sgd(model), sync_every=1),
        lambda manager, model, inner: LocalSGD(manager, model, inner, sync_every=1),
    ):
        model = numbers(1e30, 0)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        manager = OneGroup()
        with build(manager, model, inner) as algorithm:
            step(model, inner)
            assert algorithm.nonfinite_syncs == manager.nonfinite == 0
            step(model, inner, gradient=float("inf"))
            assert algorithm.nonfinite_syncs == manager.nonfinite == 1
    assert len(caplog.records) == 2


def test_a_lost_sync_is_not_counted() -> None:
    model = numbers(1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = OneGroup(committed=lambda vote: False)
    with DiLoCo(manager, [model], inner, outer_sgd(model), sync_every=1) as diloco:  # type: ignore[arg-type]
        step(model, inner, gradient=float("nan"))
        assert diloco.nonfinite_syncs == manager.nonfinite == 0
    assert values(model) == [1.0]  # the global parameters replace the NaN values


# DTensor


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("bucketed", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_sharded_parameters(mesh: Any, bucketed: bool, alpha: float) -> None:
    """A model of DTensors gets the same values as the same model of plain tensors."""

    def build(sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer, DiLoCo, OneGroup]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        if sharded:
            model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
            model.bias = nn.Parameter(distribute_tensor(model.bias.detach(), mesh, [Replicate()]))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = outer_sgd(model, momentum=0.9, nesterov=True)
        manager = OneGroup(peers=lambda t: t.add_(0.01))
        settings: Any = dict(sync_every=2, use_bucketization=bucketed, fragment_sync_delay=1)
        diloco = DiLoCo(manager, [model], inner, outer, fragment_update_alpha=alpha, **settings)  # type: ignore[arg-type]
        return model, inner, diloco, manager

    def run(
        model: nn.Module, inner: torch.optim.Optimizer, diloco: DiLoCo, manager: OneGroup
    ) -> list[torch.Tensor]:
        with diloco:
            for i in range(6):
                step(model, inner, gradient=1.0 + i)
        (_, read) = manager.state_fns["StreamingDiLoCoFragment_0"]
        assert not any(isinstance(t, DTensor) for t in read()["original_parameters"].values())
        return [extract_local_tensor(p) for p in model.parameters()]

    for sharded, plain in zip(run(*build(True)), run(*build(False))):
        assert torch.equal(sharded, plain)


def test_local_sgd_of_sharded_parameters(mesh: Any) -> None:
    ends = []
    for sharded in (True, False):
        model = nn.ParameterList([nn.Parameter(torch.arange(6.0).reshape(3, 2))])
        if sharded:
            model[0] = nn.Parameter(distribute_tensor(model[0].detach(), mesh, [Shard(0)]))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with LocalSGD(OneGroup(peers=lambda t: t.add_(0.5)), model, inner, sync_every=2):  # type: ignore[arg-type]
            for i in range(4):
                step(model, inner, gradient=1.0 + i)
        ends.append(extract_local_tensor(model[0]))
    assert torch.equal(*ends)
    torch.testing.assert_close(ends[0], torch.arange(6.0).reshape(3, 2) - 0.1 * (1 + 2 + 3 + 4) + 2 * 0.5)


def test_extract_local_tensor_is_a_copy(mesh: Any) -> None:
    whole = torch.arange(6.0).reshape(3, 2)
    for tensor in (nn.Parameter(whole), distribute_tensor(whole, mesh, [Shard(0)])):
        local = extract_local_tensor(tensor)
        assert not isinstance(local, DTensor) and not local.requires_grad and torch.equal(local, whole)
        local.fill_(0)
        assert torch.equal(extract_local_tensor(tensor), whole)
