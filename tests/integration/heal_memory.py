"""A job in which a group with a model on a device heals, and the device memory that this takes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from tests.integration.cluster import Cluster, Gate, Rank, results
from torchft.checkpointing import CheckpointTransport
from torchft.process_group import ProcessGroup

LAYERS = 4


class Model:
    """Weights and Adam of one group, on its device."""

    def __init__(self, device: torch.device, width: int, value: float, trained: bool) -> None:
        self.device = device
        self.weights = [
            torch.full((width, width), value, device=device, requires_grad=True) for _ in range(LAYERS)
        ]
        self.adam = torch.optim.Adam(self.weights, lr=0.25)
        if trained:
            for weight in self.weights:
                weight.grad = torch.full_like(weight, value)
            self.adam.step()
            self.adam.zero_grad()

    def save(self) -> dict[str, Any]:
        return {"weights": [weight.detach() for weight in self.weights], "adam": self.adam.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        for mine, theirs in zip(self.weights, state["weights"], strict=True):
            mine.data.copy_(theirs)
        self.adam.load_state_dict(state["adam"])

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights and Adam's moments."""
        moments = {
            f"{name} {i}": s[name]
            for i, s in enumerate(self.adam.state.values())
            for name in s
            if name != "step"
        }
        return {**{f"weight {i}": weight.detach() for i, weight in enumerate(self.weights)}, **moments}


def check_heal(
    make_pg: Callable[[int], ProcessGroup],
    transport: Callable[[Rank], CheckpointTransport[Any]],
    devices: tuple[torch.device, torch.device],
    width: int,
    in_background: bool,
    has_stepped: bool,
) -> None:
    """Checks a heal of the second of two groups: into its own tensors, on its own device, with at most 5 % of
    the state as additional device memory.

    Args:
        make_pg: the process group of a group
        transport: the transport of a rank
        devices: device of each of the two groups
        width: width of the model
        in_background: whether the quorum is asynchronous
        has_stepped: whether the second group's optimizer has a state; if not, it is allocated once
    """
    models: dict[int, Model] = {}
    trains, joined = Gate(), threading.Event()

    def group(rank: Rank) -> int:
        device = devices[rank.group]
        torch.accelerator.set_device_index(device.index)
        behind = rank.group == 1
        models[rank.group] = model = Model(device, width, 1.0 + rank.group, trained=has_stepped or not behind)
        before = {name: tensor.data_ptr() for name, tensor in model.tensors().items()}
        if behind:
            rank.cluster.wait(trains)
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
        used = torch.accelerator.memory_allocated()
        manager = rank.start_manager(
            load_state_dict=model.load,
            state_dict=model.save,
            checkpoint_transport=transport(rank),
            use_async_quorum=in_background,
        )
        participants = 0
        while participants < 2 or manager.current_step() < 3:
            manager.start_quorum()
            manager.allreduce(torch.ones(8, device=device)).wait()
            if manager.should_commit():
                participants = manager.num_participants()
                trains.open()
        if not behind:
            assert joined.wait(60)
            return 0
        peak = torch.accelerator.max_memory_allocated() - used
        joined.set()
        for name, pointer in before.items():
            assert model.tensors()[name].data_ptr() == pointer, f"{name} is not where it was"
        return peak

    with Cluster(make_pg=make_pg) as cluster:
        _, peak = results(cluster.start(group, 0), cluster.start(group, 1))
    part = LAYERS * width * width * 4  # bytes: of the weights, and of each of Adam's two moments
    new = 0 if has_stepped else 2 * part
    assert peak - new <= 0.05 * 3 * part, f"{peak - new} bytes besides, for a state of {3 * part}"
    source, target = models[0].tensors(), models[1].tensors()
    assert len(target) == 3 * LAYERS and source.keys() == target.keys()
    for name in source:
        assert target[name].device == devices[1], name
        assert torch.equal(source[name].cpu(), target[name].cpu()), name
