"""Finds the network card next to a device, by the places of both on the PCI bus as Linux shows them in /sys.

A host with eight GPUs often has several cards, each below the same PCI switch as one or two of the GPUs. A
transfer by another card crosses the bridge between the processors, and shares that card with all other ranks.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Optional

_PCI = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
# The state of an interface that can send. Some drivers do not report it.
_UP = ("up", "unknown")


class PciPlace(NamedTuple):
    """A place on the PCI bus."""

    bridges: tuple[str, ...]  # from the root to the device itself
    numa_node: int  # -1: not known


def nearest(sys: Path, device: str, address_of: Callable[[str], Optional[str]], local_rank: int) -> list[str]:
    """The addresses of the network cards that are nearest to a device, the best one first.

    Cards at the same distance are shared among the ranks of the host in turn.

    Args:
        sys: the mount point of sysfs
        device: PCI address of the device, such as `0000:17:00.0`
        address_of: returns the address of a network interface; None if it has none
        local_rank: the number of the rank on its host

    Returns:
        Nothing if the device is not there, or if fewer than two interfaces of cards are up and have an
        address that is valid beyond their link.
    """
    here = _place(sys / "bus/pci/devices" / device)
    if here is None:
        return []
    cards = []
    for name in sorted(os.listdir(sys / "class/net")) if (sys / "class/net").is_dir() else []:
        places = list(_places(sys / "class/net" / name))
        address = (
            address_of(name) if places and _read(sys / "class/net" / name / "operstate") in _UP else None
        )
        if address is not None and not _is_of_link(address):
            cards.append((min(distance(here, place) for place in places), address))
    if len(cards) < 2:
        return []
    least = min(cards)[0]
    best = [address for far, address in cards if far == least]
    turn = local_rank % len(best)
    return best[turn:] + best[:turn]


def distance(a: PciPlace, b: PciPlace) -> tuple[int, int]:
    """Compares as the distance of two places: below one root of the bus the bridges between them count, then
    whether both belong to one NUMA node.
    """
    common = 0
    while common < min(len(a.bridges), len(b.bridges)) and a.bridges[common] == b.bridges[common]:
        common += 1
    if common:
        return 0, len(a.bridges) + len(b.bridges) - 2 * common
    return (1 if a.numa_node == b.numa_node >= 0 else 2), 0


def _places(interface: Path) -> Iterator[PciPlace]:
    """The cards of an interface: a bond, a bridge or a VLAN has those of the interfaces below it."""
    place = _place(interface / "device")
    if place is not None:
        yield place
        return
    for lower in interface.glob("lower_*"):
        yield from _places(lower)


def _place(link: Path) -> Optional[PciPlace]:
    if not link.exists():
        return None
    path = link.resolve()
    while not _PCI.fullmatch(path.name):  # for a device of virtio, the one that it belongs to
        if path == path.parent:
            return None
        path = path.parent
    numa_node = _read(path / "numa_node")
    bridges = [part for part in path.parts if part.startswith("pci") or _PCI.fullmatch(part)]
    return PciPlace(tuple(bridges), int(numa_node) if numa_node else -1)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _is_of_link(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    return parsed.is_link_local or parsed.is_loopback
