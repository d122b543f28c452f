"""Trains a small transformer with FSDP2: sharded over the ranks of a replica group, a copy in each group
(HSDP).

    torchft run --replicas 2 --nproc-per-node 2 train_fsdp.py

Kill a rank: its group cannot continue without that shard, so it is restarted as a whole. The other groups
continue meanwhile. Each new rank heals from the rank of another group that has the same shard.
"""

import argparse
import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torchft
from train_ddp import load_images

criterion = nn.CrossEntropyLoss()


def main(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)  # each rank makes the whole model, and keeps its shard
    torch.set_num_threads(1)  # `torchft run` starts all groups on one machine
    settings = {"checkpoint_dir": args.checkpoint_dir, "reproducible": args.reproducible}
    job = torchft.Job(device=args.device, **settings)
    net = Transformer(args.width, args.layers).to(job.device)
    for block in net.blocks:
        fully_shard(block, mesh=job.mesh)
    fully_shard(net, mesh=job.mesh)
    model, _ = job.prepare(net, torch.optim.Adam(net.parameters(), lr=args.lr))
    images = load_images()
    epochs = math.ceil(args.steps / math.ceil(len(images) / args.batch_size))
    data = job.loader(images, global_batch_size=args.batch_size, micro_batch_size=16, epochs=epochs)
    for step in data:
        for pixels, labels in step:
            step.backward(criterion(model(pixels), labels))  # averages over ranks and groups
        step.clip(1.0)
        if step.commit() and job.step % 50 == 0:
            print(f"{job.name} step {job.step} loss {step.loss:.4f} groups {step.participants}", flush=True)
    print(f"{job.name} ended at step {job.step}, sha256 of the weights {sha256_of(net)}")
    return net


class Transformer(nn.Module):
    """Maps images (N, 1, 8, 8), as 16 patches of 2x2 pixels, to 10 classes."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.place = nn.Parameter(torch.randn(16, width) / width**0.5)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(F.unfold(images, 2, stride=2).transpose(1, 2)) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Block(nn.TransformerEncoderLayer):
    """Attention and a feed-forward layer, on (N, tokens, width)."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 4, 4 * width, dropout=0, batch_first=True, norm_first=True)


def sha256_of(net: nn.Module) -> str:
    """The digest of the whole weights. All ranks of a group must call it."""
    digest = hashlib.sha256()
    for weight in net.parameters():
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        digest.update(whole.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=600, help="steps after which the job ends, at the end of the epoch")
    add("--batch-size", type=int, default=64, help="images of a step, for all groups together")
    add("--width", type=int, default=32, help="a multiple of 4")
    add("--layers", type=int, default=2)
    add("--lr", type=float, default=1e-3)
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--reproducible", action="store_true", help="make the sum of gradients independent of its order")
    add("--checkpoint-dir", help="a folder to resume from, and to save to")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse_args())
