"""Slots: a state comes back as it was, and nothing but a complete and undamaged slot is loaded."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.bounded import often
from tests.unit.checkpointing.checkpoint_states import assert_same, training_state
from tests.unit.checkpointing.snapshots.contents import copied
from tests.unit.children import run_python
from torchft import _keeper
from torchft.checkpointing.codec.encoding import Encoded
from torchft.checkpointing.snapshots import reading, slots
from torchft.checkpointing.snapshots.due import Due
from torchft.checkpointing.snapshots.reading import Slot
from torchft.checkpointing.snapshots.slots import Header, Section, SlotError

HEADER = Header("job", "group", 0, 1, step=7, batches=14, quorum=3, saved=0.0)


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(_keeper.ROOT_ENV, str(tmp_path / "memory"))
    monkeypatch.setattr(slots, "PIECE", 4096)  # regions of several pieces
    return tmp_path / "memory"


@pytest.fixture
def folder() -> Path:
    path = slots.folder_of("job", "group", 0)
    assert slots.hold(path) is not None
    return path


def write(path: Path, state: Any, header: Header = HEADER) -> None:
    for _ in slots.write(path, header, Encoded(state)):
        pass


def opened(path: Path, copy: bool) -> Slot:
    return copied(path) if copy else reading.mapped(path)


@pytest.mark.parametrize("copy", [False, True])
def test_a_large_slot_is_read_by_several_threads(
    folder: Path, copy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_RUN", 20_000)
    state = {str(i): torch.randn(3000 + i) for i in range(20)}
    write(folder / "0", state)
    assert_same(opened(folder / "0", copy).state(), state)
    bad = bytearray((folder / "0").read_bytes())
    bad[slots.PAGE + 100_000] ^= 1
    (folder / "0").write_bytes(bad)
    with pytest.raises(SlotError, match="region 8 is damaged"):
        opened(folder / "0", copy)


@pytest.mark.parametrize("copy", [False, True])
def test_all_kinds_of_values_come_back(folder: Path, copy: bool) -> None:
    state = {**training_state(), "large": torch.arange(10_000, dtype=torch.int16), "none": torch.empty(0)}
    write(folder / "0", state)
    slot = opened(folder / "0", copy)
    assert_same(slot.state(), state)
    assert slot.header == slots.read_header(folder / "0")
    assert slot.header._replace(saved=0.0, nbytes=0, structure=Section(), regions=Section()) == HEADER
    assert {region.device for region in slot.regions} == {"cpu"}


def test_a_sharded_tensor_comes_back(folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
        sharded = distribute_tensor(torch.randn(40, 300), mesh, [Shard(0)])
        write(folder / "0", {"w": sharded})
        got: Any = reading.mapped(folder / "0").state()["w"]
        assert got.placements == sharded.placements and got.device_mesh == sharded.device_mesh
        assert torch.equal(got.to_local(), sharded.to_local())
    finally:
        dist.destroy_process_group()
    tree = reading.mapped(folder / "0").tree  # without torch.distributed, too
    assert tree[0] == "d" and tree[2][0] == "D"


def test_what_is_loaded_changes_the_slot_in_no_way(folder: Path) -> None:
    write(folder / "0", {"w": torch.ones(5000)})
    before = (folder / "0").read_bytes()
    reading.mapped(folder / "0").state()["w"].zero_()
    assert (folder / "0").read_bytes() == before
    slot = copied(folder / "0")
    write(folder / "0", {"w": torch.zeros(5000)})
    assert torch.equal(slot.state()["w"], torch.ones(5000))


def test_a_smaller_state_in_the_same_slot(folder: Path) -> None:
    write(folder / "0", {"w": torch.ones(50_000)})
    write(folder / "0", {"w": torch.ones(50)})
    assert torch.equal(reading.mapped(folder / "0").state()["w"], torch.ones(50))


@pytest.mark.parametrize("old", [False, True])
def test_a_writer_that_ends_at_any_write_leaves_no_slot(
    folder: Path, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    state = {"w": torch.randn(5000), "b": torch.randn(3), "steps": list(range(20))}
    real, left = os.pwrite, [0]

    class Ended(BaseException):
        pass

    def pwrite(file: int, data: Any, offset: int) -> int:
        """Writes the first part of the data, then ends the writer, when its turn has come."""
        left[0] -= 1
        if left[0] < 0:
            real(file, bytes(data)[: min(100, len(data) // 2)], offset)
            raise Ended
        return real(file, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    torn = 0
    while True:
        (folder / "0").unlink(missing_ok=True)
        if old:
            left[0] = sys.maxsize
            write(folder / "0", {"w": torch.zeros(5000)}, HEADER._replace(step=5))
        left[0] = torn
        try:
            write(folder / "0", state)
            break
        except Ended:
            torn += 1
        for copy in (False, True):
            with pytest.raises(
                SlotError, match=r"/0(: (it is not complete|its header is damaged|it begins with)| ended)"
            ):
                opened(folder / "0", copy)
    assert torn >= 9  # page, 6 pieces of two regions, structure, table, page
    assert torch.equal(reading.mapped(folder / "0").state()["w"], state["w"])


def test_flipped_bits_are_never_loaded(folder: Path) -> None:
    older = {"w": torch.zeros(5000)}
    write(folder / "0", older, HEADER._replace(step=6))
    newer = {**training_state(), "w": torch.randn(5000)}
    write(folder / "1", newer)
    good = (folder / "1").read_bytes()
    ends = [region.offset + region.length for region in reading.mapped(folder / "1").regions]
    between = {at for end in ends for at in range(end, slots.aligned(end))}
    structure = slots.read_header(folder / "1").structure
    draw = random.Random(46)
    places = [draw.randrange(8 * len(good)) for _ in range(often(1600))]
    places += [draw.randrange(8 * slots.PAGE) for _ in range(often(400))]  # the header
    places += [8 * structure[0] + draw.randrange(8 * (len(good) - structure[0])) for _ in range(often(400))]
    loaded = 0
    for place in places:
        bad = bytearray(good)
        bad[place // 8] ^= 1 << place % 8
        (folder / "1").write_bytes(bad)
        said: list[str] = []
        for path, _ in slots.found("job", "group", 0, said.append):
            try:
                slot = reading.mapped(path)
            except SlotError as error:
                said.append(str(error))
                continue
            loaded += 1
            if place // 8 in between:  # nothing is read there
                assert_same(slot.state(), newer)
                said.append(f"{folder}/1: no harm is done")
                break
            assert path.name == "0" and torch.equal(slot.state()["w"], older["w"])
        assert len(said) == 1 and said[0].startswith(f"{folder}/1: "), place
    assert loaded == len(places)


@pytest.mark.parametrize(
    "change",
    [
        lambda page: b"TFTSLOT2" + page[8:],
        lambda page: b"",
        lambda page: page[:100],
    ],
)
def test_another_version_and_short_files(folder: Path, change: Any) -> None:
    write(folder / "0", {"w": torch.ones(3)})
    (folder / "0").write_bytes(change((folder / "0").read_bytes()))
    with pytest.raises(SlotError, match=r"another version|not complete|No such file"):
        slots.read_header(folder / "0")


def test_a_header_of_another_version(folder: Path) -> None:
    write(folder / "0", {"w": torch.ones(3)})
    raw = (folder / "0").read_bytes()
    _, length, _ = slots._LEAD.unpack_from(raw)
    fields = json.loads(raw[slots._LEAD.size : slots._LEAD.size + length])
    del fields["step"]
    text = json.dumps(fields).encode()
    page = slots._LEAD.pack(slots.MAGIC, len(text), slots.zlib.crc32(text)) + text
    (folder / "0").write_bytes(page.ljust(slots.PAGE, b"\0") + raw[slots.PAGE :])
    with pytest.raises(SlotError, match="its header is of another version: KeyError\\('step'\\)"):
        slots.read_header(folder / "0")


def test_no_room(folder: Path) -> None:
    write(folder / "1", {"w": torch.ones(3)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(SlotError, match=r"/0: no room for a copy of \d{6} bytes: File too large"):
            write(folder / "0", {"w": torch.ones(50_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(SlotError, match="not complete"):
        slots.read_header(folder / "0")
    assert slots.read_header(folder / "1").step == 7


def test_a_header_that_does_not_fit(folder: Path) -> None:
    with pytest.raises(SlotError, match=r"header of a slot takes \d+ bytes, and at most 4080 fit"):
        write(folder / "0", {"w": torch.ones(3)}, HEADER._replace(disk=Due("x" * 5000, "k")))


def test_the_folder_is_private(memory: Path) -> None:
    path = slots.folder_of("a/b c", "..", 3)
    assert path == memory / "a%2Fb%20c" / "%2E%2E" / "rank-3"
    assert stat.S_IMODE(memory.stat().st_mode) == 0o700
    memory.chmod(0o777)
    with pytest.raises(SlotError, match=r"TORCHFT_SNAPSHOT_MEMORY\), belongs to user \d+ with mode 777"):
        slots.root()


def test_the_folder_of_another_user(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots.root()
    monkeypatch.setattr(os, "getuid", lambda: memory.stat().st_uid + 1)
    with pytest.raises(SlotError, match=r"belongs to user \d+ with mode 700: it must be this user's"):
        slots.root()


def test_no_folder(memory: Path) -> None:
    memory.write_text("")
    with pytest.raises(SlotError, match="memory, the folder of snapshots"):
        slots.root()


def test_one_trainer_holds_the_slots_of_a_rank(folder: Path) -> None:
    assert slots.hold(folder) is None
    other = slots.hold(folder.parent / "rank-1")
    assert other is not None
    take = "import sys; from pathlib import Path; from torchft.checkpointing.snapshots.slots import hold; "
    take += f"sys.exit(hold(Path({str(folder.parent / 'rank-1')!r})) is None)"
    assert run_python(take).returncode == 1
    slots.let_go(other)
    assert run_python(take).returncode == 0


def test_a_folder_that_is_removed_while_a_trainer_begins_is_made_again(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the writer of the host, which sees no slots in the folder of the job."""
    real, removed = os.open, []

    def opened(path: Any, *args: Any, **more: Any) -> int:
        if not removed and str(path).startswith(str(memory)):
            removed.append(path)
            shutil.rmtree(memory / "job")
        return real(path, *args, **more)

    monkeypatch.setattr(os, "open", opened)
    assert slots.hold(memory / "job" / "group" / "rank-1") is not None and removed


@pytest.mark.slow
def test_a_child_that_outlives_the_trainer_holds_no_slots(folder: Path) -> None:
    """As a worker of a DataLoader, which looks every five seconds whether its parent lives."""
    rank = folder.parent / "rank-1"
    trainer = f"""
import os, time
from pathlib import Path
from torchft.checkpointing.snapshots.slots import hold
assert hold(Path({str(rank)!r})) is not None
if os.fork():
    os.kill(os.getpid(), 9)
print("forked", flush=True)
time.sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-c", trainer], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"forked\n"
        assert child.wait(30) == -9
        assert slots.hold(rank) is not None
    finally:
        os.killpg(child.pid, 9)
        child.communicate()


def test_slots_of_all_groups_are_found_newest_first(folder: Path) -> None:
    for group, step, quorum in (("group", 7, 3), ("group", 5, 3), ("a", 7, 3), ("a", 6, 3), ("b", 7, 2)):
        path = slots.folder_of("job", group, 0)
        path.mkdir(parents=True, exist_ok=True)
        name = "1" if (path / "0").exists() else "0"
        write(path / name, {}, HEADER._replace(group=group, step=step, quorum=quorum))
    write_elsewhere = slots.folder_of("another job", "group", 0)
    write_elsewhere.mkdir(parents=True)
    write(write_elsewhere / "0", {}, HEADER._replace(job="another job", step=100))
    slots.folder_of("job", "c", 0).mkdir(parents=True)
    (slots.folder_of("job", "c", 0) / "0").write_bytes(bytes(5000))
    said: list[str] = []
    got = [(h.group, h.step, h.quorum) for _, h in slots.found("job", "group", 0, said.append)]
    assert got == [("group", 7, 3), ("a", 7, 3), ("b", 7, 2), ("a", 6, 3), ("group", 5, 3)]
    assert len(said) == 1 and "c/rank-0/0: it is not complete" in said[0]


def test_a_job_that_lives_keeps_its_slots_from_another_one_of_its_name(folder: Path) -> None:
    write(folder / "0", {})
    of = slots.folder_of("job", "other", 0)
    lock = slots.hold(of, "http://a:1")
    assert lock is not None
    write(of / "0", {}, HEADER._replace(group="other", step=8))

    def found(lighthouse: str, said: list[str]) -> list[int]:
        return [header.step for _, header in slots.found("job", "new", 0, said.append, lighthouse)]

    said: list[str] = []
    assert found("http://b:1", said) == []
    assert len(said) == 2 and "with the lighthouse ?; give each" in said[0]
    assert "other/rank-0/0: it is of another job, which lives, with the lighthouse http://a:1" in said[1]
    assert found("http://a:1", []) == [8]
    slots.let_go(lock)
    assert found("http://b:1", []) == [8], "it has ended, and this is the next one"


def test_removed_slots_leave_no_folder(folder: Path, memory: Path) -> None:
    write(folder / "0", {"w": torch.ones(3)})
    other = slots.folder_of("job", "group", 1)
    slots.hold(other)
    slots.remove(folder)
    assert not folder.exists() and other.exists()
    slots.remove(other)
    assert list(memory.iterdir()) == []


OLD, NEW = HEADER._replace(step=5, saved=1.0), HEADER._replace(step=6, saved=2.0)


@pytest.mark.parametrize(
    ("headers", "kept", "number"),
    [
        ([None, None], (), 0),
        ([OLD, None], (), 1),
        ([None, NEW], (), 0),
        ([OLD, NEW], (), 0),
        ([NEW, OLD], (), 1),
        ([OLD, NEW], (5,), 1),
        ([OLD, NEW], (5, 6), 0),
        ([OLD, None], (5,), 1),
    ],
)
def test_which_slot_is_written(headers: list[Header | None], kept: tuple[int, ...], number: int) -> None:
    found = [(Path(str(i)), header) for i, header in enumerate(headers)]
    assert slots.pick(found, lambda header: header.step in kept) == Path(str(number))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/some/where/train.py", "--lr", "3"])
    monkeypatch.delenv(slots.JOB_ENV, raising=False)


def test_the_name_of_a_job(script: None, monkeypatch: pytest.MonkeyPatch) -> None:
    first = slots.job_name()
    assert first.startswith("train-") and len(first) == len("train-") + 8
    assert slots.job_name() == first
    monkeypatch.setattr(sys, "argv", ["/some/where/train.py", "--lr", "4"])
    assert slots.job_name() != first
    monkeypatch.setenv(slots.JOB_ENV, "mine")
    assert slots.job_name() == "mine"
