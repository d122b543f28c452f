"""Several hosts on one machine, as network namespaces behind a bridge, whose links can be cut without
closing connections.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from long_link import LongLinks, tap


class NoHosts(Exception):
    """Namespaces cannot be created here; the message says why."""


class Hosts:
    """Simulated hosts, each with one link to this machine. Leaving the `with` block removes all of them.

    The links use 198.18.0.0/15, which is reserved for measurements and has no real hosts.

    Args:
        count: number of hosts.
        delay_s: delay of each frame on a link, in each direction.
        loss: the share of frames that a link drops.

    Raises:
        NoHosts: on entering; not root, no `ip`, or a kernel without namespaces, bridges, veth or TAP.

    Attributes:
        address: address of this machine, as the hosts see it.
        addresses: addresses of the hosts.
        links: the slow links; None if links are fast.
    """

    def __init__(self, count: int, delay_s: float = 0.0, loss: float = 0.0) -> None:
        self.count = count
        self.links: LongLinks | None = None
        self._delay_s, self._loss = delay_s, loss
        self._ends: dict[int, int] = {}  # of the slow links: TAP devices
        self._bridge = f"tft{os.getpid()}"
        self._network = f"198.18.{os.getpid() % 250 + 1}"
        self.address = f"{self._network}.1"
        self.addresses = [f"{self._network}.{host + 2}" for host in range(count)]

    def __enter__(self) -> Hosts:
        if os.geteuid() != 0:
            raise NoHosts("network namespaces need root")
        if shutil.which("ip") is None:
            raise NoHosts("the command ip (iproute2) is not installed")
        try:
            self._make()
        except subprocess.CalledProcessError as e:
            self._remove()
            raise NoHosts(f"{' '.join(e.cmd)}: {e.stderr.strip()}") from None
        except OSError as e:
            self._remove()
            raise NoHosts(f"a TAP device: {e}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def command(self, host: int) -> Sequence[str]:
        """The prefix of a command that is to run on a host."""
        return ["ip", "netns", "exec", self._name(host)]

    def cut(self, host: int) -> None:
        """Drops all traffic of a host. No connection is closed."""
        _ip("link", "set", self._name(host), "down")

    def heal(self, host: int) -> None:
        """Undoes `cut`."""
        _ip("link", "set", self._name(host), "up")

    def _name(self, host: int) -> str:
        """The name of the namespace, and of this machine's end of its link."""
        return f"{self._bridge}.{host}"

    def _make(self) -> None:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("address", "add", f"{self.address}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for host in range(self.count):
            name = self._name(host)
            _ip("netns", "add", name)
            if self._delay_s or self._loss:
                here, there = tap(name), tap(f"{name}e")
                self._ends |= {here: there, there: here}
                _ip("link", "set", f"{name}e", "netns", name)
                _ip("-n", name, "link", "set", f"{name}e", "name", "eth0")
            else:
                _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", name, "master", self._bridge, "up")
            _ip("-n", name, "address", "add", f"{self.addresses[host]}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", name, "link", "set", link, "up")
        if self._ends:
            self.links = LongLinks(self._ends, self._delay_s, self._loss)

    def _remove(self) -> None:
        if self.links is not None:
            self.links.close()
        for descriptor in self._ends:
            os.close(descriptor)
        for host in range(self.count):
            for what in (("link", "delete", self._name(host)), ("netns", "delete", self._name(host))):
                with contextlib.suppress(subprocess.CalledProcessError):
                    _ip(*what)
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "delete", self._bridge)


def nameless(folder: Path) -> list[str]:
    """The prefix of a command that runs as on a host that resolves no name, not even localhost: there is no
    /etc/hosts and no name server, as in minimal images. Needs root.
    """
    (folder / "hosts").touch()
    (folder / "nsswitch.conf").write_text("hosts: files\n")
    mount = (
        'for name in hosts nsswitch.conf; do mount --bind "$0/$name" "/etc/$name" || exit 1; done; exec "$@"'
    )
    return ["unshare", "--mount", "sh", "-c", mount, str(folder)]


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True, timeout=20)
