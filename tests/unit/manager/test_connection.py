"""The connection of a Manager's process group with the peers of a quorum."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

import torchft
from tests.unit.manager.quorums import Quorum, healing
from torchft._agreement import VERSION, announce
from torchft._manager.heal.in_passing import StillHealing
from torchft._manager.settings import HealMode
from torchft.manager import (
    TORCH_FR_DUMP_TEMP_FILE_ENV,
    ExceptionWithTraceback,
    Manager,
)
from torchft.work import _DummyWork

if TYPE_CHECKING:
    from tests.unit.manager.conftest import Fixture


def test_group_is_rebuilt_for_a_new_quorum_only(fixture: Fixture, make_quorum: Quorum) -> None:
    manager = fixture.manager()
    for quorum_id in (1, 1, 2):
        fixture.client._quorum.return_value = make_quorum(quorum_id=quorum_id)
        manager.start_quorum()
        assert manager.should_commit()
    assert fixture.pg.configure_count == 2


def test_the_flight_recorder_has_a_file_for_each_quorum(
    fixture: Fixture, make_quorum: Quorum, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TORCH_FR_DUMP_TEMP_FILE_ENV, "/tmp/trace")
    manager = fixture.manager()
    for quorum_id in (3, 4):
        fixture.client._quorum.return_value = make_quorum(quorum_id=quorum_id)
        manager.start_quorum()
        assert manager.should_commit()
        # PyTorch appends the rank.
        assert os.environ[TORCH_FR_DUMP_TEMP_FILE_ENV] == f"/tmp/trace_quorum{quorum_id}_"


def test_the_flight_recorder_is_reset_for_each_quorum(
    fixture: Fixture, make_quorum: Quorum, monkeypatch: pytest.MonkeyPatch
) -> None:
    resets: list[int] = []
    # Only PyTorch with NCCL has a flight recorder.
    recorder = torch._C._distributed_c10d
    monkeypatch.setattr(recorder, "_reset_fr_recording_nccl", lambda: resets.append(1), raising=False)
    manager = fixture.manager()
    for quorum_id, expected in ((3, 1), (3, 1), (4, 2)):
        fixture.client._quorum.return_value = make_quorum(quorum_id=quorum_id)
        manager.start_quorum()
        assert manager.should_commit()
        assert len(resets) == expected


def test_a_group_that_waits_for_its_connection_reduces_and_heals_nothing(
    fixture: Fixture, make_quorum: Quorum, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = fixture.manager(max_retries=0)
    in_passing = MagicMock(wrote=False, joining=False, announces="", mode=HealMode.IN_PASSING)
    manager._in_passing = manager._recovery.in_passing = in_passing
    monkeypatch.setattr(manager._connection, "follow", lambda *_: setattr(manager._connection, "apart", True))
    fixture.client._quorum.return_value = healing(make_quorum)
    manager.start_quorum()
    tensor = torch.ones(2)
    assert isinstance(manager.allreduce(tensor), _DummyWork) and tensor.tolist() == [0, 0]
    assert not manager.should_commit() and manager._commit_failures == 0
    error = manager.errored()
    assert error is not None and isinstance(error.original_exception, StillHealing)
    in_passing.stop.assert_called()  # pieces of an earlier step lack this step's gradient
    assert not in_passing.join.called and not manager._extras.has_peers and manager.current_step() == 0


def test_configure_gets_the_arguments_of_0_2_0(fixture: Fixture) -> None:
    configure = MagicMock()
    fixture.pg.configure = configure  # type: ignore[method-assign]
    manager = fixture.manager()
    manager.start_quorum()
    manager.wait_quorum()
    configure.assert_called_once_with(
        "store:1/torchft/1/1",
        "group_1:uuid",
        1,
        2,
        quorum_id=1,
        group_rank=1,
        group_world_size=2,
        global_ranks=[1, 3],
    )


def test_handles_are_passed_to_the_group_once(fixture: Fixture, make_quorum: Quorum) -> None:
    manager = fixture.manager()
    manager._reconfigure_pg = MagicMock()  # type: ignore[method-assign]
    fixture.client._quorum.return_value = make_quorum(reconfigure_handles=["a", "b"])
    manager.start_quorum()
    manager.wait_quorum()
    manager._reconfigure_pg.assert_called_once_with(1, ["a", "b"])


def test_reconfigure_with_handles(fixture: Fixture, make_quorum: Quorum) -> None:
    fixture.pg.reconfigure = MagicMock()  # type: ignore[method-assign]
    manager = fixture.manager()
    fixture.client._quorum.return_value = make_quorum(reconfigure_handles=["a", "b"], quorum_id=9)
    manager.start_quorum()
    manager.wait_quorum()
    (opts,) = fixture.pg.reconfigure.call_args.args
    assert opts.uuid == 9 and list(opts.handles) == ["a", "b"] and opts.timeout == timedelta(seconds=10)
    fixture.pg.reconfigure.return_value.wait.assert_called_once()


def test_a_group_with_another_version_is_named_once(
    fixture: Fixture, make_quorum: Quorum, caplog: pytest.LogCaptureFixture
) -> None:
    fixture.pg.reconfigure = MagicMock()  # type: ignore[method-assign]
    manager = fixture.manager()
    handles = [announce('{"id": "a"}', ((VERSION, version),)) for version in (torchft.__version__, "9.1.0")]
    for quorum_id in (2, 3):
        fixture.client._quorum.return_value = make_quorum(reconfigure_handles=handles, quorum_id=quorum_id)
        manager.start_quorum()
        manager.wait_quorum()
    found = [record.getMessage() for record in caplog.records if "version" in record.getMessage()]
    assert len(found) == 1
    assert (
        f"torchft's version differs: {torchft.__version__} here, 9.1.0 in group_1:uuid; allowed: " in found[0]
    )
    assert fixture.pg.reconfigure.call_count == 2, "it is no error"


@pytest.mark.parametrize(
    ("without", "named"),
    [
        (["group_0:uuid"], "missing are those of ['group_0:uuid']"),
        (["group_0:uuid", "group_1:uuid"], "the lighthouse at http://lighthouse:1 does not pass them on"),
    ],
)
def test_native_group_needs_handles(
    fixture: Fixture, make_quorum: Quorum, without: list[str], named: str
) -> None:
    class NativeLike:
        supports_reconfigure = True

        def get_reconfigure_handle(self) -> str:
            return "handle"

        def errored(self) -> None:
            return None

    fixture.client._quorum.return_value = make_quorum(replicas_without_handles=without)
    manager = fixture.manager(pg=NativeLike(), lighthouse_addr="http://lighthouse:1")
    manager.start_quorum()
    assert isinstance(manager.allreduce(torch.ones(1)), _DummyWork)
    error = manager.errored()
    assert isinstance(error, ExceptionWithTraceback) and isinstance(error.original_exception, RuntimeError)
    assert named in str(error) and "0.2.0" in str(error)
    assert not manager.should_commit()


def test_group_without_reconfiguration_is_refused(fixture: Fixture) -> None:
    with pytest.raises(ValueError, match=r"does not support reconfiguration.*enable_reconfigure=True"):
        fixture.manager(pg=object())


def test_native_group_without_reconfiguration_is_refused_before_the_environment_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    native = dist.ProcessGroup(dist.HashStore(), 0, 1)
    with pytest.raises(ValueError, match=r"enable_reconfigure=True"):
        Manager(pg=native, load_state_dict=None, state_dict=None, min_replica_size=1)
