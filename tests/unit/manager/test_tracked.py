"""Optimizer steps of single pieces of parameters: the result has the same bits as steps of whole
parameters.
"""

from __future__ import annotations

import json
from typing import Any, Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.optim import optimizer as all_optimizers

from tests.unit.resident import needs_proc, resident
from torchft._manager.heal.tracked import ELEMENTWISE, Parameters, Unsupported
from torchft.checkpointing.codec.layout import local_part

FORMS: list[dict[str, bool]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]
OPTIMIZERS: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "maximize": True}),
    (optim.Adam, {"lr": 0.1}),
    (optim.Adam, {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1}),
    (optim.AdamW, {"lr": 0.1}),
    (optim.AdamW, {"lr": 0.1, "amsgrad": True}),
    (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    (optim.RMSprop, {"lr": 0.1}),
    (optim.RMSprop, {"lr": 0.1, "momentum": 0.9, "centered": True}),
]


def _cases() -> list[Any]:
    cases = []
    for kind, settings in OPTIMIZERS:
        for form in FORMS:
            if "fused" in form and kind is optim.RMSprop:
                continue  # RMSprop has no fused form
            marked = "-".join(
                [kind.__name__, *(k for k in settings if k != "lr"), *(f"{k}{v:d}" for k, v in form.items())]
            )
            cases.append(pytest.param(kind, {**settings, **form}, id=marked))
    return cases


def _model() -> nn.Module:
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    return nn.Sequential(conv, nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(1, 1, bias=False))


def _gradients(of: nn.Module, step: int, from_the_first: bool = False) -> None:
    generator = torch.Generator().manual_seed(step)
    for number, parameter in enumerate(of.parameters()):
        gradient = torch.randn(parameter.shape, generator=generator)
        # one parameter has no gradient at first, another one now and then
        late = number == 1 and step < 4 and not from_the_first
        absent = late or (number == 2 and step % 3 == 1)
        parameter.grad = None if absent else torch.empty_like(parameter).copy_(gradient)


@pytest.mark.parametrize(("kind", "settings"), _cases())
def test_parts_healed_one_by_one_end_equal(
    kind: Callable[..., optim.Optimizer], settings: dict[str, Any]
) -> None:
    torch.manual_seed(1)
    source, target = _model(), _model()
    optimizers = kind(source.parameters(), **settings), kind(target.parameters(), **settings)
    # PyTorch's fused SGD fails if only some of the parameters have a momentum buffer.
    at_once = kind is optim.SGD and "fused" in settings
    theirs, ours = Parameters([optimizers[0]]), Parameters([optimizers[1]])
    for parameters in (theirs, ours):
        parameters.check()
    assert theirs.layout == ours.layout
    for step in range(3):
        _gradients(source, step, at_once)
        optimizers[0].step()
    for step, begin in enumerate(range(0, ours.total, 6), start=3):
        part = begin, min(begin + 6, ours.total)
        states, memory = theirs.read(*part)
        ours.write(*part, json.loads(json.dumps(states)), memory)
        optimizers[0].param_groups[0]["lr"] = 0.1 / step
        sent = json.loads(json.dumps(theirs.hyperparameters()))
        _gradients(source, step, at_once)
        _gradients(target, step, at_once)
        own = [p.grad for p in target.parameters()]
        ours.step(part[1], sent)
        assert all(a is b for a, b in zip(own, (p.grad for p in target.parameters())))
        assert optimizers[1].param_groups[0]["lr"] == settings["lr"], (
            "else it would count as set by the script"
        )
        optimizers[0].step()
        assert theirs.digest(0, part[1]) == ours.digest(0, part[1])
    for one, other in zip(source.parameters(), target.parameters()):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
        mine, its = optimizers[1].state.get(other, {}), optimizers[0].state.get(one, {})
        assert mine.keys() == its.keys()
        for key, value in its.items():
            assert torch.equal(value, mine[key]) if isinstance(value, torch.Tensor) else value == mine[key], (
                key
            )
    assert {kind for kind, _ in OPTIMIZERS} == set(ELEMENTWISE)


def _first_of_64_mb() -> tuple[nn.Parameter, dict[str, torch.Tensor], Any, torch.Tensor]:
    """A parameter of the target, the source's optimizer state of its own, and the source's first part: its
    description and memory.
    """
    source, target = (nn.Parameter(torch.ones(1 << 24)) for _ in range(2))
    trained = optim.Adam([source])
    source.grad = torch.ones_like(source)
    trained.step()
    states, memory = Parameters([trained]).read(0, 1 << 18)
    return target, trained.state[source], states, memory


@needs_proc
def test_a_part_uses_no_memory_for_the_rest_of_its_parameter() -> None:
    """The first use of much memory takes long, and the other groups wait for the thread that places a
    part.
    """
    target, theirs, states, memory = _first_of_64_mb()
    adam = optim.Adam([target])
    before = resident()
    Parameters([adam]).write(0, 1 << 18, states, memory)
    assert resident() - before < 32 << 20, "of 128 MB"
    assert torch.equal(adam.state[target]["exp_avg"][: 1 << 18], theirs["exp_avg"][: 1 << 18])
    assert not adam.state[target]["exp_avg"][1 << 18 :].any()


@pytest.mark.parametrize(("kind", "settings"), _cases())
def test_what_is_prepared_changes_nothing(
    kind: Callable[..., optim.Optimizer], settings: dict[str, Any]
) -> None:
    """A group that does not heal trains as if nothing had been prepared."""
    torch.manual_seed(1)
    model, twin = _model(), _model()
    twin.load_state_dict(model.state_dict())
    optimizers = kind(model.parameters(), **settings), kind(twin.parameters(), **settings)
    before = str(optimizers[0].state_dict())
    Parameters([optimizers[0]]).prepare()
    assert str(optimizers[0].state_dict()) == before
    nbytes = Parameters([optimizers[0]]).nbytes
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))
    for step in range(3):
        for one, optimizer in zip((model, twin), optimizers):
            _gradients(one, step, from_the_first=True)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))
    assert str(optimizers[0].state_dict()) == str(optimizers[1].state_dict())
    (plain,) = [optimizers[0].state_dict()["state"]]
    counted = [p.nbytes for p in model.parameters()]
    counted += [
        v.nbytes for state in plain.values() for v in state.values() if isinstance(v, torch.Tensor) and v.ndim
    ]
    assert nbytes == sum(counted), "the bytes of the model and of its state after some steps"


def test_kernels_are_loaded_and_no_memory_is_used_where_state_or_gradients_are_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group that restarts from a file has all state, but a new process has no kernels."""
    trained, frozen = (
        nn.Parameter(torch.ones(1 << 16)),
        nn.Parameter(torch.ones(1 << 16), requires_grad=False),
    )
    adam = optim.Adam([trained, frozen])
    trained.grad = torch.ones_like(trained)
    adam.step()
    ours = Parameters([adam])
    stepped: list[int] = []
    step = optim.Adam.step

    def recorded(optimizer: optim.Optimizer) -> None:
        stepped.append(optimizer.param_groups[0]["params"][0].numel())
        step(optimizer)  # type: ignore[arg-type]

    monkeypatch.setattr(optim.Adam, "step", recorded)
    ours.prepare()
    assert len(stepped) == 1 and stepped[0] < trained.numel()
    assert not ours._memory._prepared
    adam.state.clear()
    ours.prepare()
    assert {size: len(tensors) for size, tensors in ours._memory._prepared.items()} == {trained.nbytes: 2}


@needs_proc
def test_a_first_step_uses_the_memory_that_is_prepared() -> None:
    """The first step after a part steps all of its parameter, and the other groups wait for it."""
    target, _, states, memory = _first_of_64_mb()
    adam = optim.Adam([target], fused=True)
    ours = Parameters([adam])
    ours.prepare()
    target.grad = torch.ones_like(target)
    before = resident()
    ours.write(0, 1 << 18, states, memory)
    ours.step(1 << 18, ours.hyperparameters())
    assert resident() - before < 32 << 20, "of 128 MB"


class _Own(optim.Adam):
    pass


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda m: optim.LBFGS(m.parameters()), "LBFGS: known to step each element by itself are SGD, Adam"),
        (lambda m: _Own(m.parameters()), "the optimizer is _Own"),
        (lambda m: optim.SGD([m[1].weight, m[1].weight.detach()[:1]]), "parameter 1 shares its memory"),
        (lambda m: optim.SGD([torch.ones(2, device="meta")]), "parameter 0 is on meta"),
    ],
)
def test_the_reason_of_a_fallback_is_named(make: Callable[[nn.Module], optim.Optimizer], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        Parameters([make(_model())]).check()


@pytest.mark.parametrize("name", ["LARS", "LAMB", "Shampoo", "Lion", "Muon", "Adafactor"])
def test_optimizers_that_step_by_norms_or_matrices_fall_back(name: str) -> None:
    """Some of them are in PyTorch; for the others the test makes a class, as scripts do."""
    weight = nn.Parameter(torch.ones(2, 2))
    make = getattr(optim, name, None) or type(name, (optim.SGD,), {})
    with pytest.raises(
        Unsupported, match=f"the optimizer is {name}: known to step each element by itself are SGD"
    ):
        Parameters([make([weight], lr=0.1)]).check()


def test_parameters_in_another_order_are_found() -> None:
    """The layout of parameters with the same shape does not depend on their order: only this check detects
    it.
    """
    one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = optim.SGD([one, other])
    ours = Parameters([optimizer])
    layout = ours.layout
    one.grad = torch.ones(2)
    ours.step(1, ours.hyperparameters())
    assert not other.any() and one.any() and ours.describes([optimizer])
    optimizer.param_groups[0]["params"] = [other, one]
    assert not ours.describes([optimizer])
    assert Parameters([optimizer]).layout == layout
    with pytest.raises(Unsupported, match="the parameter groups of an optimizer were changed"):
        ours.step(1, ours.hyperparameters())
    optimizer.param_groups[0]["params"] = [one]
    with pytest.raises(Unsupported, match="the parameter groups of an optimizer were changed"):
        ours.check_groups()


@pytest.mark.parametrize("register", ["pre", "post", "pre of all", "post of all"])
def test_step_hooks_fall_back(register: str) -> None:
    optimizer = optim.SGD(_model().parameters())
    when, *of_all = register.split()
    owner, of = (all_optimizers, "optimizer_") if of_all else (optimizer, "")
    hook = getattr(owner, f"register_{of}step_{when}_hook")(lambda *_: None)
    try:
        with pytest.raises(Unsupported, match="SGD has hooks of its steps"):
            Parameters([optimizer]).check()
    finally:
        hook.remove()
    Parameters([optimizer]).check()


def test_a_missing_optimizer_falls_back() -> None:
    with pytest.raises(Unsupported, match="no OptimizerWrapper"):
        Parameters([]).check()


def test_one_of_several_optimizers_steps() -> None:
    models = [nn.Linear(2, 2) for _ in range(2)]
    optimizers = [optim.Adam(model.parameters()) for model in models]
    ours = Parameters(optimizers)
    ours.check()
    before = [p.detach().clone() for p in ours.all]
    for p in ours.all:
        p.grad = torch.ones_like(p)
    ours.step(ours.total, ours.hyperparameters(), optimizers[1])
    assert [torch.equal(*both) for both in zip(before, ours.all)] == [True, True, False, False]
    assert not optimizers[0].state


class _Own(optim.Adam):
    pass


def test_an_optimizer_that_cannot_step_in_parts_is_left_out() -> None:
    own, others = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers = [_Own(own.parameters()), optim.Adam(others.parameters())]
    ours = Parameters(optimizers)
    ours.check()
    assert ours.given == optimizers and ours.optimizers == optimizers[1:]
    assert all(mine is p for mine, p in zip(ours.all, others.parameters(), strict=True))
    with pytest.raises(Unsupported, match="_Own steps a parameter of another optimizer"):
        Parameters([_Own(others.parameters()), optimizers[1]]).check()
    assert ours.describes(optimizers)
    optimizers[1].register_step_post_hook(lambda *_: None)
    assert not ours.describes(optimizers)


def test_sparse_gradients_fall_back() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    parameters = Parameters([optim.SGD(embedding.parameters())])
    with pytest.raises(Unsupported, match="the gradient of parameter 0 is sparse"):
        parameters.step(1, parameters.hyperparameters())


OWN = {"": {"range": "float32"}}


@pytest.mark.parametrize(
    ("states", "nbytes", "reason"),
    [
        ({}, 16, "a part of other parameters"),
        ([OWN], 16, "a part of other parameters"),
        ([OWN, {}], 16, "a part of other parameters"),
        ([{"": {"range": "float64"}}, OWN], 40, "a part of other parameters"),
        ([OWN, OWN], 20, "a part of 20 bytes in place of 24"),
        ([OWN, {**OWN, "m": {"range": "float32"}}], 24, "a part of 24 bytes in place of 32"),
        ([OWN, {**OWN, "m": {"range": "qint8x"}}], 24, "is no dtype"),
    ],
)
def test_a_part_that_is_malformed_is_refused(states: Any, nbytes: int, reason: str) -> None:
    parameters = Parameters([optim.SGD(nn.Linear(2, 2).parameters())])
    before = [p.clone() for p in parameters.all]
    with pytest.raises(ValueError, match=reason):
        parameters.write(0, 6, states, torch.zeros(nbytes, dtype=torch.uint8))
    assert all(torch.equal(a, b) for a, b in zip(before, parameters.all))


def test_parts_of_many_parameters() -> None:
    """Also of some without elements, at any place."""
    made = [nn.Parameter(torch.zeros(size)) for size in (0, 3, 0, 0, 2, 1, 0)]
    parameters = Parameters([optim.SGD(made)])
    assert parameters.total == 6
    for begin in range(7):
        for end in range(begin, 7):
            found = [
                (number, i)
                for number, first, last in parameters._ranges(begin, end)
                for i in range(first, last)
            ]
            assert found == [(1, 0), (1, 1), (1, 2), (4, 0), (4, 1), (5, 0)][begin:end]


def test_a_count_in_host_memory_is_no_range_of_a_parameter_on_a_device() -> None:
    """Even if both have no dimensions. As a range, the count would get to the device of the target's
    parameter, where each later step would wait for it.
    """
    scale = nn.Parameter(torch.zeros((), device="meta"))
    optimizer = optim.Adam([scale])
    optimizer.state[scale] = {"step": torch.tensor(3.0), "exp_avg": torch.zeros_like(scale)}
    assert "step" not in {key for _, key in Parameters([optimizer]).storages().values()}


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """This process is rank 1 of two whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


def _shards(rows: int, dim: int = 0) -> list[nn.Parameter]:
    """Shards as FSDP2 makes them. This rank's shard of the last parameter has one row fewer than that of the
    other rank, but is padded to the same size.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,))
    padded = torch.randn(3, 4)[: rows - 3]
    made = [
        DTensor.from_local(torch.randn(2, 3), mesh, [Shard(dim)]),
        DTensor.from_local(padded, mesh, [Shard(0)], shape=torch.Size([rows, 4]), stride=(4, 1)),
    ]
    return [nn.Parameter(one) for one in made]


@pytest.mark.parametrize("form", FORMS)
def test_shards_end_equal(two_ranks: None, form: dict[str, bool]) -> None:
    theirs, ours = _shards(5), _shards(5)
    optimizers = optim.AdamW(theirs, lr=0.1, **form), optim.AdamW(ours, lr=0.1, **form)
    source, target = Parameters([optimizers[0]]), Parameters([optimizers[1]])
    for parameters in (source, target):
        parameters.check()
    assert source.total == 14
    assert source.layout == target.layout

    def train(step: int) -> None:
        for one, other in zip(theirs, ours):
            one.grad = torch.full_like(one, 0.5 + step)
            other.grad = torch.full_like(other, 0.5 + step)
        optimizers[0].step()

    train(0)
    for step, begin in enumerate(range(0, 14, 3), start=1):
        part = begin, min(begin + 3, 14)
        states, memory = source.read(*part)
        target.write(*part, json.loads(json.dumps(states)), memory)
        train(step)
        target.step(14, source.hyperparameters())
        assert source.digest(0, part[1]) == target.digest(0, part[1])
    for one, other in zip(theirs, ours):
        its, mine = optimizers[0].state[one], optimizers[1].state[other]
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(local_part(its[key]), local_part(mine[key]))
            assert mine[key].placements == other.placements
        assert torch.equal(local_part(one), local_part(other))
    found = target.storages()
    whole, padded = (local_part(one).untyped_storage().data_ptr() for one in ours)
    assert found[whole] == (0, "") and target.storage(0, "").data_ptr() == whole
    assert len(found) == 5 and padded not in found, "the other bytes of that storage are not compared"


def test_groups_with_different_shards_have_different_layouts(two_ranks: None) -> None:
    layouts = {
        Parameters([optim.SGD(made)]).layout
        for made in (_shards(5), _shards(4), _shards(5, dim=1), [torch.randn(4, 3), torch.randn(5, 4)])
    }
    assert len(layouts) == 4
