"""The folder of checkpoints: what is damaged is found before it is loaded, and set aside by name."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.bounded import often
from tests.unit.checkpointing.snapshots.contents import save
from torchft.checkpointing.snapshots import folders

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),  # PyTorch 2.7's own writer
]


def test_each_flipped_bit_is_found(tmp_path: Path) -> None:
    save(tmp_path, 7, parts=2)
    checkpoint = tmp_path / "step-7"
    files = sorted(checkpoint.iterdir())
    rng = random.Random(1)
    described = folders.describe(checkpoint)
    for _ in range(often(2000)):
        path = rng.choice(files)
        good = path.read_bytes()
        data = bytearray(good)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        if path.name != folders.DIGESTS:
            assert folders.damage(checkpoint) is not None
        elif folders.damage(checkpoint) is None:  # of what is not checked, and not loaded either
            found = folders.describe(checkpoint)
            assert found is not None and described is not None and found["files"] == described["files"]
        path.write_bytes(good)
    assert folders.damage(checkpoint) is None


def test_the_damage_is_named(tmp_path: Path) -> None:
    save(tmp_path, 7)
    (data,) = (tmp_path / "step-7").glob("*.distcp")
    good = data.read_bytes()
    data.write_bytes(good[:-1])
    assert f"{data.name} has {len(good) - 1} bytes" in str(folders.damage(tmp_path / "step-7"))
    data.unlink()
    assert "FileNotFoundError" in str(folders.damage(tmp_path / "step-7"))
    data.write_bytes(good)
    # Each rank of a group reads its share of the files.
    (tmp_path / "step-7" / ".metadata").write_bytes(b"torn")
    found = [folders.damage(tmp_path / "step-7", share, 2) for share in range(2)]
    assert sum(each is not None for each in found) == 1


@pytest.mark.parametrize("where", ["checksum", "read_text"])
def test_an_error_of_the_disk_says_nothing_of_the_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    save(tmp_path, 7)

    def fails(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(folders if where == "checksum" else Path, where, fails)
    found = folders.damage(tmp_path / "step-7")
    assert found is not None and not found.content and found.text.startswith("OSError: [Errno 5] ")
    if where == "read_text":
        with pytest.raises(OSError, match="Errno 5"):  # so that it is not written once more
            folders.describe(tmp_path / "step-7")


def test_two_damaged_checkpoints_of_a_step_are_kept(tmp_path: Path) -> None:
    for history in ("first", "second", "third"):
        save(tmp_path, 7, history)
        folders.set_aside(tmp_path / "step-7")
    told = {each.name: folders.describe(each) for each in tmp_path.iterdir()}
    assert {name: found and found["key"] for name, found in told.items()} == {
        "damaged-step-7": "first",
        "damaged-step-7-2": "second",
        "damaged-step-7-3": "third",
    }


def test_a_checkpoint_of_the_users_script(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-7"
    dcp.save({"w": torch.ones(100)}, checkpoint_id=checkpoint, no_dist=True)
    assert folders.damage(checkpoint) is None and folders.describe(checkpoint) is None
    (data,) = checkpoint.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:100])
    assert f"{data.name} has 100 bytes, and the last item ends at" in str(folders.damage(checkpoint))
    (checkpoint / ".metadata").write_bytes(b"torn")
    assert "UnpicklingError" in str(folders.damage(checkpoint))
    assert folders.damage(checkpoint, 1, 2) is None


def test_names(tmp_path: Path) -> None:
    assert folders.complete(tmp_path / "none") == []
    for name in ("step-10", "step-9", ".step-11.k", "step-x", "damaged-step-12"):
        (tmp_path / name).mkdir()
    assert folders.complete(tmp_path) == [(9, tmp_path / "step-9"), (10, tmp_path / "step-10")]
    folders.set_aside(tmp_path / "step-10")
    folders.set_aside(tmp_path / "step-10")  # another group has
    assert folders.complete(tmp_path) == [(9, tmp_path / "step-9")]
    assert (tmp_path / "damaged-step-10").is_dir()
    assert folders.describe(tmp_path / "step-9") is None


def test_what_was_begun_before_the_newest_is_deleted(tmp_path: Path) -> None:
    for step in range(4, 9):
        save(tmp_path, step)
    for name in (".step-7.other", ".step-8.k", ".step-9.k"):
        (tmp_path / name).mkdir()
    folders.prune(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        ".step-8.k",
        ".step-9.k",
        *(f"step-{step}" for step in (6, 7, 8)),
    ]
