"""Bad arguments are refused, with a message that names what is allowed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchft.local_sgd
from tests.unit.local_sgd.one_group import OneGroup
from torchft.local_sgd import USE_BUCKETIZATION_ENV, DiLoCo, LocalSGD
from torchft.manager import Manager


def test_public_names() -> None:
    assert torchft.local_sgd.__all__ == [
        "USE_BUCKETIZATION_ENV",
        "DiLoCo",
        "LocalSGD",
        "extract_local_tensor",
    ]
    assert USE_BUCKETIZATION_ENV == "TORCHFT_USE_BUCKETIZATION"


def test_the_stand_in_has_the_methods_of_the_manager() -> None:
    """Otherwise the tests in this folder would not notice a method that Manager lacks."""
    for name in vars(OneGroup):
        if not name.startswith("_") and name != "taken":
            assert callable(getattr(Manager, name)), name


def diloco(manager: OneGroup | None = None, **given: Any) -> DiLoCo:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    parameters = [p for layer in layers for p in layer.parameters()]
    arguments: dict[str, Any] = dict(
        model_fragments=layers,
        inner_optimizer=torch.optim.SGD(parameters, lr=0.1),
        outer_optimizer=torch.optim.SGD(parameters, lr=0.7),
        sync_every=4,
    )
    return DiLoCo(manager or OneGroup(), **{**arguments, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model_fragments": []}, r"model_fragments=\[\]: allowed are 1 fragment and more"),
        ({"sync_every": 1}, "sync_every=1 with 2 model_fragments: allowed are 2 and more"),
        ({"sync_every": 0}, "sync_every=0 with 2 model_fragments: allowed are 2 and more"),
        ({"sync_every": 5}, "sync_every=5 with 2 model_fragments: allowed are multiples of 2"),
        ({"sync_every": "4"}, "sync_every='4': allowed are whole numbers"),
        ({"sync_every": None}, "sync_every=None: allowed are whole numbers"),
        ({"sync_every": 4.5}, "sync_every=4.5: allowed are whole numbers"),
        (
            {"fragment_sync_delay": 2},
            r"fragment_sync_delay=2: allowed are 0 to 1, less than sync_every / len",
        ),
        ({"fragment_sync_delay": -1}, "fragment_sync_delay=-1: allowed are 0 to 1"),
        ({"fragment_sync_delay": 0.5}, "fragment_sync_delay=0.5: allowed are whole numbers"),
        ({"fragment_update_alpha": 1.01}, "fragment_update_alpha=1.01: allowed are 0 to 1"),
        ({"fragment_update_alpha": float("nan")}, "fragment_update_alpha=nan: allowed are 0 to 1"),
        ({"fragment_update_alpha": "0.5"}, "fragment_update_alpha='0.5': allowed are 0 to 1"),
        ({"bucket_cap_mb": 0}, r"bucket_cap_mb=0: allowed are 1 and more"),
        ({"bucket_cap_mb": 0.5}, r"bucket_cap_mb=0.5: allowed are 1 and more"),
        ({"backup_device": "nowhere"}, "backup_device='nowhere': .*cpu, cuda"),
        ({"inner_optimizer": None}, "inner_optimizer=None: allowed are optimizers of PyTorch"),
        ({"outer_optimizer": None}, "outer_optimizer=None: allowed are an optimizer, or a list"),
        (
            {"outer_optimizer": [None, None]},
            r"outer_optimizer=\[None, None\]: allowed are an optimizer, or a list",
        ),
        (
            {"outer_optimizer": []},
            "outer_optimizer has 0 optimizers for 2 model_fragments: allowed are one for each",
        ),
        ({"model_fragments": nn.Linear(2, 2)}, "model_fragments is a Linear: allowed are lists of modules"),
        ({"model_fragments": [nn.Linear(2, 2), 3]}, r"model_fragments\[1\]=3: allowed are lists of modules"),
        (
            {"model_fragments": [nn.Linear(2, 2), nn.ReLU()]},
            r"model_fragments\[1\] \(ReLU\) has no floating point parameters",
        ),
    ],
)
def test_diloco_refuses(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        diloco(**given)


def test_whole_numbers_of_other_types_are_accepted() -> None:
    assert diloco(sync_every=4.0, fragment_sync_delay=np.int64(1))._fragment_sync_delay == 1


def test_parameters_that_cannot_be_quantized_are_refused_before_the_training() -> None:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2).double()]
    outer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.7)
    message = r"model_fragments\[1\]: parameter 'weight' of shape \(2, 2\) is torch.float64, which cannot be"
    with pytest.raises(ValueError, match=message):
        diloco(model_fragments=layers, outer_optimizer=outer, should_quantize=True)
    diloco(model_fragments=layers, outer_optimizer=outer)


def test_diloco_refuses_a_quorum_in_the_background() -> None:
    manager = OneGroup()
    manager._use_async_quorum = True
    with pytest.raises(ValueError, match="use_async_quorum=False"):
        diloco(manager)


def test_an_optimizer_that_lacks_a_parameter_is_refused() -> None:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    outer = [torch.optim.SGD(layers[0].parameters(), lr=0.7), torch.optim.SGD([layers[1].weight], lr=0.7)]
    with pytest.raises(ValueError, match=r"outer_optimizer of model_fragments\[1\] lacks parameter 'bias'"):
        diloco(model_fragments=layers, outer_optimizer=outer)


def test_fragments_that_share_a_parameter_are_refused() -> None:
    """Tied embeddings: each fragment would also send the other's change."""
    first, last = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
    last.weight = first.weight
    outer = torch.optim.SGD(first.parameters(), lr=0.7)
    with pytest.raises(ValueError, match=r"\[1\]: parameter 'weight' belongs to model_fragments\[0\] too"):
        diloco(model_fragments=[first, last], outer_optimizer=outer)


def test_a_variable_that_is_no_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(USE_BUCKETIZATION_ENV, "yes")
    with pytest.raises(
        ValueError, match=r"TORCHFT_USE_BUCKETIZATION='yes': allowed are 0 \(off\) and 1 \(on\)"
    ):
        diloco()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sync_every": 0}, "sync_every=0: allowed are 1 and more"),
        ({"sync_every": -3}, "sync_every=-3: allowed are 1 and more"),
        ({"sync_every": 1.5}, "sync_every=1.5: allowed are whole numbers"),
        ({"sync_every": "2"}, "sync_every='2': allowed are whole numbers"),
        ({"model": None}, "model=None: allowed are modules"),
        ({"optimizer": None}, "optimizer=None: allowed are optimizers of PyTorch"),
    ],
)
def test_local_sgd_refuses(given: dict[str, Any], message: str) -> None:
    model = nn.Linear(2, 2)
    arguments = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "sync_every": 1}
    with pytest.raises(ValueError, match=message):
        LocalSGD(OneGroup(), **{**arguments, **given})  # type: ignore[arg-type]


def test_a_model_without_parameters_is_refused() -> None:
    inner = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with pytest.raises(ValueError, match=r"model \(Dropout\) has no floating point parameters"):
        LocalSGD(OneGroup(), nn.Dropout(), inner, 1)  # type: ignore[arg-type]


class Trained(nn.Module):
    def __init__(self, dtype: torch.dtype, trained: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.weight = nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=trained)


def test_a_type_that_cannot_be_averaged_is_refused_if_it_is_trained() -> None:
    model = Trained(torch.complex64, trained=True)
    inner = torch.optim.SGD([model.scale], lr=0.1)
    with pytest.raises(
        ValueError, match=r"model: parameter 'weight' is torch.complex64; allowed are floating point"
    ):
        LocalSGD(OneGroup(), model, inner, 1)  # type: ignore[arg-type]


def test_frozen_integer_weights_are_not_averaged() -> None:
    model = Trained(torch.int8, trained=False)
    inner = torch.optim.SGD([model.scale], lr=0.1)
    manager = OneGroup()
    with LocalSGD(manager, model, inner, 1):  # type: ignore[arg-type]
        inner.step()
    assert manager.taken() == ["quorum", ("allreduce", (2,), False), "vote"]
