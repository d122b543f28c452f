"""The TorchX component on TorchX's local scheduler."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from processes import HERE, ours_path
from upstream import client_path

from torchft.coordination import LighthouseServer

pytestmark = [
    pytest.mark.filterwarnings("default"),  # TorchX's own
    pytest.mark.timeout(300),
]


@pytest.fixture(autouse=True)
def torchx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(client_path("torchx"))])


# Test_roles checks the commands that TorchX would run, and test_torchft_run restarts a group.
@pytest.mark.slow
def test_groups_of_an_app_train_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One group fails at first, and torchrun restarts it."""
    from torchx.runner import get_runner

    from torchft.torchx import hsdp

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=60_000)
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", lighthouse.address())
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    app = hsdp(
        str(tmp_path),
        "fail_once",
        replicas=2,
        workers_per_replica=2,
        max_restarts=1,
        script=str(Path(HERE) / "torchx_script.py"),
        env={"PYTHONPATH": str(ours_path()), "OMP_NUM_THREADS": "1"},
        image=str(tmp_path),
    )
    try:
        with get_runner() as runner:
            handle = runner.run(app, scheduler="local_cwd", cfg={"log_dir": str(tmp_path / "logs")})
            status = runner.wait(handle, wait_interval=0.5)
    finally:
        lighthouse.shutdown()
    assert status is not None and status.state.name == "SUCCEEDED", status
    assert (tmp_path / "failed-0").exists() and (tmp_path / "failed-1").exists()
    reports = [
        json.loads((tmp_path / f"{group}-{rank}.json").read_text()) for group in range(2) for rank in range(2)
    ]
    assert reports == [{"committed": True, "mean": 1.5, "visible": ""}] * 4


def test_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchft.torchx import hsdp

    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    monkeypatch.delenv("TORCH_NCCL_DUMP_ON_TIMEOUT", raising=False)
    app = hsdp(
        "--steps", "5", replicas=3, workers_per_replica=4, gpu=4, env={"A": "b", "NUM_REPLICA_GROUPS": "9"}
    )
    assert app.name == "torchft" and [role.name for role in app.roles] == [
        "replica_0",
        "replica_1",
        "replica_2",
    ]
    (run,) = {role.env["TORCHFT_RUN_ID"] for role in app.roles}
    for group, role in enumerate(app.roles):
        assert role.entrypoint == "torchrun" and role.num_replicas == 1
        assert role.args[-3:] == ["train_ddp.py", "--steps", "5"] and "--nproc_per_node=4" in role.args
        assert role.env == {
            "REPLICA_GROUP_ID": str(group),
            "NUM_REPLICA_GROUPS": "9",
            "TORCHFT_LIGHTHOUSE": "http://localhost:29510",
            "TORCHFT_RUN_ID": run,
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
            "A": "b",
        }
        assert role.resource.gpu == 4 and role.resource.cpu == 2 and role.resource.memMB == 1024


@pytest.mark.parametrize(
    "bad", [{"replicas": 0}, {"workers_per_replica": 0}, {"max_restarts": -1}, {"script": ""}]
)
def test_bad_input(bad: dict[str, int]) -> None:
    from torchft.torchx import hsdp

    (name,) = bad
    with pytest.raises(ValueError, match=name):
        hsdp(**bad)  # type: ignore[arg-type]
