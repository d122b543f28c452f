"""The writer of a host: it makes checkpoints of the slots that are due, and says what keeps it from that."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest
import torch

from tests.unit.checkpointing.checkpoint_states import assert_same
from tests.unit.checkpointing.snapshots.contents import load, plain
from torchft import _keeper
from torchft.checkpointing.codec.encoding import Encoded
from torchft.checkpointing.snapshots import disk, folders, slots, stored
from torchft.checkpointing.snapshots.due import FINISHED, STATUS, Due, Status, kept, read_status, unwritten
from torchft.checkpointing.snapshots.shares import WHOLE, Share
from torchft.checkpointing.snapshots.slots import Header
from torchft.checkpointing.snapshots.writer import FolderWriter, Writer

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),  # PyTorch 2.7's own writer
]


class Host:
    """The slots of a host's ranks, and its writer."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = slots.root()
        self.folder = tmp_path / "checkpoints"
        self.writer = Writer(self.root, lambda folder: FolderWriter(folder, others=0.5, retry=0.1))
        self.job = self.root / "job"

    def copy(
        self, step: int, group: int = 0, groups: int = 1, slot: str = "0", state: Any = None, **fields: Any
    ) -> Path:
        """Makes a copy of a rank, which is due."""
        to, share = Due(str(self.folder), f"key-{step}"), Share.of(group, groups, 0)
        header = Header("job", f"g{group}", 0, 1, step, 0, 3, 0.0, to, share)._replace(**fields)
        path = slots.folder_of("job", f"g{group}", header.group_rank) / slot
        path.parent.mkdir(parents=True, exist_ok=True)
        for _ in slots.write(path, header, Encoded(plain(step) if state is None else state)):
            pass
        return path

    def look_until(self, done: Callable[[], bool]) -> None:
        """Lets the writer work until something is so."""
        until = time.monotonic() + 60
        while not done():
            assert time.monotonic() < until, read_status(self.job)
            self.writer.look()
            time.sleep(0.02)

    def status(self) -> Status:
        return read_status(self.job).get(str(self.folder), Status())

    def written(self, step: int) -> None:
        """Waits for a checkpoint, and compares it."""
        self.look_until(lambda: self.status().written == step)
        assert_same(load(self.folder / f"step-{step}", plain()), plain(step))
        assert folders.damage(self.folder / f"step-{step}") is None


def large(step: int) -> Any:
    """A state that groups divide among themselves."""
    more = [torch.arange(20_000) + step + i for i in range(5)]
    return {**plain(step), "more": more, "array": np.arange(20_000) + step}


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv(_keeper.ROOT_ENV, str(tmp_path / "memory"))
    made = Host(tmp_path)
    yield made
    made.writer.end()


def test_what_is_due_is_written_once(host: Host) -> None:
    path = host.copy(10)
    host.copy(12, slot="1", disk=None)
    assert kept(slots.read_header(path), read_status(host.job))
    host.written(10)
    assert not kept(slots.read_header(path), read_status(host.job))
    made = os.stat(host.folder / "step-10").st_ino
    host.copy(20)
    host.written(20)
    assert os.stat(host.folder / "step-10").st_ino == made
    assert [step for step, _ in folders.complete(host.folder)] == [10, 20]


def test_groups_of_one_host_share_the_work(host: Host) -> None:
    host.copy(10, group=0, groups=2)
    host.copy(10, group=1, groups=2)
    host.written(10)
    assert len(list((host.folder / "step-10").glob("*.distcp"))) == 2


def test_the_part_of_a_group_that_has_failed_is_written_by_another(host: Host) -> None:
    host.copy(10, group=1, groups=3)
    host.written(10)


def test_a_part_that_is_late_is_written_before_its_group_counts_as_failed(host: Host) -> None:
    host.writer.end()
    host.writer = Writer(host.root, lambda folder: FolderWriter(folder, others=600, late=0.1))
    host.copy(10, group=0, groups=2)
    host.written(10)


def test_groups_that_have_parts_of_the_state_write_it_together(host: Host) -> None:
    """Only two of three live: each part is in one of them, and none has all."""
    for group in (0, 2):
        host.copy(10, group=group, groups=3, state=large(10), share=Share(group, 3, 2))
    host.look_until(lambda: host.status().written == 10)
    assert_same(load(host.folder / "step-10", large(0)), large(10))
    assert folders.damage(host.folder / "step-10") is None


def test_a_host_that_is_alone_in_its_folder_stores_its_parts(host: Host) -> None:
    for step in (10, 20, 30, 40, 50):
        path = host.copy(step, group=1, groups=3, state=large(step), share=Share(1, 3, 2))
        host.look_until(lambda step=step: host.status().written == step)  # type: ignore[misc]
        kept, header = stored.found(host.folder, "job")[0]
        assert header == slots.read_header(path) and kept.read_bytes() == path.read_bytes()
        assert kept.stat().st_blocks <= path.stat().st_blocks + 8
        if step == 30:
            (host.job / stored.COMPLETE).write_text('{"step": 30}')
    assert stored.found(host.folder, "another job") == []
    assert not folders.complete(host.folder) and host.status().problem is None
    # Only when a lighthouse has said that all hosts have a step, those before are deleted, but for two.
    assert [header.step for _, header in stored.found(host.folder, "job")] == [50, 40, 30, 20, 10]
    (host.job / stored.COMPLETE).write_text('{"step": 40}')
    path = host.copy(60, group=1, groups=3, state=large(60), share=Share(1, 3, 2))
    host.look_until(lambda: host.status().written == 60)
    assert [header.step for _, header in stored.found(host.folder, "job")] == [60, 50, 40, 30, 20]
    assert names(host.folder) == [f"parts-of-step-{step}" for step in (20, 30, 40, 50, 60)]
    told = json.loads((host.job / stored.STORED).read_text())
    assert told["folder"] == str(host.folder) and told["slots"][0]["share"] == [1, 3, 2]
    assert told["slots"][0]["path"] == "parts-of-step-60/g1/rank-0"


def test_a_host_that_has_all_parts_of_no_rank_stores_them(host: Host) -> None:
    """Its two ranks are of two groups. Together they have a copy of each part, and not of each rank's."""
    for rank in range(2):
        of_rank: dict[str, Any] = {"group_rank": rank, "group_world_size": 2, "share": Share(rank, 3, 2)}
        host.copy(10, group=rank, groups=3, state=large(10), **of_rank)
    host.look_until(lambda: host.status().written == 10)
    assert [header.group_rank for _, header in stored.found(host.folder, "job")] == [0, 1]
    assert not folders.complete(host.folder)


def test_a_host_with_all_parts_makes_a_checkpoint_again(host: Host) -> None:
    host.copy(10, group=1, groups=3, state=large(10), share=Share(1, 3, 2))
    host.look_until(lambda: host.status().written == 10)
    for group in (0, 1):  # a group has come to this host
        host.copy(20, group=group, groups=3, slot="1", state=large(20), share=Share(group, 3, 2))
    host.look_until(lambda: folders.complete(host.folder) != [])
    assert_same(load(host.folder / "step-20", large(0)), large(20))


def test_a_rank_that_says_nothing_is_named(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    host.copy(10, group_world_size=2)
    host.look_until(lambda: host.status().problem is not None)
    assert "step-10: nothing was said by ranks [1] for 0.5 s" in str(host.status().problem)
    assert host.status().writing is None and not folders.complete(host.folder)
    host.copy(20)  # and does not keep the next one from the disk
    host.written(20)
    assert host.status().problem is None
    assert [each.levelno for each in caplog.records if "nothing was said" in each.message] == [
        logging.WARNING
    ]


def test_a_slot_that_the_trainer_overwrites_is_not_written(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = disk.write

    def overwritten(*args: Any, **settings: Any) -> Any:
        monkeypatch.setattr(disk, "write", write)
        host.copy(20)
        return write(*args, **settings)

    monkeypatch.setattr(disk, "write", overwritten)
    host.copy(10)
    host.written(20)
    assert [step for step, _ in folders.complete(host.folder)] == [20]


def test_a_damaged_slot_is_not_written_but_that_of_another_group_is(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    path = host.copy(10, group=0, groups=2)
    with open(path, "r+b") as file:
        file.seek(slots.PAGE + 3)
        file.write(b"\xff")
    host.look_until(lambda: host.status().problem is not None)
    assert f"{path}: region 0 is damaged; it is not written" in str(host.status().problem)
    host.copy(10, group=1, groups=2)
    host.written(10)


@pytest.mark.parametrize("name", ["write", "write_metadata"])
def test_a_full_disk_is_named_and_asked_again(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    good = getattr(disk, name)

    def full(*args: Any, **settings: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", str(host.folder))

    monkeypatch.setattr(disk, name, full)
    path = host.copy(10)
    host.look_until(lambda: host.status().problem is not None)
    problem = f"{host.folder}/step-10: No space left on device: {host.folder}"
    assert host.status().problem == problem and host.status().written == -1
    assert kept(slots.read_header(path), read_status(host.job))
    monkeypatch.setattr(disk, name, good)
    host.written(10)
    assert host.status().problem is None
    (warning,) = [each.message for each in caplog.records if each.levelno == logging.WARNING]
    assert warning == f"{problem}; the job trains on, and this is tried again every 0.1 s"


def test_a_disk_that_hangs_is_named_and_keeps_only_its_folder_waiting(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, write_to = threading.Event(), disk._Checked.write

    def hanging(self: Any, data: Any) -> int:
        if "checkpoints" in threading.current_thread().name:
            assert goes_on.wait(60)
        return write_to(self, data)

    monkeypatch.setattr(disk._Checked, "write", hanging)
    host.copy(10)
    host.look_until(lambda: "the disk has not answered for" in str(host.status().problem))
    assert host.status().writing == 10  # its slot is kept
    other = host.folder.with_name("others")
    later = host.copy(20, slot="1")
    assert not kept(slots.read_header(later), read_status(host.job))
    host.copy(30, group=5, disk=Due(str(other), "k"), share=WHOLE)
    monkeypatch.setattr(disk._Checked, "write", write_to)
    host.look_until(lambda: (other / "step-30").exists())
    assert not folders.complete(host.folder)
    goes_on.set()
    host.written(20)
    assert [step for step, _ in folders.complete(host.folder)] == [10, 20]


def test_slots_of_a_finished_job_are_removed_when_they_are_written(host: Host) -> None:
    path = host.copy(10)
    (path.parent / FINISHED).touch()
    host.look_until(lambda: not host.job.exists())
    assert_same(load(host.folder / "step-10", plain()), plain(10))
    assert not host.writer.look()


def test_slots_are_not_removed_before_the_step_that_follows_one_on_a_disk_that_hangs(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer has begun with a state that no slot has any more."""
    goes_on, write_to = threading.Event(), disk._Checked.write

    def hanging(self: Any, data: Any) -> int:
        assert goes_on.wait(60)
        return write_to(self, data)

    monkeypatch.setattr(disk._Checked, "write", hanging)
    host.copy(10)
    host.look_until(lambda: host.status().writing == 10)
    (host.copy(20).parent / FINISHED).touch()
    for _ in range(3):
        host.writer.look()
    assert host.job.exists()
    goes_on.set()
    host.look_until(lambda: not host.job.exists())
    assert_same(load(host.folder / "step-20", plain()), plain(20))


def test_what_the_writer_says_of_itself_is_read_or_nothing(host: Host) -> None:
    host.copy(10)
    host.written(10)
    status = host.job / STATUS
    assert set(read_status(host.job)) == {str(host.folder)}
    for text in ("", "[]", '{"f": {"other": 1}}', "{"):
        status.write_text(text)
        assert read_status(host.job) == {}


@pytest.mark.parametrize(
    ("step", "status", "owed", "want"),
    [
        (10, None, True, True),
        (10, Status(written=9), True, True),
        (10, Status(written=10), False, False),
        (10, Status(written=5, writing=10), True, True),
        (10, Status(written=5, writing=8), True, False),
        (10, Status(written=5, problem="full"), True, True),
    ],
)
def test_which_slot_is_kept(step: int, status: Optional[Status], owed: bool, want: bool) -> None:
    header = Header("job", "g", 0, 1, step, 0, 3, 0.0, disk=Due("/f", "k"))
    told = {} if status is None else {"/f": status}
    assert unwritten(header, told) is owed
    assert kept(header, told) is want
    assert not kept(header._replace(disk=None), {}) and not unwritten(header._replace(disk=None), {})


@pytest.mark.slow
def test_the_process_writes_what_is_due_and_ends_with_its_parent(host: Host) -> None:
    host.copy(10)
    command = [sys.executable, "-m", "torchft.checkpointing.snapshots.writer", str(host.root)]
    script = f"""
import subprocess, sys
writer = subprocess.Popen({command!r})
print(writer.pid, flush=True)
sys.stdin.read()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        until = time.monotonic() + 100
        while not (host.folder / "step-10").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        second = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert second.returncode == 0 and "has a writer already" in second.stderr
    finally:
        parent.kill()
        parent.communicate()
    until = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    assert_same(load(host.folder / "step-10", plain()), plain(10))
