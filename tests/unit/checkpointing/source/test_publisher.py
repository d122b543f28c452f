"""Readers that arrive while a source takes its memory back."""

from __future__ import annotations

import torch

from tests.unit.flickering import cleared_after_each_look
from torchft.checkpointing.source.checkpoint import Checkpoint
from torchft.checkpointing.source.publisher import Publisher


def test_a_checkpoint_that_is_dropped_while_the_next_one_is_published() -> None:
    source = cleared_after_each_look(Publisher, "_offer")(keep=60)
    source.publish(1, Checkpoint({"w": torch.zeros(1)}, 0), receivers=1, stage=False)
    source.publish(2, Checkpoint({"w": torch.ones(1)}, 0), receivers=1, stage=False)
    assert source._step == 2
    source.close(5)
