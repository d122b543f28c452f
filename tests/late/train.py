"""train_ddp.py on the test device: `python python/examples/demo.py --device late`."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import torchft.job  # noqa: E402
from python.examples import parts, train_demo  # noqa: E402
from tests.late import load  # noqa: E402
from torchft._job import start  # noqa: E402

late = load()
from tests.late.group import ProcessGroupLate  # noqa: E402
from tests.late.isolated import ProcessGroupBabyLate  # noqa: E402

TIMEOUT = timedelta(seconds=20)

if __name__ == "__main__":
    late.delays(parts.int_from_env("REPLICA_GROUP_ID"), 0, 200)
    # One device in each process, for any value of --device.
    sys.argv = ["cpu" if argument == "late" else argument for argument in sys.argv]
    torchft.job.pick_device = lambda name: torch.device("late:0")
    start.process_group = SimpleNamespace(  # type: ignore[assignment]
        ProcessGroupGloo=lambda: ProcessGroupLate(timeout=TIMEOUT),
        ProcessGroupBabyGloo=lambda: ProcessGroupBabyLate(timeout=TIMEOUT),
    )
    train_demo.main()
