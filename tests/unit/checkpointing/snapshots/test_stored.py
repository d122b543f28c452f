"""Parts of a state on disks that only their hosts see: a job goes on from them when all memory is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.unit.manager.snapshots.one_rank import Rank
from tests.unit.waiting import wait_until
from torchft import _keeper
from torchft._manager.snapshots import copies
from torchft._torchft import LighthouseServer
from torchft.checkpointing.codec.encoding import Encoded
from torchft.checkpointing.snapshots import remote, slots, stored
from torchft.checkpointing.snapshots.shares import Share
from torchft.checkpointing.snapshots.slots import Header

GROUPS = 3


def keep(tmp_path: Path, group: int, step: int) -> Path:
    """Stores the part of a group on the disk of its host, as the writer does."""
    header = Header(slots.job_name(), f"g{group}", 0, 1, step, step, 7, 0.0, share=Share(group, GROUPS, 2))
    weights = {str(i): torch.full((30_000,), float(10 * step + i)) for i in range(5)}
    slot = tmp_path / "slot"
    for _ in slots.write(slot, header, Encoded({"w": weights, "step": step})):
        pass
    return stored.store(slot, slots.read_header(slot), tmp_path / f"disk{group}", lambda: None)


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each group is on a host with a keeper of its own."""
    yield
    for root in tmp_path.glob("host*"):
        if _keeper.running(root):
            os.kill(int((root / "keeper.lock").read_text().split()[1]), signal.SIGKILL)


def restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int = -1
) -> tuple[dict[int, int], list[str]]:
    """Starts the groups of all hosts but a lost one after all memory is lost: the step of each, and what they
    have said.
    """
    server = LighthouseServer("127.0.0.1:0", 1)
    lighthouse = f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    steps, said = {}, []
    groups = [group for group in range(GROUPS) if group != lost]
    try:
        for last in (False, True):  # the second time all keepers have told what they have
            for group in groups:
                (tmp_path / f"host{group}").mkdir(mode=0o700, exist_ok=True)
                monkeypatch.setenv(_keeper.ROOT_ENV, str(tmp_path / f"host{group}"))
                state = {"w": {str(i): torch.zeros(30_000) for i in range(5)}, "step": 0}
                rank = Rank(state, group=f"g{group}", lighthouse=lighthouse if last else None, life=int(last))
                rank.snapshots.folder = tmp_path / f"disk{group}"
                steps[group] = rank.restore()
                rank.snapshots.close(finished=False)
                _keeper.ensure(slots.job_name(), lighthouse)
                if last:
                    said += rank.said
                    if rank.loaded is not None:
                        step = rank.loaded["step"]
                        for name, weight in rank.loaded["w"].items():
                            assert weight.eq(10 * step + int(name)).all()
            if not last:
                wait_until(
                    lambda: (
                        len(
                            {
                                one.source.where.partition("/snapshots/")[0]
                                for one in remote.held(lighthouse, slots.job_name())
                            }
                        )
                        == len(groups)
                    )
                )
    finally:
        server.shutdown()
    return steps, said


@pytest.mark.usefixtures("keepers", "hosts")
def test_any_one_disk_may_be_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (10, 20):
        for group in range(GROUPS):
            keep(tmp_path, group, step)
    torn = keep(tmp_path, 0, 20)
    with open(torn, "r+b") as file:  # and one region of those that are left is damaged
        file.seek(slots.PAGE + 5)
        file.write(b"\xff")
    shutil.rmtree(tmp_path / "disk1")
    steps, said = restored(tmp_path, monkeypatch, lost=1)
    # Region 0 is in the parts of groups 0 and 2.
    assert steps == {0: 20, 2: 20}, said


@pytest.mark.slow
@pytest.mark.usefixtures("keepers", "hosts")
def test_a_step_that_not_all_hosts_have_is_named_and_the_one_before_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "HOSTS_SEC", 1.0)
    for group in range(GROUPS):
        keep(tmp_path, group, 10)
    keep(tmp_path, 2, 20)
    steps, said = restored(tmp_path, monkeypatch)
    assert steps == {0: 10, 1: 10, 2: 10}
    assert "waits up to 1 s for the hosts that have parts [1] of step 20 on their disks" in said
    assert "the copy of step 20 is not loaded: no host that is left has its parts [1]" in said


def test_a_rank_waits_for_other_hosts_less_long_than_its_group_for_it() -> None:
    assert Rank({}).snapshots._patience == 10 == copies.HOSTS_SEC / 3, "half of this rank's timeout"


def test_a_slot_on_a_disk_is_complete_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def ended(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", ended)
    with pytest.raises(KeyboardInterrupt):
        keep(tmp_path, 0, 10)
    assert stored.found(tmp_path / "disk0", slots.job_name()) == []
    monkeypatch.setattr(Path, "rename", rename)
    path = keep(tmp_path, 0, 10)
    assert stored.found(tmp_path / "disk0", slots.job_name()) == [(path, slots.read_header(path))]
    assert path.stat().st_blocks * 512 < 4 * 120_000 + 10 * 4096


def test_of_many_slots_the_keeper_is_told_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(16, 21):
        keep(tmp_path, 0, step)
    kept = stored.found(tmp_path / "disk0", slots.job_name())
    monkeypatch.setattr(stored, "_MOST", 3)
    stored.tell(tmp_path, kept, tmp_path / "disk0")
    steps = [slot["step"] for slot in json.loads((tmp_path / stored.STORED).read_text())["slots"]]
    assert steps == [20, 19, 18]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": "3"}', "{"])
def test_a_step_that_no_lighthouse_has_named_deletes_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / stored.COMPLETE).write_text(text)
    assert stored.complete(tmp_path) is None
    for step in range(1, 6):
        keep(tmp_path, 0, step)
    stored.prune(tmp_path / "disk0", None)
    assert len(list((tmp_path / "disk0").iterdir())) == 5
