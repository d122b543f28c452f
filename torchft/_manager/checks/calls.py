"""Compares the first reductions with a new member, before it sends anything.

Gloo ends the process of a rank that receives more bytes than it expects. The parameters that groups announce
(layout.py) do not show the calls: a group may announce nothing, cut gradients into other buckets, or reduce
another type or in another order. So in the first step with new peers each rank lists its calls in the store
of its own reconfigure handle, which costs no wait. A rank whose group is new reads the list of an older
group, and begins a reduction only after that group has listed the same call. If the calls differ, the new
group ends, and the others lose that one step.

Only groups whose handle says that they do this are compared; an upstream group does not. Collectives that the
training loop calls on the process group itself are not compared.
"""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Callable, Optional

import torch
from torch.distributed import ReduceOp

from torchft._agreement import CALLS, announced, difference
from torchft._manager.checks.layout import LayoutDiffers
from torchft.process_group._attempt import in_time, running
from torchft.process_group.reconfigure import Handle, create_store_client
from torchft.utils import dtype_name

if TYPE_CHECKING:
    from torch.distributed import Store

    from torchft._manager.observe.log import _ManagerLogger
    from torchft._manager.quorum.plan import Plan
    from torchft._manager.rank import RankState
    from torchft._manager.step.collectives import Collectives
    from torchft.work import AnyReduceOp

# A TCPStore tries to connect for about twice its timeout: a few seconds.
_CONNECT_TIMEOUT = timedelta(seconds=2)
# The first and the longest pause between two looks for the other group's next call: all groups that start a
# job look into the store of the first one. (After each wait that expires, a TCPStore writes to stderr.)
_PAUSE_SEC = 0.001, 0.05
# The last line of a list: no more calls follow, or the step was lost before all of them were made.
_END, _LOST = "no further call", "lost"


def describe_call(tensor: torch.Tensor, op: AnyReduceOp, should_quantize: bool) -> str:
    """Describes a reduction in a line that is equal in all groups that fit together."""
    how = ", quantized" if should_quantize else ""
    which = next(
        (name for name, one in ReduceOp.RedOpType.__members__.items() if op == one), "another operation"
    )
    sparse = "sparse " if tensor.layout != torch.strided else ""
    of = f"{tensor.numel()} x {sparse}{dtype_name(tensor.dtype)}"
    return f"allreduce of {of} ({which}{how})"


def judge_of(plan: Plan, new_here: bool) -> Optional[int]:
    """The replica rank of the group whose calls this one compares with its own; None if it compares none.

    As in :func:`torchft._manager.checks.layout.check_layouts`, the group that joined last has to change: at
    step 0 each group but the first, later a group that heals or has committed no step.
    """
    if not (plan.heal or new_here):
        return None
    judge = plan.source.replica_rank if plan.source is not None and plan.max_step > 0 else 0
    return None if judge == plan.replica_rank else judge


class Calls:
    """Lists the calls of a rank in its first step with new peers, and compares them if its group is new.

    Args:
        check_peers: raises an error if a peer is known to have failed.
        rank_state: has the timeout of waiting for a call of the other group.

    Attributes:
        differs: why this group has to end; None: its calls do not differ.
        step: prefix of the keys of this step's calls in the store; empty: calls are not listed.
    """

    differs: Optional[LayoutDiffers] = None

    def __init__(
        self, check_peers: Callable[[], None], rank_state: RankState, logger: _ManagerLogger
    ) -> None:
        self._check_peers = check_peers
        self._rank_state = rank_state
        self._logger = logger
        self._own: Optional[tuple[str, Store]] = None  # address and client of this rank's store
        self._listed: list[str] = []  # keys of the calls that were listed since the last connection
        self.step = ""
        self._judge: Optional[tuple[str, Store]] = None

    def begin(self, plan: Plan, new_here: bool) -> None:
        """Begins the comparison of calls with the groups of a plan, once they are connected. `new_here`:
        whether this group has committed no step since its process began.
        """
        self.step, self._judge = "", None
        stores = [Handle.decode(h).store if announced(h, CALLS) else "" for h in plan.handles]
        if len(stores) < 2 or not stores[plan.replica_rank]:
            return
        judge = judge_of(plan, new_here)
        try:
            address = stores[plan.replica_rank]
            if self._own is None or self._own[0] != address:  # a new process group has another store
                self._own, self._listed = None, []
                self._own = address, create_store_client(address, _CONNECT_TIMEOUT)
            for key in self._listed:
                self._own[1].delete_key(key)
            self._listed, self.step = [], f"calls/{plan.quorum_id}/{plan.max_step}"
            if judge is not None and stores[judge]:
                connect = partial(create_store_client, stores[judge], _CONNECT_TIMEOUT)
                self._judge = plan.replica_ids[judge], in_time(connect, 3 * _CONNECT_TIMEOUT)
        except Exception as e:
            self._logger.warn(f"the first calls in quorum {plan.quorum_id} are not compared: {e}")

    def check(
        self, collectives: Collectives, tensor: torch.Tensor, op: AnyReduceOp, should_quantize: bool
    ) -> None:
        """Compares a call before it is made. A new member waits until the other group has made the same one.

        Raises:
            LayoutDiffers: the other group makes another call.
            RuntimeError: the other group lost the step, or the collectives of this step were aborted.
            TimeoutError: the other group made no call in time.
        """
        if not self.step:
            return
        here = describe_call(tensor, op, should_quantize)
        number = len(self._listed)
        self._list(here)
        if self._judge is None:
            return
        name, there = self._judge[0], self._read(*self._judge, number, collectives)
        if there == _LOST:
            raise RuntimeError(f"{name}, with which the first calls are compared, has lost the step")
        if there != here:
            text = difference(f"call {number} of the step", here, name, there, "the same calls in all groups")
            self.differs = LayoutDiffers(text, must_end=True)
            raise self.differs

    def end(self, lost: bool) -> None:
        """Ends the list of this step's calls. `lost`: this rank votes no, so that calls may be missing."""
        if self.step:
            self._list(_LOST if lost else _END)
        self.step, self._judge = "", None

    def _list(self, call: str) -> None:
        assert self._own is not None
        key = f"{self.step}/{len(self._listed)}"
        self._listed.append(key)
        self._own[1].set(key, call)

    def _read(self, name: str, store: Store, number: int, collectives: Collectives) -> str:
        """Waits for a call of the other group."""
        key = f"{self.step}/{number}"

        def read() -> str:
            pause, longest = _PAUSE_SEC
            attempt = running()
            while not store.check([key]):
                if attempt is None or attempt.abandoned is not None:
                    return ""
                time.sleep(pause)
                pause = min(2 * pause, longest)
            return store.get(key).decode()

        def check() -> None:
            self._check_peers()
            if collectives.aborted:
                raise RuntimeError("the collectives of the step were aborted")

        timeout = self._rank_state.timeout
        try:
            return in_time(read, timeout, check)
        except TimeoutError as e:
            raise TimeoutError(
                f"timed out: {name} did not make call {number} of the step in {timeout}"
            ) from e
