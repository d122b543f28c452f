"""Measures the phases of a heal, and of a failure from when this rank notices it to the next commit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.utils._pytree as pytree

# In order: wait for a quorum, connect the process group with its peers, transfer the state, load it.
NAMES = ("quorum", "reconfigure", "transfer", "load")


class Phases:
    """The phases of one heal.

    Attributes:
        seconds: for each phase in NAMES; 0 for a phase that did not happen.
        received: bytes of the tensors received.
    """

    def __init__(self, quorum: float = 0.0) -> None:
        self.seconds = dict.fromkeys(NAMES, 0.0)
        self.seconds["quorum"] = quorum
        self.received = 0

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Adds the duration of the block to a phase, also if the block raises."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - begin

    def __str__(self) -> str:
        """`3.42 s: quorum 0.51 s, reconfigure 0.02 s, transfer 2.48 s (2.100 GB, 0.85 GB/s), load 0.41 s`"""
        parts = [f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items()]
        rate = self.received / 1e9 / max(self.seconds["transfer"], 1e-9)
        parts[NAMES.index("transfer")] += f" ({self.received / 1e9:.3f} GB, {rate:.2f} GB/s)"
        return f"{sum(self.seconds.values()):.2f} s: {', '.join(parts)}"


def tensor_bytes(state: object) -> int:
    """Bytes of all tensors in a state."""
    leaves = pytree.tree_leaves(state)
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor))


class Incident:
    """The cost of a failure, from the first error to the next commit. Further errors until then belong to it.

    Its phases follow one another without a gap; the times of one that occurs several times are added up.

    Args:
        cause: the error that was noticed, as text.
        step, quorum_id: of the step in which it was noticed.

    Attributes:
        seconds: for each phase.
        steps_lost: steps that were not committed, and of which nothing was kept.
    """

    def __init__(self, cause: str, step: int, quorum_id: int) -> None:
        self.cause, self.step, self.quorum_id = cause, step, quorum_id
        self.steps_lost = 0
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def ended(self, phase: str) -> None:
        """Ends a phase, which began at the end of the previous one, or when the failure was noticed."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def step_ended(self, committed: bool, kept: bool = False) -> None:
        """Ends a phase with the vote on a step. `kept`: it comes again with the gradients of this group."""
        self.ended("next step" if committed else "vote")
        if not committed and not kept:
            self.steps_lost += 1

    def __str__(self) -> str:
        phases = ", ".join(f"{phase} {1000 * seconds:.0f} ms" for phase, seconds in self.seconds.items())
        return (
            f"after a failure in step {self.step} of quorum {self.quorum_id} ({self.cause}) the next commit "
            f"came in {1000 * sum(self.seconds.values()):.0f} ms ({phases}); {self.steps_lost} lost"
        )
