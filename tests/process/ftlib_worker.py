"""A member of an FTLib job that trains on digits in float64, and may be killed at a line of a rebuild.

A step trains on 32 samples chosen by its number, which the members divide. After the optimizer has stepped,
the member reports the step to its parent, with the view in which it was made.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import distribution
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from events import emit, keep_stdout_for_events
from torch import nn
from torch.nn.functional import cross_entropy

from torchft.ftlib import FTAllReduceStatus, FTLib, View, allreduce_hook
from torchft.ftlib.gossip import Gossip
from torchft.process_group import ProcessGroupDummy, ProcessGroupGloo

BATCH, LR = 32, 0.05


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Reads the file of scikit-learn's digits without importing scikit-learn, which takes seconds."""
    file = str(distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz"))
    rows = torch.from_numpy(np.loadtxt(file, delimiter=","))
    return rows[:, :-1] / 16, rows[:, -1].long()


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)).double()


def part(step: int, rank: int, size: int, samples: int) -> torch.Tensor:
    """Returns the indices of one member's part of the batch after ``step`` steps."""
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(step))
    return order[:BATCH][rank::size]


def stop_at(line: int, act: Callable[[], None]) -> None:
    """Calls a function before the n-th line that runs in ``FTLib._rebuild``."""
    count = 0

    def of_rebuild(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if count == line:
                act()
        return of_rebuild

    def tracer(frame: FrameType, event: str, _: object) -> Any:
        return of_rebuild if frame.f_code is FTLib._rebuild.__code__ else None

    sys.settrace(tracer)


def fail() -> None:
    emit("fails")
    os.kill(os.getpid(), signal.SIGKILL)


def hold(until: Path) -> None:
    """Waits for a file."""
    emit("holds")
    deadline = time.monotonic() + 100
    while not until.exists():
        assert time.monotonic() < deadline, f"{until} did not come"
        time.sleep(0.01)


def report(gossip: Gossip) -> None:
    """Reports the address, and each request for a view."""
    emit("address", address=gossip.address)
    ask = gossip.get_member_list

    def get_member_list() -> View:
        emit("asks")
        return ask()

    gossip.get_member_list = get_member_list  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("consensus")
    parser.add_argument("settings", type=json.loads)
    parser.add_argument("--name", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--stop", type=Path, required=True)  # a file with the number of the last step
    parser.add_argument("--fail-at", type=int, default=0)
    parser.add_argument("--hold-at", type=int, default=0)
    parser.add_argument("--hold-until", type=Path)
    parser.add_argument("--pace", type=float, default=0.005)  # duration of a step in seconds
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--collective-timeout", type=float, default=20)
    args = parser.parse_args()
    keep_stdout_for_events()
    seconds = {k: timedelta(seconds=v) for k, v in args.settings.items() if k in ("timeout", "expiry")}

    inputs, labels = digits()
    model = make_model(args.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    ftlib = FTLib.init(
        args.consensus,
        ProcessGroupGloo(timeout=timedelta(seconds=args.collective_timeout)),
        state_dict=model.state_dict,
        load_state_dict=model.load_state_dict,
        rebuild_timeout=timedelta(seconds=20),
        name=args.name,
        **{**args.settings, **seconds},
    )
    if isinstance(ftlib._consensus, Gossip):
        report(ftlib._consensus)
    trained = model
    if args.overlap:
        trained = nn.parallel.DistributedDataParallel(
            model, process_group=ProcessGroupDummy(0, 1), find_unused_parameters=True
        )
        trained.register_comm_hook(ftlib, allreduce_hook)
    if args.fail_at:
        stop_at(args.fail_at, fail)
    if args.hold_at:
        stop_at(args.hold_at, lambda: hold(args.hold_until))
    while not args.stop.exists() or ftlib.step < int(args.stop.read_text()):
        rank, size = ftlib.rank, ftlib.size
        mine = part(ftlib.step, rank, size, len(inputs))
        optimizer.zero_grad(set_to_none=False)
        cross_entropy(trained(inputs[mine]), labels[mine]).backward()
        status = ftlib.wait_gradients_ready(model)
        if status in (FTAllReduceStatus.SUCCESS, FTAllReduceStatus.NO_NEED):
            optimizer.step()
            emit("step", step=ftlib.step, view=ftlib._made_in, size=size)
        else:
            emit("again", status=status.value, error=str(ftlib.error))
        time.sleep(args.pace)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    emit("done", weights=weights, view=ftlib._made_in, step=ftlib.step)
    ftlib.close()


if __name__ == "__main__":
    main()
