"""One replica group, of the torchft on PYTHONPATH, that trains with LocalSGD and DiLoCo in several settings.

Emits every parameter after every inner step, exactly (`float.hex`).
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from typing import Any

import torch
from events import emit, keep_stdout_for_events
from torch import nn
from torch.distributed import TCPStore

import torchft
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

ROUNDS = 24
TIMEOUT = timedelta(seconds=60)
# None: LocalSGD. Otherwise the number of fragments, and DiLoCo's arguments.
CASES: dict[str, tuple[int, dict[str, Any]] | None] = {
    "LocalSGD": None,
    "DiLoCo": (1, {"sync_every": 3}),
    "fragments": (3, {"sync_every": 6, "use_bucketization": True}),
    "streaming": (3, {"sync_every": 9, "fragment_sync_delay": 2, "fragment_update_alpha": 0.3}),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--lighthouse", required=True)
    args = parser.parse_args()
    keep_stdout_for_events()
    torch.set_num_threads(1)
    emit("imported", torchft=os.path.dirname(torchft.__file__))
    for name in CASES:
        emit("case", name=name, trajectory=train(name, args.group, args.lighthouse))


def train(name: str, group: int, lighthouse: str) -> list[list[str]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 2))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    pg = ProcessGroupGloo(timeout=TIMEOUT)
    manager = Manager(
        pg=pg,
        load_state_dict=lambda s: (model.load_state_dict(s["model"]), inner.load_state_dict(s["inner"])),
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        min_replica_size=2,
        use_async_quorum=False,
        # While an upstream group sends its state between two fragments, it continues to train, so the state
        # may be that of a later inner step. With init_sync, upstream's numbers therefore differ from run to
        # run.
        init_sync="fragment_sync_delay" not in (CASES[name] or (0, {}))[1],
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"{name}_{group}",
    )
    trajectory = []
    with algorithm(name, manager, model, inner):
        step = 0
        while manager.current_step() < ROUNDS:
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1000 * group + step))
            inner.zero_grad()
            model(x).square().mean().backward()
            inner.step()
            step += 1
            trajectory.append([v.hex() for p in model.parameters() for v in p.detach().flatten().tolist()])
    manager.shutdown()
    pg.shutdown()
    return trajectory


def algorithm(name: str, manager: Any, model: nn.Sequential, inner: torch.optim.Optimizer) -> Any:
    case = CASES[name]
    if case is None:
        return LocalSGD(manager, model, inner, sync_every=4)
    fragments, settings = case
    parts: list[nn.Module] = [model] if fragments == 1 else list(model)
    outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in parts]
    return DiLoCo(manager, parts, inner, outer, **settings)


if __name__ == "__main__":
    main()
