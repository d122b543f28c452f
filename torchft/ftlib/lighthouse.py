"""Consensus by the lighthouse: the members are the groups of its quorum, and each process is a group of one
rank.

The consensus is active. Before each collective every member requests a quorum, as at each step of a Manager:
the lighthouse answers when all members have asked, and the answer shows whether a process has joined. The
lighthouse also reports failures.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from typing import Optional

from torchft._manager.quorum.notices import FailureListener
from torchft._torchft import ManagerClient, ManagerServer, MemberFailure, QuorumResult
from torchft.addresses import announced_host, use_lighthouse
from torchft.ftlib.consensus import Consensus, ConsensusStatus, Listener
from torchft.ftlib.views import Identity, Member, View
from torchft.process_group.reconfigure import host_store

_MINUTE = timedelta(seconds=60)


class Lighthouse(Consensus):
    """
    Args:
        name: name of this member, unique in the job; default: a random one.
        lighthouse_addr: ``http://host:port``; default: TORCHFT_LIGHTHOUSE.
        timeout: timeout of waiting for a list of members.
        connect_timeout: timeout of reaching the lighthouse.

    Raises:
        ValueError: there is no address.
        RuntimeError: the lighthouse is not reached in time.
    """

    active = True

    def __init__(
        self,
        name: Optional[str] = None,
        lighthouse_addr: Optional[str] = None,
        timeout: timedelta = _MINUTE,
        connect_timeout: timedelta = _MINUTE,
    ) -> None:
        address = lighthouse_addr or os.environ.get("TORCHFT_LIGHTHOUSE", "")
        if not address:
            raise ValueError("lighthouse_addr is None and TORCHFT_LIGHTHOUSE is not set: give one of the two")
        if lighthouse_addr:
            use_lighthouse(lighthouse_addr)
        self.identity = Identity(name or uuid.uuid4().hex, time.time_ns())
        self._timeout = timeout
        self._view: Optional[View] = None
        self._next: Optional[View] = None  # the view that ``confirm`` has received
        self._round = 0
        self._store, own_address = host_store(timeout)
        self._address = own_address
        self._client: Optional[ManagerClient] = None
        self._failures: Optional[FailureListener] = None
        self._server = ManagerServer(
            replica_id=f"{self.identity.name}:{self.identity.incarnation}",
            lighthouse_addr=address,
            hostname=announced_host(address),
            bind="[::]:0",
            store_addr=own_address,
            world_size=1,
            heartbeat_interval=timedelta(milliseconds=100),
            connect_timeout=connect_timeout,
            quorum_retries=0,
        )
        try:
            self._client = ManagerClient(self._server.address(), connect_timeout)
        except BaseException:
            self.close()
            raise

    def attach(self, listener: Listener) -> None:
        assert self._client is not None

        def failed(failure: MemberFailure) -> None:
            listener.member_failed(failure.quorum_id, f"{failure.replica_id} failed: {failure.reason}")

        about = {"failed": failed, "progress": lambda: (False, "trains with FTLib", "")}
        self._failures = FailureListener(self._client, 0, about)

    def get_member_list(self) -> View:
        view, self._next = self._next, None
        if view is None:
            view = self._ask()
        self._view = view
        return view

    def confirm(self) -> ConsensusStatus:
        if self._view is None:
            return ConsensusStatus.FAIL
        latest = self._next or self._ask(may_keep=self._view)
        if latest != self._view:
            self._next = latest
            return ConsensusStatus.FAIL
        return ConsensusStatus.SKIP_ALLREDUCE if len(latest.members) == 1 else ConsensusStatus.SUCCESS

    def _ask(self, may_keep: Optional[View] = None) -> View:
        client = self._client  # read once: another thread may close the consensus
        if client is None:
            raise RuntimeError("the consensus is closed")
        result = client._quorum(
            group_rank=0,
            step=self._round,
            checkpoint_metadata="",
            shrink_only=False,
            timeout=self._timeout,
            # After a failed collective the view needs a new number, even with the same members. The
            # lighthouse gives such a quorum a new id only if a member reports a failure.
            commit_failures=int(may_keep is None and self._view is not None),
            reconfigure_handle=self._address,
        )
        self._round = result.max_step + 1
        return _view(result)

    def close(self) -> None:
        client, self._client = self._client, None
        if self._failures is not None:
            self._failures.end()
        if client is not None:
            client.shutdown()
        if self._failures is not None:
            self._failures.join()
        self._server._finish()
        self._server.shutdown()


def _view(result: QuorumResult) -> View:
    """Converts a quorum to a view; RuntimeError if one of its groups is no member of FTLib."""
    if len(result.reconfigure_handles) != len(result.replica_ids):
        others = result.replicas_without_handles or result.replica_ids
        raise RuntimeError(f"quorum {result.quorum_id}: {others} do not use FTLib: give it a TORCHFT_JOB_ID")
    members = []
    for replica_id, address in zip(result.replica_ids, result.reconfigure_handles):
        name, _, incarnation = replica_id.rpartition(":")
        if not incarnation.isdecimal() or address.startswith("{"):
            raise RuntimeError(
                f"quorum {result.quorum_id}: {replica_id} does not use FTLib: give it a TORCHFT_JOB_ID"
            )
        members.append(Member(Identity(name, int(incarnation)), address))
    return View(result.quorum_id, tuple(members))
