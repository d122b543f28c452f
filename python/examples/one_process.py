"""Trains one process on the batches of a job of train_demo.py, and compares the weights.

    python python/examples/one_process.py OPTIONS --events DIR

OPTIONS are those of the job. It trains without groups, in a plain loop over the same units, and prints a line
of JSON: samples and epochs of the job, the largest difference of a weight relative to the largest weight of
its tensor, and whether all weights are equal.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import torch
import train_demo  # makes the next module importable
from torch import nn

import train_ddp
from torchft._job.start import pick_device
from torchft.data.exact_sum import ExactSum
from torchft.data.position import DataPlan, DataPosition


def main() -> None:
    options, rest = train_demo.parse_args()
    sys.argv = [sys.argv[0], *rest]
    args = train_ddp.parse_args()
    train_demo.use(options)
    net, plan = train(args)
    found = [
        torch.load(path, "cpu", weights_only=True)
        for path in sorted(options.events.glob("group-*-rank-*.pt"))
    ]
    weights = {name: value.cpu() for name, value in net.state_dict().items()}
    difference = max((relative(weights, other) for other in found), default=math.nan)
    equal = all(torch.equal(weights[name], other[name]) for other in found for name in weights)
    print(
        json.dumps({"samples": plan.length, "epochs": plan.epochs, "difference": difference, "equal": equal})
    )


def train(args: Any) -> tuple[nn.Module, DataPlan]:
    """Trains like train_ddp.py, in one process, using only torchft's order of the samples (and its exact
    sums).
    """
    device = pick_device(args.device)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images = train_ddp.load_images()
    net = train_ddp.small_cnn(images.tensors[0].shape[1]).to(device)
    adam = torch.optim.Adam(net.parameters(), lr=1e-3)
    epochs = math.ceil(args.steps / math.ceil(len(images) / args.batch_size))
    plan = DataPlan(len(images), args.batch_size, args.micro_batch_size, epochs=epochs)
    total = (
        ExactSum(net.named_parameters(), -(-args.batch_size // args.micro_batch_size))
        if args.reproducible
        else None
    )
    pixels, labels = (part.to(device) for part in images.tensors)
    position = DataPosition()
    while position != plan.end:
        units = plan.share(position, 0, 1).units
        adam.zero_grad()
        done = False
        while not done:
            if total is not None:
                total.begin()
            for unit in units:
                loss = train_ddp.criterion(net(pixels[list(unit.indices)]), labels[list(unit.indices)])
                (loss * unit.weight).backward()
                if total is not None:
                    total.add()
            done = total is None or total.read()
        adam.step()
        if total is not None:
            total.commit()
        position = plan.advance(position)
    return net, plan


def relative(ours: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of an element, relative to the largest element of its tensor."""
    return max(((ours[name] - other[name]).abs().max() / ours[name].abs().max()).item() for name in ours)


if __name__ == "__main__":
    main()
