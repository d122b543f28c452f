"""Processes that write one checkpoint together: it is complete or not there, whichever of them ends."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Optional

import pytest
import torch

from tests.unit.checkpointing.checkpoint_states import assert_same
from tests.unit.checkpointing.snapshots.contents import content, load, plain, save
from torchft.checkpointing.snapshots import disk, folders
from torchft.checkpointing.snapshots.disk import DiskError
from torchft.checkpointing.snapshots.saving import Save

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),  # PyTorch 2.7's own writer
]


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_groups_share_the_work_and_one_completes(tmp_path: Path) -> None:
    groups = [Save(tmp_path / "new" / "folder", 7, "k", 1, 2) for _ in range(2)]
    of = content(plain(7))
    for one in groups:
        one.announce(0, of)
    assert groups[0].silent() == [] and groups[0].missing() == [(0, 0), (0, 1)]
    groups[0].write((0, 0), of)
    assert groups[1].missing() == [(0, 1)] and not groups[1].done()
    groups[1].write((0, 1), of)
    for one in groups:
        one.complete()
    assert groups[0].done() and groups[1].done()
    assert names(groups[0].folder) == ["step-7"]
    assert_same(load(groups[0].folder / "step-7", plain()), plain(7))


def test_of_two_that_write_the_same_part_the_first_counts(tmp_path: Path) -> None:
    groups = [Save(tmp_path, 7, "k", 1, 1) for _ in range(2)]
    of = [content({**plain(7), "own": text}) for text in ("of group 0", "a longer one, of group 1")]
    for one, each in zip(groups, of):
        one.announce(0, each)
        one.write((0, 0), each)
    groups[1].complete()
    read = load(tmp_path / "step-7", {**plain(), "own": ""})
    assert read["own"] == "of group 0"
    assert len(list((tmp_path / "step-7").glob("*.distcp"))) == 1


def test_one_that_wrote_late_finds_it_complete(tmp_path: Path) -> None:
    late, of = Save(tmp_path, 7, "k", 1, 1), content(plain(7))
    late.announce(0, of)
    late.write((0, 0), of, holds=lambda: save(tmp_path, 7))
    late.write((0, 0), of)
    late.complete()
    assert late.done()
    assert names(tmp_path) == ["step-7"]


def test_a_part_that_has_changed_while_it_was_written_is_dropped(tmp_path: Path) -> None:
    one, of = Save(tmp_path, 7, "k", 1, 1), content(plain(7))
    one.announce(0, of)
    with pytest.raises(KeyError):
        one.write((0, 0), of, holds=lambda: {}["changed"])
    assert names(tmp_path / ".step-7.k") == ["plan-0"]


def test_another_process_goes_on_in_place_of_one_that_completes_and_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, other, of = Save(tmp_path, 7, "k", 1, 1), Save(tmp_path, 7, "k", 1, 1), content(plain(7))
    slow.announce(0, of)
    slow.write((0, 0), of)
    finish, hangs, goes_on = disk.write_metadata, threading.Event(), threading.Event()

    def hanging(*args: Any) -> Any:
        finish(*args)
        if threading.current_thread() is not threading.main_thread():
            hangs.set()
            assert goes_on.wait(60)

    monkeypatch.setattr(disk, "write_metadata", hanging)
    with ThreadPoolExecutor(1) as threads:
        ended = threads.submit(slow.complete)
        assert hangs.wait(60)
        other.complete()
        assert other.done()
        goes_on.set()
        ended.result(60)
    assert names(tmp_path) == ["step-7"]
    assert folders.damage(tmp_path / "step-7") is None


def test_the_newest_three_stay(tmp_path: Path) -> None:
    (tmp_path / ".step-1.k").mkdir(parents=True)
    (tmp_path / "notes.txt").touch()
    for step in range(1, 6):
        save(tmp_path, step)
    ahead = Save(tmp_path, 9, "k", 1, 1)
    ahead.announce(0, content(plain()))
    save(tmp_path, 6)
    assert names(tmp_path) == [".step-9.k", "notes.txt", "step-4", "step-5", "step-6"]
    assert Save(tmp_path, 3, "k", 1, 1).done()


def test_a_step_of_another_history_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 7, key="first")
    assert not Save(tmp_path, 7, "second", 1, 1).done()
    save(tmp_path, 7, key="second", make=lambda step: plain(step + 10))
    assert names(tmp_path) == ["step-7"]
    assert_same(load(tmp_path / "step-7", plain()), plain(17))


def test_what_a_script_has_written_is_not_deleted(tmp_path: Path) -> None:
    for step in (1, 6):
        save(tmp_path, step)
        (tmp_path / f"step-{step}" / folders.DIGESTS).unlink()  # a script writes no digests
    for step in range(2, 8):
        save(tmp_path, step)
    replaced = next(name for name in names(tmp_path) if name.startswith("replaced-step-6-"))
    assert names(tmp_path) == [replaced, "step-1", "step-5", "step-6", "step-7"]
    assert folders.describe(tmp_path / replaced) is None and folders.describe(tmp_path / "step-6") is not None
    assert_same(load(tmp_path / replaced, plain()), plain(6))


def test_states_that_differ_are_refused(tmp_path: Path) -> None:
    one = Save(tmp_path, 7, "k", 1, 1)
    one.announce(0, content({"w": torch.ones(2), "v": torch.ones(2)}))
    with pytest.raises(DiskError, match=r"no v at .*: the groups' states differ"):
        one.write((0, 0), content({"w": torch.ones(2)}))
    assert names(tmp_path / ".step-7.k") == ["plan-0"]


@pytest.mark.parametrize("name", ["plan-0", "part-0-0"])
def test_a_damaged_part_is_written_again(tmp_path: Path, name: str) -> None:
    one, of = Save(tmp_path, 7, "k", 1, 1), content(plain(7))
    one.announce(0, of)
    one.write((0, 0), of)
    path = tmp_path / ".step-7.k" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    again = Save(tmp_path, 7, "k", 1, 1)
    with pytest.raises(DiskError, match=f"{name} is damaged"):
        again.complete()
    again.announce(0, of)
    for unit in again.missing():
        again.write(unit, of)
    again.complete()
    assert folders.damage(tmp_path / "step-7") is None


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    save(tmp_path, 7)
    assert_same(load(tmp_path / "step-7", plain()), plain(7))


@pytest.mark.parametrize("room", [0, 1000])
def test_a_full_disk_leaves_nothing_and_the_same_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    write_to = disk._Checked.write

    def full(self: Any, data: Any) -> int:
        if self is None or self.tell() + memoryview(data).nbytes > room:
            raise OSError(errno.ENOSPC, "No space left on device", "file")
        return write_to(self, data)

    monkeypatch.setattr(disk._Checked, "write", full)
    one, of = Save(tmp_path, 7, "k", 1, 1), content(plain(7))
    one.announce(0, of)
    with pytest.raises(OSError, match="No space left"):
        one.write((0, 0), of)
    assert names(tmp_path / ".step-7.k") == ["plan-0"]
    monkeypatch.setattr(disk._Checked, "write", write_to)
    one.write((0, 0), of)
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", lambda *paths: full(None, b""))
        patch.setattr(disk, "write_metadata", lambda *of: full(None, b""))
        with pytest.raises(OSError, match="No space left"):
            one.complete()
    assert names(tmp_path) == [".step-7.k"]
    one.complete()
    assert_same(load(tmp_path / "step-7", plain()), plain(7))


def _until(number: int, folder: Path) -> Optional[int]:
    """Saves in a child process, which is killed before its change of this number to files. Returns None if
    it had fewer.
    """
    child = os.fork()
    if child == 0:
        left = number

        def event() -> bool:
            nonlocal left
            left -= 1
            return left < 0

        def hook(name: str, arguments: tuple[Any, ...]) -> None:
            changes = name in ("os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir")
            opens = name == "open" and str(arguments[0]).startswith(str(folder)) and arguments[1] != "rb"
            if (changes or opens) and event():
                os._exit(9)

        write_to = disk._Checked.write

        def torn(self: Any, data: Any) -> int:
            if event():
                write_to(self, memoryview(data)[: memoryview(data).nbytes // 2])
                self.flush()
                os._exit(9)
            return write_to(self, data)

        disk._Checked.write = torn  # type: ignore[method-assign]
        try:
            sys.addaudithook(hook)
            save(folder, 7, parts=2, make=small)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9)
    return None if status == 0 else status


def small(step: int = 0) -> dict[str, Any]:
    return {"w": torch.arange(3) + step, "v": torch.tensor(float(step))}


@pytest.mark.slow  # test_folders.py has each flipped bit
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_killed_at_each_change_of_a_file(tmp_path: Path) -> None:
    before = tmp_path / "before"
    for step in (3, 4, 5):
        save(before, step, make=small)
    number = 0
    while True:
        folder = tmp_path / "folder"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(before, folder)
        killed = _until(number, folder)
        step, checkpoint = folders.complete(folder)[-1]
        assert step in (5, 7) and folders.damage(checkpoint) is None, number
        assert_same(load(checkpoint, small()), small(step))
        other, of = Save(folder, 7, "k", 1, 2), content(small(7))
        if not other.done():
            other.announce(0, of)
            for unit in other.missing():
                other.write(unit, of)
            other.complete()
        assert other.done() and folders.damage(folder / "step-7") is None
        if number % 8 == 0 or killed is None:
            assert_same(load(folder / "step-7", small()), small(7))
            save(folder, 8, make=small)
            assert {"step-7", "step-8"} <= set(names(folder)) and not list(folder.glob(".*"))
            kinds = sorted(each.suffix for each in (folder / "step-7").iterdir())
            assert kinds == ["", ".distcp", ".distcp", ".json"]
        if killed is None:
            break
        number += 1
    assert number > 30
