"""Trains a small CNN on real images, in replica groups that may fail. Each image counts once per epoch.

    torchft run --replicas 2 train_ddp.py

Kill a group and restart it: the others continue, and it takes over their weights and position in the data.
"""

import argparse
import hashlib
import math
from importlib.metadata import distribution

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import torchft

criterion = nn.CrossEntropyLoss()


def main(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # `torchft run` starts all groups on one machine
    job = torchft.Job(
        device=args.device,
        isolated=args.isolated,
        reproducible=args.reproducible,
        checkpoint_dir=args.checkpoint_dir,
        checkpoint_every=args.checkpoint_every,
    )
    images = load_images()
    net = small_cnn(images.tensors[0].shape[1]).to(job.device)
    model, _ = job.prepare(net, torch.optim.Adam(net.parameters(), lr=1e-3))
    sizes = {"global_batch_size": args.batch_size, "micro_batch_size": args.micro_batch_size}
    epochs = math.ceil(args.steps / math.ceil(len(images) / args.batch_size))
    data = job.loader(images, **sizes, epochs=epochs, num_workers=2)
    for step in data:
        for pixels, labels in step:  # the micro-batches of this rank
            step.backward(criterion(model(pixels), labels))
        if step.commit() and job.step % 50 == 0:  # else the same batch comes again
            print(f"{job.name} step {job.step} loss {step.loss:.4f} groups {step.participants}", flush=True)
    digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in net.parameters()))
    print(f"{job.name} ended at step {job.step}, sha256 of the weights {digest.hexdigest()}")
    return net


def load_images(held_out: bool = False) -> TensorDataset:
    """1797 digits of 8x8 pixels, from a file of scikit-learn. Every fifth is held out."""
    file = str(distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz"))
    table = torch.from_numpy(np.loadtxt(file, delimiter=",")).to(torch.get_default_dtype())
    table = table[(torch.arange(len(table)) % 5 == 0) == held_out]
    return TensorDataset(table[:, :64].view(-1, 1, 8, 8) / 8 - 1, table[:, 64].long())


def small_cnn(channels: int) -> nn.Sequential:
    """Maps images (N, channels, height, width) to 10 classes. A BatchNorm would depend on the batch."""
    first = [nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()]
    second = [nn.MaxPool2d(2), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(64 * 4 * 4, 10))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=2000, help="steps after which the job ends, at the end of the epoch")
    add("--batch-size", type=int, default=64, help="images of a step, for all groups together")
    add("--micro-batch-size", type=int, default=16, help="images of a forward and backward pass")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--isolated", action="store_true", help="run operations between groups in another process")
    add("--reproducible", action="store_true", help="make the sum of gradients independent of its order")
    add("--checkpoint-dir", help="a folder to resume from, and to save to")
    add("--checkpoint-every", type=int, default=100, help="in steps")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse_args())
