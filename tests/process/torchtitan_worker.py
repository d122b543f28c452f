"""A rank of torchtitan's fault-tolerant trainer, on a CPU: its manager, optimizers and checkpoints as its
trainer uses them, with a small model instead of a language model.

Started like a torchrun worker (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHFT_LIGHTHOUSE), with
torchtitan in TORCHTITAN_PATH.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from events import Commands, emit
from hsdp_model import Model, batch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.append(os.environ["TORCHTITAN_PATH"])
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.optimizer import LRSchedulersContainer, ParamGroupConfig
from torchtitan.distributed.utils import clip_grad_norm_, dist_max, dist_sum
from torchtitan.experiments.torchft.checkpoint import TorchFTCheckpointManager
from torchtitan.experiments.torchft.config.job_config import FaultTolerance
from torchtitan.experiments.torchft.manager import TorchFTManager, maybe_semi_sync_training
from torchtitan.experiments.torchft.optimizer import TorchFTOptimizersContainer

parser = argparse.ArgumentParser()
parser.add_argument("--group", type=int, required=True)
parser.add_argument("--folder", required=True)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--method", default=None, help="local_sgd or diloco")
parser.add_argument("--spare", type=int, default=0, help="1: start only when told to")
args = parser.parse_args()


class Steps(Stateful):
    """torchtitan's train state: as its trainer, it also counts the steps that were not committed."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


class Data(BaseDataLoader):
    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Any:
        return self

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def digest() -> str:
    """Of this rank's part of the weights and of Adam's state."""
    found = hashlib.sha256()
    for p in model.parameters():
        state = optimizers.optimizers[0].state[p]
        for tensor in (p, state["exp_avg"], state["exp_avg_sq"], state["step"]):
            local = getattr(tensor, "to_local", lambda t=tensor: t)()
            found.update(local.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


rank, shards = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
commands = Commands()
if args.spare:
    emit("imported")
    assert commands.next()["do"] == "start"
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
torch.manual_seed(args.seed)
model = Model()
mesh = init_device_mesh("cpu", (shards,), mesh_dim_names=("dp_shard",))
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)

fault_tolerance = FaultTolerance(
    enable=True,
    process_group="gloo",
    process_group_timeout_ms=20_000,
    replica_id=args.group,
    group_size=2,
    semi_sync_method=args.method,
    sync_steps=4,
)
ft = TorchFTManager(fault_tolerance)
ft.maybe_set_all_reduce_hook([model])
assert ft.get_dp_info(shards, rank) == (2 * shards, shards * args.group + rank)

optimizers = TorchFTOptimizersContainer(
    TorchFTOptimizersContainer.Config(
        param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="Adam", optimizer_kwargs={"lr": 1e-2})],
        implementation="for-loop",
    ),
    model_parts=[model],
    ft_manager=ft,
)
schedulers = LRSchedulersContainer.Config(warmup_steps=2, total_steps=1000).build(
    optimizers=optimizers, training_steps=1000
)
steps, data = Steps(), Data()
checkpoints = TorchFTCheckpointManager(
    TorchFTCheckpointManager.Config(enable=True, folder="checkpoints", interval=5),
    dataloader=data,
    model_parts=[model],
    optimizers=optimizers,
    lr_schedulers=schedulers,
    states={"train_state": steps},
    sd_adapter=None,
    base_folder=args.folder,
    ft_manager=ft,
)
found = checkpoints.load(step=-1)
emit("ready", step=steps.step, place=data.place, found=found)
assert commands.next()["do"] == "train"

last = None
with maybe_semi_sync_training(fault_tolerance, ft_manager=ft, model=model, n_layers=0, optimizer=optimizers):
    while last is None or ft.manager.current_step() < last:
        if (command := commands.poll()) is not None:
            last = command["step"]
            continue
        before = ft.manager.current_step()
        steps.step += 1
        optimizers.zero_grad()
        time.sleep(0.02)  # time for a joining group to heal
        x, y = batch(before, args.group, rank)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        checkpoints.maybe_wait_for_staging()
        total = None
        if args.method is None:
            largest = dist_max(torch.tensor(float(args.group)), mesh, ft.loss_sync_pg)
            total = dist_sum(torch.tensor(1.0), mesh, ft.loss_sync_pg)
        optimizers.step()
        schedulers.step()
        committed = ft.manager.current_step() > before
        if committed:
            data.place += 1
        if args.method is None:
            checkpoints.save(steps.step, last_step=False)
        emit(
            "step",
            step=before,
            committed=committed,
            participants=None if args.method else ft.manager.num_participants(),
            total=total,
            quorum=ft.manager._quorum_id,  # as in upstream's Manager
            digest=None if args.method else digest(),
        )

checkpoints.maybe_wait_for_saving()
full = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in model.named_parameters()}
ended = {"step": ft.manager.current_step(), "trained": steps.step}
emit("finished", weights={name: p.flatten().tolist() for name, p in full.items()}, **ended)
ft.manager.shutdown()
dist.barrier()
os._exit(0)
