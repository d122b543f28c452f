"""DistributedDataParallel of one group: its buckets, its copies, and what PyTorch's class does, too."""

from __future__ import annotations

import copy
import pickle
import warnings
from types import SimpleNamespace
from typing import Any, Callable

import pytest
import torch
from torch import nn
from torch.nn import parallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from torchft.ddp import DistributedDataParallel, PureDistributedDataParallel
from torchft.process_group import ProcessGroupDummy
from torchft.work import _DummyWork

WIDTH = 400  # 640 kB per layer: several buckets of 1 MiB


class Doubling:
    """A stand-in for a Manager, which doubles what it reduces, and cannot be copied."""

    def __init__(self) -> None:
        self.reduced: list[int] = []

    def allreduce(self, tensor: torch.Tensor) -> Any:
        self.reduced.append(tensor.numel())
        return _DummyWork(tensor.mul_(2))

    def __deepcopy__(self, memo: object) -> Any:
        raise AssertionError("copied")

    def __reduce_ex__(self, protocol: object) -> Any:
        raise AssertionError("pickled")


@pytest.fixture
def manager() -> Any:
    return Doubling()


class Model(nn.Module):
    """Layers whose order of registration differs from their order of use; one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.reentrant = False

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        x = self.first(x)
        if not skip:
            x = checkpoint(self.middle, x, use_reentrant=True) if self.reentrant else self.middle(x)
        return self.last(x)


def gradients(module: nn.Module, **kwargs: Any) -> list[torch.Tensor]:
    """The gradients of a pass; zeros for a parameter without one."""
    module.zero_grad()
    module(torch.ones(2, WIDTH), **kwargs).sum().backward()
    return [torch.zeros(()) if p.grad is None else p.grad.clone() for p in module.parameters()]


def assert_doubled(ddp: nn.Module, model: nn.Module, **kwargs: Any) -> None:
    """Asserts that the gradients were reduced once each: those of ``model``, doubled."""
    expected = gradients(copy.deepcopy(model), **kwargs)
    found = gradients(ddp, **kwargs)
    assert len(found) == len(expected)
    for mine, other in zip(found, expected):
        torch.testing.assert_close(mine, 2 * other)


def buckets(ddp: Any) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    return [
        [names[id(parameter)] for parameter in bucket.parameters()]
        for bucket in ddp.reducer._get_zeros_like_grad_buckets()
    ]


@pytest.mark.parametrize("static", [False, True], ids=["", "static graph"])
@pytest.mark.parametrize("unused", [False, True], ids=["", "find unused"])
@pytest.mark.parametrize("cap", [{}, {"bucket_cap_mb": 1}, {"bucket_cap_mb": 100}], ids=str)
@pytest.mark.filterwarnings("ignore:You passed find_unused_parameters=true:UserWarning")
def test_buckets_are_the_same_in_each_step(
    manager: Any, static: bool, unused: bool, cap: dict[str, int]
) -> None:
    """A group that joins later forms them, too, and so does one with another setting."""
    expected = buckets(
        parallel.DistributedDataParallel(
            Model(), process_group=ProcessGroupDummy(0, 1), find_unused_parameters=True, **cap
        )
    )
    assert len(expected) == (1 if cap.get("bucket_cap_mb") == 100 else 2)
    model = Model()
    ddp = DistributedDataParallel(manager, model, find_unused_parameters=unused, static_graph=static, **cap)
    sizes = [sum(model.get_parameter(name).numel() for name in bucket) for bucket in expected]
    for _ in range(4):
        assert buckets(ddp) == expected
        manager.reduced.clear()
        assert_doubled(ddp, model)
        assert manager.reduced == sizes


def test_buckets_of_several_types(manager: Any) -> None:
    def make() -> nn.Module:
        model = nn.ModuleDict(
            {
                "first": nn.Linear(WIDTH, WIDTH),
                "float64": nn.Linear(WIDTH, WIDTH, dtype=torch.float64),
                "other": nn.Linear(WIDTH, WIDTH),
            }
        )
        model["first"].bias.requires_grad_(False)
        return model

    expected = buckets(
        parallel.DistributedDataParallel(
            make(), process_group=ProcessGroupDummy(0, 1), find_unused_parameters=True
        )
    )
    assert len(expected) > 2
    assert buckets(DistributedDataParallel(manager, make())) == expected


def test_the_graph_is_declared_static_after_construction(manager: Any) -> None:
    model = Model()
    ddp = DistributedDataParallel(manager, model, bucket_cap_mb=1)
    before = buckets(ddp)
    ddp._set_static_graph()
    for _ in range(3):
        assert_doubled(ddp, model)
        assert buckets(ddp) == before


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_reentrant_checkpoints(manager: Any) -> None:
    model = Model()
    model.reentrant = True
    ddp = DistributedDataParallel(manager, model)
    for _ in range(3):
        assert_doubled(ddp, model)


def test_no_warning_of_a_search_that_nobody_asked_for(manager: Any) -> None:
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            gradients(DistributedDataParallel(manager, Model()))
    finally:
        torch.set_warn_always(False)


def test_unused_parameters_where_the_caller_asks(manager: Any) -> None:
    model = Model()
    ddp = DistributedDataParallel(manager, model, bucket_cap_mb=1, find_unused_parameters=True)
    for skip in (False, True, True, False):
        assert_doubled(ddp, model, skip=skip)


def test_unused_parameters_where_the_caller_does_not_ask(manager: Any) -> None:
    ddp = DistributedDataParallel(manager, Model(), bucket_cap_mb=1)
    gradients(ddp, skip=True)
    with pytest.raises(RuntimeError, match="find_unused_parameters=True"):
        gradients(ddp)


def pure(manager: Any, model: nn.Module) -> nn.Module:
    return PureDistributedDataParallel(manager, model)


def static(manager: Any, model: nn.Module) -> nn.Module:
    return DistributedDataParallel(manager, model, bucket_cap_mb=1, static_graph=True)


def searching(manager: Any, model: nn.Module) -> nn.Module:
    return DistributedDataParallel(manager, model, bucket_cap_mb=1, find_unused_parameters=True)


Wrap = Callable[[Any, nn.Module], nn.Module]
WRAPPERS = pytest.mark.parametrize("wrap", [DistributedDataParallel, static, searching, pure])


@WRAPPERS
@pytest.mark.parametrize("passes", [0, 1, 3])
def test_a_copy_trains_alone(manager: Any, wrap: Wrap, passes: int) -> None:
    model = Model()
    ddp = wrap(manager, model)
    for _ in range(passes):
        gradients(ddp)
    ddp.eval()
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    twin = copy.deepcopy(ddp)
    assert type(twin) is type(ddp) and not twin.training and twin.module is not model
    assert all(not torch.equal(p, p + 1) for p in twin.parameters())
    for _ in range(3):
        assert_doubled(twin, model)
    for p, grad in zip(model.parameters(), before):
        assert (p.grad is None and grad is None) or torch.equal(p.grad, grad)
    for _ in range(3):
        assert_doubled(ddp, model)


@WRAPPERS
def test_a_shallow_copy_shares_the_model(manager: Any, wrap: Wrap) -> None:
    model = Model()
    ddp = wrap(manager, model)
    shallow = copy.copy(ddp)
    assert shallow.module is model
    for one in (shallow, ddp):
        assert_doubled(one, model)


@WRAPPERS
def test_averaged_model(manager: Any, wrap: Wrap) -> None:
    model = Model()
    ddp = wrap(manager, model)
    averaged = AveragedModel(ddp)
    averaged.update_parameters(ddp)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    averaged.update_parameters(ddp)
    for mean, parameter in zip(averaged.parameters(), ddp.parameters()):
        torch.testing.assert_close(mean, parameter * 2 / 3)
    with torch.no_grad():
        averaged(torch.ones(1, WIDTH))


@WRAPPERS
def test_a_pickle_holds_no_manager(manager: Any, wrap: Wrap) -> None:
    model = Model()
    ddp = wrap(manager, model)
    gradients(ddp)
    twin = pickle.loads(pickle.dumps(ddp))
    assert type(twin) is type(ddp)
    with torch.no_grad():
        assert torch.equal(
            pickle.loads(pickle.dumps(twin))(torch.ones(1, WIDTH)), model(torch.ones(1, WIDTH))
        )
    with pytest.raises(RuntimeError, match=r"was unpickled.* no Manager.*wrap its attribute `module`"):
        twin(torch.ones(1, WIDTH))
    assert_doubled(wrap(manager, twin.module), model)


@pytest.mark.parametrize("wrap", [DistributedDataParallel, static, searching])
@pytest.mark.parametrize("kwargs", [{}, {"enable": False}, {"throw_on_early_termination": True}], ids=str)
def test_join(manager: Any, wrap: Wrap, kwargs: dict[str, bool]) -> None:
    model = Model()
    ddp: Any = wrap(manager, model)
    with ddp.join(**kwargs):
        for _ in range(3):
            assert_doubled(ddp, model)


def test_a_reducer_that_does_not_ask_for_its_buckets_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then groups that join later would form other buckets."""
    reducer: Any = SimpleNamespace(_push_all_rebuilt_params=lambda: None, _rebuild_buckets=lambda: True)
    monkeypatch.setattr("torch.distributed.Reducer", lambda *_: reducer)
    monkeypatch.setattr(
        "torch.distributed.Logger", lambda _: SimpleNamespace(set_construction_data_and_log=lambda *_: None)
    )
    reducer.set_logger = lambda _: None
    with pytest.raises(RuntimeError, match="the buckets of DistributedDataParallel cannot be fixed"):
        DistributedDataParallel(Doubling(), Model())  # type: ignore[arg-type]
