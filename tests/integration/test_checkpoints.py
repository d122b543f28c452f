"""Checkpoints of a `torchft.Job`: made of copies in memory while it trains on, and what it resumes from."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import torchft
from tests.integration.cluster import Cluster, Rank, results
from tests.integration.test_job import SETTINGS, STEPS, Count, Loop, dataset, one_process, parts
from tests.unit.checkpointing.snapshots.contents import copied
from torchft import _keeper
from torchft._job.checkpoints import Checkpoints
from torchft._manager.snapshots.copies import Snapshots
from torchft.checkpointing.codec.encoding import Encoded
from torchft.checkpointing.snapshots import disk, folders, slots
from torchft.checkpointing.snapshots.writer import FolderWriter, Writer

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),  # PyTorch 2.7's own writer
]


def test_a_job_resumes_from_its_newest_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(rank: Rank) -> bool:
        rank.crash()
        return True

    def run(loop: Loop) -> Optional[torch.Tensor]:
        with Cluster() as cluster:
            return results(cluster.start(loop, 0))[0]

    checkpoints = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
    assert run(Loop(job=checkpoints, events={(0, 5): crash})) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3", "step-4", "step-5"]

    resumed = Loop(job=checkpoints)
    ended = run(resumed)
    assert ended is not None
    torch.testing.assert_close(ended, one_process()[0], rtol=1e-9, atol=1e-12)
    assert sorted(resumed.losses) == [5, 6, 7]
    assert "goes on from step 5, of " in caplog.text  # a warning, which is shown without a setting

    newest = tmp_path / f"step-{STEPS}"

    def checksum(path: Path, read: Callable[[Path], tuple[int, int]] = folders.checksum) -> tuple[int, int]:
        if path.parent == newest:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read(path)

    with monkeypatch.context() as disk_fails:
        disk_fails.setattr(folders, "checksum", checksum)
        again = Loop(job=checkpoints)
        run(again)
    assert sorted(again.losses) == [7]
    assert f"the checkpoint {newest} cannot be read, so an older state was loaded: OSError" in caplog.text
    assert not list(tmp_path.glob("damaged-*"))

    (newest / ".metadata").write_bytes(b"torn")
    again = Loop(job=checkpoints)
    run(again)
    assert sorted(again.losses) == [7]
    assert (
        f"the checkpoint {newest} is damaged, so an older state was loaded: .metadata has 4 bytes"
        in caplog.text
    )
    assert newest.with_name(f"damaged-{newest.name}").exists()

    for _, checkpoint in folders.complete(tmp_path):
        (checkpoint / ".metadata").unlink()
    with pytest.raises(
        ValueError, match=r"(?s)no checkpoint can be loaded: .*step-7.*step-6.*remove these folders"
    ):
        run(Loop(job=checkpoints))
    assert len(folders.complete(tmp_path)) == 3  # so that the next start says so as well


def test_a_job_resumes_from_a_checkpoint_of_its_script_and_refuses_that_of_another(tmp_path: Path) -> None:
    net, adam, schedule = parts()

    def loop(rank: Rank, save: bool = False) -> int:
        job = torchft.Job(manager=rank.start_manager(), device="cpu", checkpoint_dir=tmp_path)
        job.prepare(net, adam, schedule)
        job.loader(dataset(), **SETTINGS)
        if save:
            job.manager.load_state_dict({"step": 5, "batches_committed": 5})
            dcp.save(job._checkpoint(), checkpoint_id=tmp_path / "step-5", no_dist=True)
        return job.step

    with Cluster() as cluster:
        assert results(cluster.start(partial(loop, save=True), 0)) == [5]
    with Cluster() as cluster:
        assert results(cluster.start(loop, 0)) == [5]
    (tmp_path / "step-6").mkdir()  # which another process of the script is writing
    with Cluster() as cluster:
        assert results(cluster.start(loop, 0)) == [5]
    assert (tmp_path / "step-6").is_dir()
    shutil.rmtree(tmp_path / "step-5")
    dcp.save({"model": torch.ones(2)}, checkpoint_id=tmp_path / "step-6", no_dist=True)
    with (
        Cluster() as cluster,
        pytest.raises(ValueError, match=r"(?s)step-6 cannot be loaded: .*remove its folder"),
    ):
        results(cluster.start(loop, 0))


def test_a_checkpoint_has_what_the_loop_does_after_a_commit(tmp_path: Path) -> None:
    def run(until: int) -> int:
        def loop(rank: Rank) -> int:
            job = torchft.Job(
                manager=rank.start_manager(), device="cpu", checkpoint_dir=tmp_path, checkpoint_every=1
            )
            net, adam, schedule = parts()
            model, _, _ = job.prepare(net, adam, schedule)
            count = job.state("count", Count())
            for step in job.loader(dataset(), **SETTINGS):
                if job.step == until:
                    rank.crash()
                    return 0
                for x, y in step:
                    step.backward(nn.functional.mse_loss(model(x), y))
                if step.commit():
                    count.steps += 1
            return int(count.steps)

        with Cluster() as cluster:
            return results(cluster.start(loop, 0))[0]

    run(until=5)
    assert run(until=STEPS) == STEPS


@contextmanager
def host(others: float = 5) -> Generator[Callable[[Callable[[], bool]], None]]:
    """A host with a keeper and its writer. Yields what waits for something that they do."""
    keeper = os.open(slots.root() / "keeper.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(keeper, fcntl.LOCK_EX)
    writer = Writer(slots.root(), partial(FolderWriter, others=others, retry=0.1))
    ended, looked = threading.Event(), threading.Condition()

    def look() -> None:
        while not ended.wait(0.02):
            writer.look()
            with looked:
                looked.notify_all()

    thread = threading.Thread(target=look)
    thread.start()

    def until(done: Callable[[], bool]) -> None:
        with looked:
            assert looked.wait_for(done, timeout=60)

    try:
        yield until
    finally:
        ended.set()
        thread.join()
        writer.end()
        os.close(keeper)


def steps(folder: Path) -> list[int]:
    return [step for step, _ in folders.complete(folder)]


def test_the_writer_makes_them_of_copies_also_that_of_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Checkpoints, "_write")
    loop = Loop(
        settings={"snapshots": 3},
        job={"checkpoint_dir": tmp_path / "new", "checkpoint_every": 100},
        start_with=2,
    )
    # So long does no group write the part of another one, which has given its state another name.
    with host(others=100) as until, Cluster(min_replicas=2) as cluster:
        ended = results(*(cluster.start(loop, group) for group in range(2)))
        until(lambda: steps(tmp_path / "new")[-1:] == [STEPS])
        until(lambda: not any(slots.root().glob("*/*/rank-*")))
    weights = {name: torch.zeros_like(p) for name, p in parts()[0].state_dict().items()}
    dcp.load({"model": weights}, checkpoint_id=tmp_path / "new" / f"step-{STEPS}", no_dist=True)
    assert torch.equal(torch.cat([each.flatten() for each in weights.values()]), ended[0])
    assert len(list((tmp_path / "new" / f"step-{STEPS}").glob("*.distcp"))) == 2  # each group wrote a part


@pytest.mark.slow
def test_training_goes_on_while_the_disk_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, write = threading.Event(), disk.write

    def hanging(*args: Any, **settings: Any) -> Any:
        assert goes_on.wait(60)
        return write(*args, **settings)

    monkeypatch.setattr(disk, "write", hanging)
    loop = Loop(settings={"snapshots": 1}, job={"checkpoint_dir": tmp_path, "checkpoint_every": 1})
    with host() as until:
        with Cluster() as cluster:
            results(cluster.start(loop, 0))
        assert sorted(loop.losses) == list(range(STEPS)) and steps(tmp_path) == []
        goes_on.set()
        until(lambda: bool(steps(tmp_path)))
        until(lambda: not any(slots.root().glob("*/*/rank-*")))
    assert folders.damage(folders.complete(tmp_path)[-1][1]) is None


@pytest.mark.parametrize("newer", ["memory", "disk"])
def test_the_newer_of_copy_and_checkpoint_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newer: str
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(
        "torchft._job.checkpoints._load",
        lambda checkpoint, state, load: loaded.append(checkpoint.name) or load(_read(checkpoint, state)),
    )
    every = {"memory": (1, 3), "disk": (3, 4)}[newer]
    loop = Loop(
        settings={"snapshots": every[0]},
        job={"checkpoint_dir": tmp_path, "checkpoint_every": every[1]},
        events={(0, 5): _crash},
    )
    with Cluster() as cluster:
        results(cluster.start(loop, 0))
    assert steps(tmp_path) == {"memory": [3], "disk": [4]}[newer]  # there is no keeper: the rank wrote it
    with Cluster() as cluster:
        ended = results(cluster.start(loop, 0))[0]
    assert loaded == {"memory": [], "disk": ["step-4"]}[newer]
    torch.testing.assert_close(ended, one_process()[0], rtol=1e-9, atol=1e-12)


def _crash(rank: Rank) -> bool:
    rank.crash()
    return True


def _read(checkpoint: Path, state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    read = state()
    dcp.load(read, checkpoint_id=checkpoint, no_dist=True)
    return read


def test_a_rank_without_room_for_copies_writes_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(slots, "_put", full)
    loop = Loop(settings={"snapshots": 1}, job={"checkpoint_dir": tmp_path, "checkpoint_every": 4})
    with host(), Cluster() as cluster:
        results(cluster.start(loop, 0))
    # At step 1 copies end for lack of room.
    assert steps(tmp_path) == [4, 8]

    monkeypatch.undo()
    begin = Snapshots.begin

    def late(snapshots: Snapshots, position: Any) -> None:
        if position.step == 4:
            monkeypatch.setattr(slots, "_put", full)
        begin(snapshots, position)

    monkeypatch.setattr(Snapshots, "begin", late)
    other = tmp_path / "other"
    loop = Loop(settings={"snapshots": 1}, job={"checkpoint_dir": other, "checkpoint_every": 4})
    monkeypatch.setenv(_keeper.ROOT_ENV, str(tmp_path / "memory"))
    with host(), Cluster() as cluster:
        results(cluster.start(loop, 0))
    assert steps(other) == [5, 8]  # in place of 4, whose copy failed


def test_no_rank_waits_for_one_without_slots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One whose slots another process holds, for example: all ranks agree before they use a collective."""
    from types import SimpleNamespace

    from torchft._job import checkpoints

    asked: list[bool] = []
    monkeypatch.setattr(checkpoints, "_all", lambda each: bool(asked.append(each)))
    monkeypatch.delattr(checkpoints, "_of_rank_0")
    for works in (False, True):
        snapshots = SimpleNamespace(on=True, works=works)
        manager: Any = SimpleNamespace(
            _snapshots=snapshots, _settings=SimpleNamespace(group_world_size=2), current_step=lambda: 0
        )
        assert not Checkpoints(None, 1, manager)._load_resharded(-1, dict, lambda state: None)
    assert asked == [False, True]


def test_a_full_disk_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "file")

    monkeypatch.setattr(disk, "write", full)
    loop = Loop(job={"checkpoint_dir": tmp_path, "checkpoint_every": 4})
    with Cluster() as cluster:
        results(cluster.start(loop, 0))
    assert f"{tmp_path}/step-4 was not written: [Errno 28] No space left on device" in caplog.text
    assert sorted(loop.losses) == list(range(STEPS)) and steps(tmp_path) == []


@pytest.mark.parametrize("damaged", [False, True])
def test_copies_of_another_number_of_ranks_are_loaded_by_pytorch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: bool
) -> None:
    loop = Loop(settings={"snapshots": 1}, events={(0, 5): _crash})
    with Cluster() as cluster:
        results(cluster.start(loop, 0))
    (folder,) = slots.root().glob("*/*/rank-0")
    copies = [(name, slots.read_header(folder / name), copied(folder / name)) for name in "01"]
    # As if the group had two ranks, with equal parameters.
    for name, header, slot in copies:
        for rank in range(2):
            path = folder.with_name(f"rank-{rank}") / name
            path.parent.mkdir(exist_ok=True)
            of = header._replace(group_rank=rank, group_world_size=2)
            for _ in slots.write(path, of, Encoded(slot.state())):
                pass
    newest = max(copies, key=lambda copy: copy[1].step)
    if damaged:
        with open(folder / newest[0], "r+b") as file:
            file.seek(slots.PAGE)
            file.write(b"torn")
    again = Loop(settings=loop.settings)
    with Cluster() as cluster:
        ended = results(cluster.start(again, 0))[0]
    torch.testing.assert_close(ended, one_process()[0], rtol=1e-9, atol=1e-12)
    assert min(again.losses) == newest[1].step - damaged
    assert not list(slots.root().glob("*/resharded-*"))
    told = f"the copies of step {newest[1].step}, of 2 ranks, are not loaded: {folder / newest[0]}: region 0"
    assert (told in caplog.text) == damaged
