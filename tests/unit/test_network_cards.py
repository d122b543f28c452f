from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from torchft import addresses
from torchft._network_cards import PciPlace, distance, nearest
from torchft.checkpointing import HTTPTransport, http_transport

# As on a host with two processors: below each of them two PCI switches, each with two GPUs and a card. The
# frontend network is a virtual device at a root of its own.
GPUS = {
    "0000:17:00.0": "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0",
    "0000:18:00.0": "pci0000:15/0000:15:01.0/0000:16:01.0/0000:18:00.0",
    "0000:3a:00.0": "pci0000:37/0000:37:01.0/0000:38:00.0/0000:3a:00.0",
    "0000:97:00.0": "pci0000:95/0000:95:01.0/0000:96:00.0/0000:97:00.0",
}
CARDS = {
    "eth0": "pci0000:00/0000:00:05.0/virtio1",
    "rail0": "pci0000:15/0000:15:01.0/0000:16:02.0/0000:19:00.0",
    "rail1": "pci0000:37/0000:37:01.0/0000:38:02.0/0000:3b:00.0",
    "rail2": "pci0000:95/0000:95:01.0/0000:96:02.0/0000:99:00.0",
}
ADDRESSES = {
    "eth0": "10.0.0.5",
    "rail0": "10.1.0.5",
    "rail1": "10.2.0.5",
    "rail2": "10.3.0.5",
    "lo": "127.0.0.1",
}


def numa_node(path: str) -> int:
    return 1 if path.startswith("pci0000:95") else 0


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    """A tree like /sys with these devices."""
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    for path in (*GPUS.values(), *CARDS.values()):
        (tmp_path / "devices" / path).mkdir(parents=True)
        device = tmp_path / "devices" / path.removesuffix("/virtio1")
        (device / "numa_node").write_text(f"{numa_node(path)}\n")
    for address, path in GPUS.items():
        (tmp_path / "bus/pci/devices" / address).symlink_to(tmp_path / "devices" / path)
    for name, path in CARDS.items():
        add_interface(tmp_path, name)
        (tmp_path / "class/net" / name / "device").symlink_to(tmp_path / "devices" / path)
    add_interface(tmp_path, "lo", "unknown")
    return tmp_path


def add_interface(sys: Path, name: str, state: str = "up") -> Path:
    (sys / "class/net" / name).mkdir(parents=True)
    (sys / "class/net" / name / "operstate").write_text(f"{state}\n")
    return sys / "class/net" / name


def near(sys: Path, gpu: str, rank: int = 0) -> list[str]:
    return nearest(sys, gpu, ADDRESSES.get, rank)


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        ("0000:17:00.0", "10.1.0.5"),
        ("0000:18:00.0", "10.1.0.5"),
        ("0000:3a:00.0", "10.2.0.5"),
        ("0000:97:00.0", "10.3.0.5"),
    ],
)
def test_each_gpu_has_the_card_below_its_switch(sys: Path, gpu: str, expected: str) -> None:
    assert near(sys, gpu) == [expected]


def test_without_a_card_below_its_root_a_gpu_has_those_of_its_processor_in_turn(sys: Path) -> None:
    (sys / "class/net/rail0/operstate").write_text("down\n")
    both = ["10.0.0.5", "10.2.0.5"]
    assert [near(sys, "0000:17:00.0", rank) for rank in range(3)] == [both, both[::-1], both]


def test_without_a_card_of_its_processor_a_gpu_has_any(sys: Path) -> None:
    (sys / "class/net/rail2/operstate").write_text("down\n")
    assert sorted(near(sys, "0000:97:00.0")) == ["10.0.0.5", "10.1.0.5", "10.2.0.5"]


def test_a_bond_is_where_its_cards_are(sys: Path) -> None:
    bond = add_interface(sys, "bond0")
    for name in ("rail1", "rail2"):
        os.symlink(f"../{name}", bond / f"lower_{name}")
        (sys / "class/net" / name / "operstate").write_text("down\n")
    assert nearest(sys, "0000:97:00.0", {**ADDRESSES, "bond0": "10.9.0.5"}.get, 0) == ["10.9.0.5"]


@pytest.mark.parametrize("others", [{}, {"rail0": "169.254.7.7"}, {"rail0": "fe80::1"}])
def test_there_is_no_choice_without_two_addresses(sys: Path, others: dict[str, str]) -> None:
    assert nearest(sys, "0000:17:00.0", {"eth0": "10.0.0.5", "lo": "127.0.0.1", **others}.get, 0) == []


def test_there_is_no_choice_for_an_unknown_device(sys: Path, tmp_path: Path) -> None:
    assert near(sys, "0000:ff:00.0") == [] and near(tmp_path / "no such mount", "0000:17:00.0") == []


def test_the_distance_is_that_of_the_bus_before_that_of_the_processor() -> None:
    here = PciPlace(("pci0000:15", "0000:15:01.0", "0000:17:00.0"), 0)
    ways = [
        PciPlace(("pci0000:15", "0000:15:01.0", "0000:18:00.0"), 0),
        PciPlace(("pci0000:15", "0000:15:03.0", "0000:20:00.0"), 0),
        PciPlace(("pci0000:37", "0000:38:00.0"), 0),
        PciPlace(("pci0000:95", "0000:96:00.0"), 1),
    ]
    assert sorted([*ways[2:], *ways[:2]], key=lambda place: distance(here, place)) == ways
    unknown = here._replace(numa_node=-1)
    assert distance(unknown, ways[3]._replace(numa_node=-1)) == distance(here, ways[3]), (
        "unknown nodes are not one node"
    )


@pytest.mark.parametrize(
    ("env", "host", "expected"),
    [
        ({}, "10.0.0.5", ["10.1.0.5", "10.0.0.5"]),
        ({}, "10.1.0.5", ["10.1.0.5"]),
        ({"TORCHFT_HOST": "10.0.0.5"}, "10.0.0.5", ["10.0.0.5"]),
        ({"TORCHFT_HEAL_HOSTS": "10.3.0.5"}, "10.0.0.5", ["10.3.0.5", "10.0.0.5"]),
    ],
)
def test_a_rank_announces_the_card_next_to_its_device(
    sys: Path, env: dict[str, str], host: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """First, unless a setting says otherwise; then the address of the host, which all networks may reach."""
    for name in ("TORCHFT_HOST", "TORCHFT_HEAL_HOSTS", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(addresses, "interface_address", ADDRESSES.get)
    monkeypatch.setattr(addresses, "announced_host", lambda: host)
    monkeypatch.setattr(addresses, "_SYS", sys)
    assert addresses.heal_hosts("0000:17:00.0") == expected


def test_a_transport_announces_the_card_next_to_the_current_device(
    sys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHFT_HOST", raising=False)
    monkeypatch.setattr(http_transport, "device_pci_address", lambda: "0000:3a:00.0")
    monkeypatch.setattr(addresses, "interface_address", ADDRESSES.get)
    monkeypatch.setattr(addresses, "_SYS", sys)
    transport = HTTPTransport[object](timedelta(seconds=5), 0)
    try:
        assert urlsplit(transport.metadata()).hostname == "10.2.0.5"
    finally:
        transport.shutdown(wait=False)
