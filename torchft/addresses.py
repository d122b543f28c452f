"""The address that this process announces to other hosts.

Manager servers, stores, reconfigure handles and checkpoint servers all use it, so a host with several
networks needs only one setting. With a wrong address heals may use a slow network.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import sys
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from torchft._network_cards import nearest

#: Address or network interface that this process announces; set it on hosts with several networks. Default:
#: the address on the route to the lighthouse, else the host name.
HOST_ENV = "TORCHFT_HOST"
#: A list by LOCAL_RANK, separated by commas, of addresses or interfaces from which peers fetch the state, to
#: use a faster network. They try the address of the host next, after 3 s. Default: TORCHFT_HOST, else the
#: card next to the rank's CUDA device.
HEAL_HOSTS_ENV = "TORCHFT_HEAL_HOSTS"
#: `http://host:port` of the lighthouse, or those of a cluster, separated by commas; or the absolute path of a
#: file with them, which is read for each connection. Default: none; it is required.
LIGHTHOUSE_ENV = "TORCHFT_LIGHTHOUSE"
#: Name of this host in the check of nodes and in errors of `torchft run`. Default: the host name, which in a
#: container is not the node's.
NODE_NAME_ENV = "TORCHFT_NODE_NAME"
_SYS = Path("/sys")

_lighthouse = ""


def use_lighthouse(address: str) -> None:
    """Sets the lighthouse address of this process; a Manager may have it from an argument.

    Process groups and checkpoint servers have no such argument; they announce the address on the route to the
    lighthouse.
    """
    global _lighthouse
    _lighthouse = address


def lighthouses_of(setting: str) -> list[str]:
    """The addresses in ``TORCHFT_LIGHTHOUSE``, or in the file that it names. OSError: it cannot be read."""
    text = Path(setting).read_text() if os.path.isabs(setting) else setting
    return [address.strip() for address in text.split(",")]


def node_name() -> str:
    """The name of this host for people and schedulers: ``TORCHFT_NODE_NAME``, else the host name, which in a
    container is not the node's.
    """
    return os.environ.get(NODE_NAME_ENV) or socket.gethostname()


def announced_host(lighthouse_addr: str | None = None) -> str:
    """The host name or IP address at which other hosts can reach this process, without brackets or port.

    In this order: ``TORCHFT_HOST`` (an address, or the name of a network interface); the local end of the
    route towards the lighthouse, unless that is a loopback address, which says nothing about other hosts; the
    host name, if it resolves; a loopback address.

    Args:
        lighthouse_addr: ``http://host:port`` of the lighthouse, or a list of those; default: that of the
            process's last Manager, else ``TORCHFT_LIGHTHOUSE``.

    Raises:
        ValueError: ``TORCHFT_HOST`` names neither an interface with an address nor a host that resolves.
    """
    setting = os.environ.get(HOST_ENV, "").strip()
    if setting:
        return _host_of_setting(HOST_ENV, setting)
    route = _route_towards(lighthouse_addr or _lighthouse or os.environ.get(LIGHTHOUSE_ENV, ""))
    if route is not None:
        return route
    name = socket.gethostname()
    return name if _resolves(name) else loopback()


def heal_hosts(device: str | None = None) -> list[str]:
    """The addresses of this rank from which peers fetch its state, the best one first.

    ``TORCHFT_HEAL_HOSTS`` names one for each rank of this host, by LOCAL_RANK. By default, on a host with
    several network cards, it is that of the card next to the rank's device, unless ``TORCHFT_HOST`` is set.
    Last comes the address that is announced for everything else.

    Args:
        device: PCI address of the rank's device, see :func:`torchft.utils.device_pci_address`; None: not
            known

    Raises:
        ValueError: a setting names no address or interface of this host, or none for this rank.
    """
    names = [name.strip() for name in os.environ.get(HEAL_HOSTS_ENV, "").split(",") if name.strip()]
    hosts, host = [], announced_host()
    rank = os.environ.get("LOCAL_RANK", "0")
    if names:
        if not rank.isdecimal() or int(rank) >= len(names):
            raise ValueError(
                f"{HEAL_HOSTS_ENV}={','.join(names)!r} has {len(names)} addresses, none for "
                f"LOCAL_RANK={rank}: one for "
                "each local rank is needed"
            )
        hosts.append(_host_of_setting(HEAL_HOSTS_ENV, names[int(rank)]))
    elif device is not None and not os.environ.get(HOST_ENV, "").strip():
        near = nearest(_SYS, device, interface_address, int(rank) if rank.isdecimal() else 0)
        hosts += near[:1] if host not in near else []
    return list(dict.fromkeys([*hosts, host]))


def announced_store_host(host: str, port: int, lighthouse_addr: str | None = None) -> str:
    """``host:port`` of a store as other hosts reach it.

    MASTER_ADDR is often a loopback address, and torchrun sets it to the name of this host, which other hosts
    may not know: both are replaced by the address that is announced for everything else.
    """
    host = host.removeprefix("[").removesuffix("]")
    if is_loopback(host) or _is_own_name(host):
        host = announced_host(lighthouse_addr)
    return host_port(host, port)


def localhost() -> str:
    """``localhost``, or the numeric address on a host that cannot resolve that name, as in minimal images."""
    return "localhost" if _resolves("localhost") else loopback()


def loopback() -> str:
    """The numeric loopback address: 127.0.0.1, or ::1 on a host without IPv4."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return "127.0.0.1"
    return "::1"


def store_host(host: str) -> str:
    """The host to connect to for a TCPStore at ``host``: a numeric address if that is this host, which may
    not resolve its own names. Such a store listens on all addresses of its host.
    """
    if host == "localhost" or (_is_own_name(host) and not _resolves(host)):
        return loopback()
    return host


def host_port(host: str, port: int) -> str:
    """Formats ``host:port``; an IPv6 address gets brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _host_of_setting(variable: str, setting: str) -> str:
    setting = setting.removeprefix("[").removesuffix("]")
    if setting in (name for _, name in socket.if_nameindex()):
        address = interface_address(setting)
        if address is None:
            raise ValueError(
                f"{variable}={setting!r}: this network interface has no address; name one that has"
            )
        return address
    if not _resolves(setting):
        raise ValueError(
            f"{variable}={setting!r} is neither a network interface of this host nor an address that "
            "resolves; "
            f"interfaces: {', '.join(name for _, name in socket.if_nameindex())}"
        )
    return setting


def _route_towards(lighthouse_addr: str) -> str | None:
    """The source address of packets to the lighthouse; None if it is unknown or loopback."""
    try:
        # A list: its first lighthouse serves unless it fails.
        parts = urlsplit(lighthouses_of(lighthouse_addr)[0])
        if not parts.hostname:
            return None
        targets = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
    except (OSError, ValueError):
        return None  # the connection to the lighthouse will report a bad address
    for family, kind, proto, _, target in targets:
        try:
            with socket.socket(family, kind, proto) as probe:
                probe.connect(target)  # sends nothing: a UDP connect only picks the route
                address = str(probe.getsockname()[0])
        except OSError:
            continue
        if not is_loopback(address):
            return address
    return None


def is_loopback(host: str) -> bool:
    """Whether this is localhost, or an address of the loopback interface."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a name
        return host == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _is_own_name(host: str) -> bool:
    # The domain is ignored, which saves a DNS query: torchrun sets the full name if the host has one.
    return host.partition(".")[0] == socket.gethostname().partition(".")[0]


@lru_cache
def _resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except (OSError, UnicodeError):
        return False


def interface_address(name: str) -> str | None:
    """The first IPv4 address of an interface, else its first global IPv6 address."""
    if not sys.platform.startswith("linux"):
        return None
    import fcntl

    siocgifaddr = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            reply = fcntl.ioctl(sock.fileno(), siocgifaddr, struct.pack("256s", name.encode()[:15]))
            return socket.inet_ntoa(reply[20:24])
        except OSError:
            pass
    try:
        with open("/proc/net/if_inet6") as table:
            for line in table:
                digits, _, _, scope, _, interface = line.split()
                if interface == name and scope == "00":
                    return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    except OSError:
        pass
    return None
