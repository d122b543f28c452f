"""The rendezvous of a group on one host; test_torchft_run starts groups with it."""

from __future__ import annotations

import pytest
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousParameters

from torchft.launch.agent import BACKEND, HostRendezvous


def parameters(nodes: int) -> RendezvousParameters:
    return RendezvousParameters(BACKEND, "", "none", min_nodes=1, max_nodes=nodes)


def test_a_round_begins_with_an_empty_store_at_a_port_of_its_own() -> None:
    rendezvous = HostRendezvous.from_parameters(parameters(1))
    first, second = rendezvous.next_rendezvous(), rendezvous.next_rendezvous()
    assert (first.rank, first.world_size, rendezvous.num_nodes_waiting()) == (0, 1, 0)
    first.store.set("key", "of the first round")
    assert not second.store.check(["key"])
    ports = [round.bootstrap_store_info.master_port for round in (first, second)]
    assert len({0, *ports}) == 3
    assert [round.store.port for round in (first, second)] == ports  # type: ignore[attr-defined]


@pytest.mark.parametrize("end", ["set_closed", "shutdown"])
def test_there_is_no_round_after_the_end(end: str) -> None:
    rendezvous = HostRendezvous.from_parameters(parameters(1))
    getattr(rendezvous, end)()
    assert rendezvous.is_closed()
    with pytest.raises(RendezvousClosedError, match="'none' is closed"):
        rendezvous.next_rendezvous()


def test_several_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--nnodes 1:2 is not allowed .*; allowed: --rdzv-backend c10d or"):
        HostRendezvous.from_parameters(parameters(2))
