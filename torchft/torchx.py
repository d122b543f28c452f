"""A TorchX component: replica groups as the roles of one app.

torchx run -s local_cwd torchft/torchx.py:hsdp --replicas 2 --script train_ddp.py -- --steps 200
"""

from __future__ import annotations

import os
import uuid
from typing import Dict, Optional

from torchx import specs  # pyrefly: ignore [missing-import]

from torchft._nccl_env import DUMP_ENV, dump_setting
from torchft._security import RUN_ENV

__all__ = ["hsdp"]

_DEFAULT_LIGHTHOUSE = "http://localhost:29510"


def hsdp(
    *script_args: str,
    replicas: int = 2,
    workers_per_replica: int = 1,
    max_restarts: int = 10,
    script: str = "train_ddp.py",
    env: Optional[Dict[str, str]] = None,
    image: str = "",
    h: Optional[str] = None,
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 1024,
) -> specs.AppDef:
    """Makes replica groups, each a torchrun on one host that restarts its workers when one fails.

    Every group gets REPLICA_GROUP_ID, NUM_REPLICA_GROUPS, TORCHFT_RUN_ID and TORCHFT_LIGHTHOUSE (of the
    submitting environment, else http://localhost:29510). The lighthouse is not part of the app.

    Args:
        script_args: arguments of the script.
        replicas: number of groups.
        workers_per_replica: ranks of a group.
        max_restarts: number of times that torchrun restarts the workers of a group.
        script: program that each rank runs.
        env: further environment variables, which override those above.
        image: location of the script, as the scheduler understands it.
        h: a named resource, which replaces cpu, gpu and memMB.
        cpu: CPUs of a group.
        gpu: GPUs of a group; with none its workers see none.
        memMB: memory of a group.

    Raises:
        ValueError: a number is out of range, or there is no script.
    """
    for name, value, least in (
        ("replicas", replicas, 1),
        ("workers_per_replica", workers_per_replica, 1),
        ("max_restarts", max_restarts, 0),
        ("gpu", gpu, 0),
    ):
        if value < least:
            raise ValueError(f"{name}={value}: at least {least} is needed")
    if not script:
        raise ValueError("script is empty: the name of what each rank runs is needed")
    shared = {
        "NUM_REPLICA_GROUPS": str(replicas),
        "TORCHFT_LIGHTHOUSE": os.environ.get("TORCHFT_LIGHTHOUSE", _DEFAULT_LIGHTHOUSE),
        RUN_ENV: uuid.uuid4().hex,
        DUMP_ENV: dump_setting(),  # a script may import torchft only after it has made its world
    }
    if gpu == 0 and h is None:
        shared.update(CUDA_VISIBLE_DEVICES="", XPU_VISIBLE_DEVICES="")
    torchrun = [
        # as --standalone, a free port for each group, because several may share a host; but that one asks for
        # the name localhost, which minimal images cannot resolve
        "--rdzv_backend=c10d",
        "--rdzv_endpoint=127.0.0.1:0",
        "--nnodes=1",
        f"--nproc_per_node={workers_per_replica}",
        f"--max_restarts={max_restarts}",
    ]
    roles = [
        specs.Role(
            name=f"replica_{group}",
            image=image,
            entrypoint="torchrun",
            args=[*torchrun, script, *script_args],
            env={"REPLICA_GROUP_ID": str(group), **shared, **(env or {})},
            num_replicas=1,
            resource=specs.resource(cpu=cpu, gpu=gpu, memMB=memMB, h=h),
        )
        for group in range(replicas)
    ]
    return specs.AppDef(name="torchft", roles=roles)
