"""Parts of the training scripts that can be tested without a job: data, end of a run, settings."""

from __future__ import annotations

import io
import os
import pickle
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch

import train_ddp
from python.examples import parts
from torchft import Manager


class Python2Pickler(pickle._Pickler):  # type: ignore[name-defined]
    """Writes pickles in the format of the CIFAR-10 files, which Python 2 wrote: str and bytes are byte
    strings.
    """

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]

    def save_string(self, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        self.write(pickle.BINSTRING + struct.pack("<i", len(data)) + data)
        self.memoize(value)

    def save_global(self, value: Any, name: str | None = None) -> None:
        module = value.__module__.replace("numpy._core", "numpy.core")
        self.write(pickle.GLOBAL + f"{module}\n{value.__name__}\n".encode())
        self.memoize(value)

    dispatch[str] = dispatch[bytes] = save_string
    dispatch[type(np.zeros)] = dispatch[type(os.system)] = dispatch[type] = save_global


def write_batch(path: Path, labels: list[int], value: int) -> None:
    pixels = np.full((len(labels), 3072), value, dtype=np.uint8)
    pixels[:, 0] = 255  # the red value of the first pixel
    pixels[:, 1024 + 31] = 0  # the green value at the end of the first row
    file = io.BytesIO()
    names = [f"image_{i}.png" for i in range(len(labels))]
    batch = {"batch_label": path.name, "labels": labels, "data": pixels, "filenames": names}
    Python2Pickler(file, protocol=2).dump(batch)
    path.write_bytes(file.getvalue())


@pytest.fixture
def cifar10(tmp_path: Path) -> Path:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for i in range(1, 6):
        write_batch(folder / f"data_batch_{i}", labels=[i, i + 1], value=51 * i)
    write_batch(folder / "test_batch", labels=[7, 8, 9], value=51)
    return tmp_path


def test_cifar10_is_read_from_its_files(cifar10: Path) -> None:
    for folder in (cifar10, cifar10 / "cifar-10-batches-py"):
        train, test = parts.load_images("cifar10", folder)
        pixels, labels, indices = train.tensors
        assert pixels.shape == (10, 3, 32, 32) and pixels.dtype == torch.float32
        assert labels.tolist() == [1, 2, 2, 3, 3, 4, 4, 5, 5, 6]
        assert indices.tolist() == list(range(10))
        assert pixels[:, 0, 0, 0].tolist() == [1.0] * 10
        assert pixels[:, 1, 0, 31].tolist() == [-1.0] * 10
        assert pixels[0, 2, 5, 5] == pytest.approx(51 / 255 * 2 - 1)
        assert test.tensors[1].tolist() == [7, 8, 9]
        assert train_ddp.small_cnn(channels=3)(pixels).shape == (10, 10)


def test_a_file_of_cifar10_cannot_run_code(cifar10: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, ("touch evil",)

    (cifar10 / "cifar-10-batches-py" / "data_batch_3").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(pickle.UnpicklingError, match=r"posix.system does not belong in a CIFAR-10 file"):
        parts.load_images("cifar10", cifar10)


def test_missing_files_of_cifar10_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--data-dir: .*data_batch_1 is missing"):
        parts.load_images("cifar10", tmp_path)
    with pytest.raises(ValueError, match="--data cifar10 needs --data-dir"):
        parts.load_images("cifar10", None)


def test_digits_are_real_images_with_every_fifth_held_out() -> None:
    train, test = parts.load_images("digits", None)
    assert len(train) == 1437 and len(test) == 360
    pixels, labels, _ = train.tensors
    assert pixels.shape == (1437, 1, 8, 8)
    assert pixels.min() == -1 and pixels.max() == 1
    assert labels.bincount().min() > 100  # all ten classes


@pytest.mark.parametrize(
    ("step", "participants", "ends", "why"),
    [
        (99, 2, False, "steps are left"),
        (100, 2, True, "all are up to date"),
        (100, 1, False, "the other one is missing, or has lost the last step and heals now"),
        (109, 1, False, "it may still come"),
        (110, 1, True, "it had its time"),
        (104, 2, True, "it came back"),
    ],
)
def test_groups_leave_together(step: int, participants: int, ends: bool, why: str) -> None:
    manager = SimpleNamespace(
        current_step=lambda: step, num_participants=lambda: participants, is_participating=lambda: True
    )
    assert parts.at_the_end(cast(Manager, manager), steps=100, overtime=10, groups=2) is ends, why


@pytest.mark.parametrize("step", [100, 110])
def test_a_group_that_heals_does_not_leave(step: int) -> None:
    """It has the step of the other groups already, but not yet their weights."""
    manager = SimpleNamespace(
        current_step=lambda: step, num_participants=lambda: 2, is_participating=lambda: False
    )
    assert not parts.at_the_end(cast(Manager, manager), steps=100, overtime=10, groups=2)


@pytest.mark.parametrize("value", [None, "", "one", "-1", "1.5"])
def test_a_bad_group_number_is_named(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REPLICA_GROUP_ID", raising=False)
    if value is not None:
        monkeypatch.setenv("REPLICA_GROUP_ID", value)
    with pytest.raises(ValueError, match=f"REPLICA_GROUP_ID must be an integer of at least 0, got {value!r}"):
        parts.int_from_env("REPLICA_GROUP_ID")
