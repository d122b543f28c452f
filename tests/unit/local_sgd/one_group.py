"""Replaces a Manager in a job of one group: it records its calls, and decides whether steps are committed."""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch

from torchft._extras import Extras
from torchft.work import _DummyWork


class OneGroup:
    """The methods that LocalSGD and DiLoCo call.

    Args:
        committed: whether the n-th vote, from 1, succeeds.
        peers: changes the reduced values, as other groups would.

    Attributes:
        calls: names of the calls, in order; of a reduction with its shape.
    """

    def __init__(
        self,
        committed: Callable[[int], bool] = lambda vote: True,
        peers: Callable[[torch.Tensor], object] = lambda tensor: None,
    ) -> None:
        self._use_async_quorum = False
        self._committed, self._peers = committed, peers
        self._step = self._votes = 0
        self.calls: list[Any] = []
        self.layout: list[str] = []
        self.state_fns: dict[str, Any] = {}
        self.reported: Optional[Exception] = None
        self.nonfinite = 0
        self.on_quorum: Callable[[], object] = lambda: None
        self._extras = _Counting(self)

    def start_quorum(self) -> None:
        self.calls.append("quorum")
        self.on_quorum()

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> _DummyWork:
        self.calls.append(("allreduce", tuple(tensor.shape), should_quantize))
        self._peers(tensor)
        return _DummyWork(tensor)

    def should_commit(self) -> bool:
        self.calls.append("vote")
        self._votes += 1
        committed = self._committed(self._votes)
        self._step += committed
        return committed

    def current_step(self) -> int:
        return self._step

    def report_error(self, e: Exception) -> None:
        self.reported = e

    def finish_serving(self) -> None:
        self.calls.append("finish serving")

    def allow_state_dict_read(self) -> None:
        self.calls.append("allow")

    def disallow_state_dict_read(self) -> None:
        self.calls.append("disallow")

    def register_state_dict_fn(self, key: str, load: Callable[[Any], None], read: Callable[[], Any]) -> None:
        self.state_fns[key] = load, read

    def register_layout(self, what: str, lines: list[str]) -> None:
        self.layout += [f"{what}: {line}" for line in lines]

    def taken(self) -> list[Any]:
        """Returns and clears the recorded calls, without those around every inner step."""
        calls, self.calls = self.calls, []
        return [call for call in calls if call not in ("allow", "disallow")]


class _Counting(Extras):
    def __init__(self, group: OneGroup) -> None:
        self._group = group

    def counted(self, name: str, number: int = 1) -> None:
        assert name == "nonfinite_syncs"
        self._group.nonfinite += number
