"""Ray Train's own support for torchft: each worker is a replica group of one rank. Ray replaces those that
fail, one by one.

    pip install '.[ray]'
    python python/examples/ray_ddp.py --kill-at 50

Ray starts the lighthouse, starts processes and notices their ends; torchft keeps the training consistent.
While a worker is replaced, the others train on, and the new one heals from them.

With --kill-at a worker kills itself once, as a demonstration. If the workers have different weights at the
end, the exit status is 1. --address selects a running cluster; without it, one is started on this machine.
"""

# Ray is not installed where type checkers run; where it is, its annotations name both of its APIs.
# pyrefly: ignore-errors[missing-import, missing-attribute, bad-argument-type]

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def train(config: dict[str, Any]) -> None:
    """Trains a worker. It writes the digest of its weights into the folder."""
    import hashlib

    import ray.train
    import torch
    from torch.utils.data import TensorDataset

    import torchft

    worker, folder = ray.train.get_context().get_world_rank(), Path(config["folder"])
    os.environ["REPLICA_GROUP_ID"] = str(worker)
    torch.manual_seed(0)  # the same weights and data in all groups
    # Ray numbers all workers, so RANK and WORLD_SIZE are not those of a group.
    job = torchft.Job(
        device="auto", rank=0, world_size=1, quorum_timeout=timedelta(seconds=config["patience"])
    )
    net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).to(job.device)
    model, _ = job.prepare(net, torch.optim.Adam(net.parameters(), lr=0.01))
    inputs = torch.randn(1600, 4)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    batches = job.loader(dataset, global_batch_size=32, micro_batch_size=8, epochs=config["epochs"])
    first, killed = 0, folder / "killed"
    for step in batches:
        if worker == config["workers"] - 1 and job.step == config["kill_at"] and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        for x, y in step:
            step.backward((model(x) - y).square().mean())
        if step.commit():
            first = first or job.step
    digest = hashlib.sha256(
        b"".join(p.detach().cpu().numpy().tobytes() for p in net.parameters())
    ).hexdigest()
    (folder / f"group{worker}").write_text(f"group {worker}: steps {first} to {job.step}  {digest}")


def main() -> int:
    args = parse_args()
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.train.v2.torch.torchft_config import TorchftConfig

    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(
        address=args.address,
        num_cpus=None if args.address else args.workers + 1,
        include_dashboard=None if args.address else False,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    try:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            config = {**vars(args), "folder": folder}
            TorchTrainer(
                train,
                train_loop_config=config,
                scaling_config=ScalingConfig(num_workers=args.workers),
                torch_config=TorchftConfig(lighthouse_kwargs={"min_replicas": args.min_workers}),
                run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=3)),
            ).fit()
            ends = [path.read_text() for path in sorted(Path(folder).glob("group[0-9]*"))]
    finally:
        ray.shutdown()
    print("\n".join(ends))
    equal = len(ends) == args.workers and len({end.split()[-1] for end in ends}) == 1
    print("equal" if equal else "the weights differ")
    return 0 if equal else 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--address", help="of a running Ray cluster, such as auto; default: a new one here")
    parser.add_argument("--workers", type=int, default=2, help="replica groups")
    parser.add_argument("--min-workers", type=int, default=1, help="with which training goes on")
    parser.add_argument("--epochs", type=int, default=200, help="of 50 steps")
    parser.add_argument("--kill-at", type=int, help="committed steps after which the last worker is killed")
    parser.add_argument("--patience", type=float, default=600, help="seconds to wait for --min-workers")
    parser.add_argument("--folder", help="which all workers can write to; default: a temporary one")
    args = parser.parse_args()
    for name in ("workers", "min_workers", "epochs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.min_workers > args.workers:
        parser.error(f"--min-workers must be at most --workers ({args.workers}), got {args.min_workers}")
    if args.kill_at is not None and not 0 < args.kill_at < 50 * args.epochs:
        parser.error(f"--kill-at must lie between 0 and {50 * args.epochs}, got {args.kill_at}")
    if args.kill_at is not None and args.workers < 2:
        parser.error("--kill-at needs --workers of at least 2: someone has to survive")
    return args


if __name__ == "__main__":
    sys.exit(main())
