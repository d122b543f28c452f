"""Groups of a job that use different implementations of NCCL: no step is committed, and each error names the cause."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.integration.cluster import DEADLINE, Cluster, Rank, results
from torchft.process_group import ProcessGroup, ProcessGroupNCCL


@pytest.mark.no_device
def test_each_error_names_both_implementations(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_NONBLOCKING_TIMEOUT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    # Other versions of PyTorch would refuse the setting.
    monkeypatch.setattr(dist, "ProcessGroupNCCL2", object, raising=False)
    names = ["legacy", "nccl2"]

    def make_pg(group: int) -> ProcessGroup:
        return ProcessGroupNCCL(DEADLINE, implementation=names[group])

    def loop(rank: Rank) -> list[str]:
        manager = rank.start_manager(min_replica_size=2, init_sync=False)
        errors = []
        for _ in range(2):
            manager.start_quorum()
            assert not manager.should_commit()
            error = manager.errored()
            assert error is not None
            errors.append(str(error.original_exception))
        assert manager.current_step() == 0
        return errors

    with Cluster(min_replicas=2, make_pg=make_pg) as cluster:
        of_groups = results(*(cluster.start(loop, group) for group in range(2)))
    for group, errors in enumerate(of_groups):
        for error in errors:
            assert f"{names[group]!r} here, {names[1 - group]!r} in rank" in error
            assert "TORCHFT_NCCL_IMPLEMENTATION" in error
