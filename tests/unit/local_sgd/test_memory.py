"""The memory that a synchronization takes in addition to model, gradients and optimizer state."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.unit.local_sgd.one_group import OneGroup
from torchft.local_sgd import DiLoCo, LocalSGD

WIDTH, LAYERS = 64, 4
LAYER = WIDTH * WIDTH * 4  # bytes
SMALL = 1024  # for scalars


class Allocated(TorchDispatchMode):
    """The present and the peak number of bytes in storages that operations allocate inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in tree_leaves((args, kwargs)):
            self._note(given, fresh=False)
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            self._note(made, fresh=True)
        return result

    def _note(self, tensor: object, fresh: bool) -> None:
        if not isinstance(tensor, torch.Tensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        nbytes = storage.nbytes() if fresh else 0  # earlier storages do not count
        self.now += nbytes
        self.most = max(self.most, self.now)
        self._known[key] = weakref.finalize(storage, self._freed, key, nbytes)

    def _freed(self, key: int, nbytes: int) -> None:
        del self._known[key]
        self.now -= nbytes


def model_of_layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def gradients(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)


def test_the_count_counts() -> None:
    kept = torch.zeros(WIDTH, WIDTH)
    with Allocated() as allocated:
        a = kept + 1
        assert (allocated.now, allocated.most) == (LAYER, LAYER)
        a.add_(1)
        b = a.view(-1)[3:]
        assert allocated.now == LAYER  # a view allocates no memory
        c = a * kept
        assert (allocated.now, allocated.most) == (2 * LAYER, 2 * LAYER)
        del a, b, c
        assert (allocated.now, allocated.most) == (0, 2 * LAYER)


@pytest.mark.parametrize(
    ("fragments", "settings", "at_the_sync", "why"),
    [
        (1, {}, 0, "the pseudogradients take the place of the gradients"),
        (4, {}, 0, "the same, fragment for fragment"),
        (4, {"use_bucketization": True}, 0, "also end to end"),
        (4, {"fragment_update_alpha": 0.5}, 1, "one fragment of one's own parameters, during the outer step"),
        (4, {"fragment_sync_delay": 1}, 1, "the pseudogradients of one fragment, beside the gradients"),
        (4, {"fragment_sync_delay": 1, "fragment_update_alpha": 0.5}, 2, "both"),
    ],
)
def test_memory_of_a_sync(fragments: int, settings: dict[str, Any], at_the_sync: int, why: str) -> None:
    """Measured in layers, beyond model, gradients, optimizers and the permanent backup."""
    model = model_of_layers()
    parts = [nn.Sequential(*model[i::fragments]) for i in range(fragments)]
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True, foreach=False)
    sync_every = 2 * fragments
    with DiLoCo(OneGroup(), parts, inner, outer, sync_every, **settings):  # type: ignore[arg-type]
        for _ in range(sync_every):  # the outer optimizer's state is allocated in the first round
            gradients(model)
            inner.step()
        with Allocated() as allocated:
            for _ in range(2 * sync_every):
                inner.zero_grad()
                gradients(model)
                inner.step()
                allocated.most = max(allocated.most, allocated.now)
        # SGD with Nesterov momentum allocates a tensor of the size of one parameter in its step
        beyond = allocated.most - LAYERS * LAYER - LAYER
        assert beyond <= at_the_sync * LAYER + SMALL, f"{beyond / LAYER:.2f} layers; {why}"


def test_between_two_syncs_nothing_is_kept() -> None:
    model = model_of_layers()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = torch.optim.SGD(model.parameters(), lr=0.7)
    with DiLoCo(OneGroup(), [model], inner, outer, sync_every=1, fragment_update_alpha=0.5):  # type: ignore[arg-type]
        gradients(model)
        with Allocated() as allocated:
            inner.step()
            assert allocated.now <= SMALL


def test_local_sgd_needs_one_copy_for_the_averages() -> None:
    model = model_of_layers()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with LocalSGD(OneGroup(), model, inner, sync_every=1):  # type: ignore[arg-type]
        gradients(model)
        with Allocated() as allocated:
            inner.step()
        assert LAYERS * LAYER <= allocated.most <= LAYERS * LAYER + SMALL and allocated.now <= SMALL


def test_the_state_for_a_peer_is_not_a_copy() -> None:
    model = model_of_layers()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = OneGroup()
    DiLoCo(manager, [model], inner, torch.optim.SGD(model.parameters(), lr=0.7), sync_every=1)  # type: ignore[arg-type]
    (_, read) = manager.state_fns["StreamingDiLoCoFragment_0"]
    with Allocated() as allocated:
        state = read()
    assert allocated.most == 0
    again = read()["original_parameters"]
    assert all(t.data_ptr() == again[name].data_ptr() for name, t in state["original_parameters"].items())
