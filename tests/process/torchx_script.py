"""A rank in the test of the TorchX component: does a step with all groups, and writes its result to a
file.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch

from torchft import Manager, ProcessGroupGloo

folder, fail_once = Path(sys.argv[1]), sys.argv[2] == "fail_once"
group, rank = os.environ["REPLICA_GROUP_ID"], os.environ["RANK"]
marker = folder / f"failed-{group}"
if fail_once and rank == "0" and not marker.exists():
    marker.touch()
    sys.exit(3)  # torchrun restarts the group
pg = ProcessGroupGloo(timeout=timedelta(seconds=60))
manager = Manager(
    pg, lambda state: None, dict, min_replica_size=2, init_sync=False, replica_id=f"torchx_{group}"
)
manager.start_quorum()
tensor = torch.tensor([float(group) + 1])
manager.allreduce(tensor).wait()
committed = manager.should_commit()
(folder / f"{group}-{rank}.json").write_text(
    json.dumps(
        {"committed": committed, "mean": tensor.item(), "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}
    )
)
manager.shutdown()
pg.shutdown()
