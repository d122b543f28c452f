"""Connects the process group with the peers of a new quorum."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchft._manager.layout import Layout, LayoutDiffers
from torchft._manager.ranges import ranged
from torchft._manager.settings import TORCH_FR_DUMP_TEMP_FILE_ENV, Settings
from torchft.process_group.native import reset_flight_recorder

if TYPE_CHECKING:
    from torchft._manager.edge import Peers
    from torchft._manager.errors import Errors
    from torchft._manager.failures import Failures
    from torchft._manager.log import _ManagerLogger
    from torchft._manager.plan import Plan


class Connection:
    """Connects one rank with its peers, quorum after quorum.

    Args:
        peers: the process group.
        replica_id: replica id of this group.
        settings: the Manager's settings.
        layout: the tensors that this rank reduces, compared with those of the peers before it connects.
        failures: ends the connecting when a peer has failed.
        errors: gets the errors of connecting.
        logger: the Manager's logger.
    """

    def __init__(
        self,
        peers: Peers,
        replica_id: str,
        settings: Settings,
        layout: Layout,
        *,
        failures: Failures,
        errors: Errors,
        logger: _ManagerLogger,
    ) -> None:
        self._peers = peers
        self._replica_id = replica_id
        self._settings = settings
        self._layout = layout
        self._failures = failures
        self._errors = errors
        self._logger = logger
        self._dumps = os.environ.get(TORCH_FR_DUMP_TEMP_FILE_ENV)

    @ranged("_pg::configure")
    def follow(self, plan: Plan, new_here: bool, reconfigure: Callable[[int, list[str]], None]) -> None:
        """Rebuilds the process group for a new quorum. If that fails, the step fails, and the next quorum has a new id.

        Args:
            plan: the plan of this rank.
            new_here: whether this group has committed no step since its process began.
            reconfigure: passes the quorum's id and the handles of its groups to the process group.

        Raises:
            LayoutDiffers: this group does not fit into the job.
        """
        self._logger.quorum_event()
        self._logger.info(
            f"quorum {plan.quorum_id}: replica rank {plan.replica_rank} of {plan.replica_world_size}, "
            f"{plan.participants} up to date at step {plan.max_step}"
        )
        if self._dumps is not None:
            # PyTorch's flight recorder appends the rank: each quorum's dump gets a separate file
            os.environ[TORCH_FR_DUMP_TEMP_FILE_ENV] = f"{self._dumps}_quorum{plan.quorum_id}_"
        reset_flight_recorder()
        try:
            with self._failures.connecting(plan.quorum_id):
                self._failures.check()
                self._layout.check(plan, new_here)
                if plan.handles:
                    reconfigure(plan.quorum_id, plan.handles)
                else:
                    self._peers.configure_by_store(plan, self._replica_id, self._settings)
        except LayoutDiffers as e:
            if e.must_end:
                raise
            # The other group raises this error and ends. This group votes no and does not connect, because the groups
            # would reduce different tensors. The next quorum does not contain the other group.
            self._errors.reported(e)
        except Exception as e:
            self._logger.exception(f"the process group could not be made for quorum {plan.quorum_id}: {e}")
            self._errors.lose(e)
