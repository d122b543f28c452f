"""The parts of a job that the environment decides: device, process groups, Manager, signals."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import socket
import sys
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from torchft import _forked, process_group
from torchft._manager.settings import SNAPSHOTS_ENV, start_number
from torchft._manager.signals import leave_on_from_env
from torchft.manager import Manager

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Where the number of this group is, in the order in which it is looked for: torchft run, an indexed Job of
# Kubernetes, a job array of Slurm.
#: The number of this group, in which `torchft.Job` names it; `torchft run` and the TorchX component set it.
#: Default: the index of a task of Kubernetes or Slurm, else 0.
_GROUP = ("REPLICA_GROUP_ID", "JOB_COMPLETION_INDEX", "SLURM_ARRAY_TASK_ID")
_DEVICES = ("auto", "cpu", "cuda")


def pick_device(name: str) -> torch.device:
    """Returns the device of this rank, and makes it the current one. ValueError: there is no such device."""
    if name not in _DEVICES:
        raise ValueError(f"device={name!r}: allowed are {', '.join(_DEVICES)}")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    rank, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if rank >= devices > 1 or not devices:
        visible = f"{devices} are visible (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')})"
        raise ValueError(f"LOCAL_RANK={rank} has no device: {visible}")
    torch.cuda.set_device(rank if devices > 1 else 0)  # the only one may differ from rank to rank
    return torch.device("cuda", torch.cuda.current_device())


def end_with_torchrun() -> None:
    """Makes the kernel kill this process with torchrun's agent, which could not end it any more."""
    if "TORCHELASTIC_RUN_ID" in os.environ and not _forked.stood_for:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def connect(device: torch.device, isolated: bool, **settings: Any) -> Manager:
    """Makes the process groups within and between groups, and the Manager. ValueError: settings are bad."""
    if not (os.environ.get("TORCHFT_LIGHTHOUSE") or settings.get("lighthouse_addr")):
        raise ValueError(
            "TORCHFT_LIGHTHOUSE is not set, the address of the job's lighthouse (http://host:port): "
            f"`torchft run --replicas 2 {sys.argv[0] or 'train.py'}` starts one, and two groups, on this "
            "machine"
        )
    _stand_alone()
    kind = "NCCL" if device.type == "cuda" else "Gloo"
    if not dist.is_initialized():
        # With --max_restarts torchrun keeps its store and what failed ranks put in: each start has a prefix.
        store, rank, ranks = next(dist.rendezvous("env://"))
        start = start_number()
        dist.init_process_group(
            kind.lower(), store=dist.PrefixStore(f"restart-{start}", store), rank=rank, world_size=ranks
        )
    settings.setdefault("replica_id", f"{Path(sys.argv[0]).stem or 'job'}_{group_name()}")
    settings.setdefault("min_replica_size", 1)  # the lighthouse's --min_replicas decides
    settings.setdefault("replay_failed_step", True)
    if SNAPSHOTS_ENV not in os.environ:
        settings.setdefault("snapshots", "auto")
    group = getattr(process_group, f"ProcessGroup{'Baby' * isolated}{kind}")()
    manager = Manager(group, load_state_dict=None, state_dict=None, **settings)
    atexit.register(_end, weakref.ref(manager))
    signals = leave_on_from_env(signal.SIGTERM)
    if signals and threading.current_thread() is threading.main_thread():
        manager.leave_on(*signals)
    return manager


def _end(ref: weakref.ref[Manager]) -> None:
    """Ends what is left when the process exits."""
    manager = ref()
    if manager is None:
        return
    manager.shutdown(wait=False)
    manager._pg.shutdown()  # type: ignore[attr-defined]
    if dist.is_initialized():
        dist.destroy_process_group()


def group_mesh(device: torch.device) -> DeviceMesh:
    """Returns the ranks of this group as a mesh of one dimension."""
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))


def group_name() -> str:
    """Returns the number of this group, as its launcher names it."""
    return next((os.environ[name] for name in _GROUP if os.environ.get(name)), "0")


def _stand_alone() -> None:
    """Sets what torchrun would set, for a script that was started without it: a group of one rank."""
    if "RANK" in os.environ:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
