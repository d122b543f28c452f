"""``torchft doctor``: checks this machine and its connections to the lighthouse and to other groups."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torchft import _libraries
from torchft._lighthouse_http import DEFAULT_PORT, LIGHTHOUSE_ENV, HttpLighthouse, Unanswered
from torchft._nccl_env import DUMP_ENV, dump_setting, ends_survivors
from torchft.addresses import host_port, is_loopback, lighthouses_of, localhost, loopback
from torchft.cli.arguments import Parser, ask_of, positive
from torchft.cli.node import check
from torchft.cli.output import printable
from torchft.cli.status import groups
from torchft.http import _has_ipv6

_CONNECT_SEC = 3.0
_LOCAL_SEC = 1.0  # seconds; a lighthouse on this machine answers within milliseconds
_FEW_FILES = 4096
_SMALL_SHM = 1 << 30  # bytes
_MARKS = {"ok": "ok   ", "warn": "warn ", "bad": "BAD  "}


@dataclass(frozen=True)
class Finding:
    """The result of one check. ``advice`` names the remedy."""

    state: str  # "ok", "warn" or "bad"
    text: str
    advice: str = ""


def main(arguments: Sequence[str]) -> int:
    parser = Parser(prog="torchft doctor", description=__doc__)
    ask_of(parser)
    parser.add_argument(
        "--quick", action="store_true", help="do not start PyTorch; skips the checks of its backends and GPUs"
    )
    parser.add_argument(
        "--node",
        action="store_true",
        help="measure and test this host, and with a lighthouse compare it with those on which this command "
        "runs at the same time; takes up to two minutes, and ends with status 69 if this host is bad",
    )
    parser.add_argument("--nodes", type=positive, metavar="N", help="with --node: the number of these hosts")
    parser.add_argument("--json", action="store_true", help="with --node: print JSON")
    args = parser.parse_args(arguments)
    lighthouses = args.lighthouse or os.environ.get(LIGHTHOUSE_ENV, "")
    if args.node:
        return check(lighthouses, args.job, args.nodes, args.json)
    if args.nodes or args.json:
        parser.error(f"{'--nodes' if args.nodes else '--json'} is not allowed without --node")
    where = lighthouses.split(",")[0]
    checks: list[Callable[[], Iterator[Finding]]] = [_versions, _limits, lambda: _own_address(where)]
    if not args.quick:
        checks.append(_torch)
    if where:
        checks.append(lambda: _lighthouse(args.lighthouse, args.job))
    else:
        checks.append(lambda: _port(args.job))
    worst = "ok"
    for each in checks:
        for finding in each():
            print(
                f"{_MARKS[finding.state]} "
                f"{finding.text}" + (f"\n      {finding.advice}" if finding.advice else "")
            )
            worst = max(worst, finding.state, key=["ok", "warn", "bad"].index)
    print({"ok": "nothing is wrong", "warn": "nothing is broken", "bad": "see the lines marked BAD"}[worst])
    return 1 if worst == "bad" else 0


def _versions() -> Iterator[Finding]:
    import torchft

    yield Finding("ok", f"torchft {torchft.__version__}, Python {sys.version.split()[0]}")
    try:
        from torchft._torchft import _load

        _load()
        yield Finding("ok", "the native library loads")
    except (ImportError, ValueError) as e:
        yield Finding("bad", str(e))
    sources = Path.cwd() / _libraries.PACKAGE.name
    if (sources / "__init__.py").exists() and sources != _libraries.PACKAGE and not _libraries.built(sources):
        yield Finding(
            "bad",
            f"scripts in this folder, and `python -m` and `python -c` started here, do not load torchft: "
            f"{_libraries.hidden(sources, _libraries.PACKAGE)}",
            f"copy the script to another folder, or {_libraries.in_place(sources.parent)}; scripts in other "
            "folders "
            f"and the command torchft load the installed package",
        )
    try:
        yield Finding("ok", f"torch {importlib.metadata.version('torch')} is installed")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("bad", "PyTorch is not installed", "pip install 'torch>=2.7'")


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _FEW_FILES:
        yield Finding(
            "warn",
            f"at most {soft} open files: few for a lighthouse of a large job",
            f"ulimit -n {min(hard, 1 << 16)}",
        )
    else:
        yield Finding("ok", f"up to {soft} open files")
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        yield Finding(
            "warn", "there is no /dev/shm", "isolated process groups and data loaders need shared memory"
        )
        return
    if free < _SMALL_SHM:
        yield Finding(
            "warn", f"{free >> 20} MiB of shared memory are free", "in a container: --shm-size=8g or more"
        )
    else:
        yield Finding("ok", f"{free >> 30} GiB of shared memory are free")


def _own_address(lighthouse: str) -> Iterator[Finding]:
    from torchft.addresses import announced_host

    try:
        host = announced_host(lighthouse)
    except ValueError as e:
        yield Finding("bad", str(e))
        return
    if localhost() != "localhost":
        yield Finding(
            "warn",
            "this machine cannot resolve localhost: `torchrun --standalone` retries that for minutes",
            "add a line to /etc/hosts, or start torchrun as `torchft run` does: --rdzv_backend c10d "
            "--rdzv_endpoint "
            f"{host_port(loopback(), 0)} --local_addr {loopback()}",
        )
    try:
        with _listener() as server:
            port = server.getsockname()[1]
            socket.create_connection((host, port), timeout=_CONNECT_SEC).close()
    except OSError as e:
        yield Finding(
            "bad",
            f"this machine announces itself as {host}, and cannot connect to that: {e}",
            "set TORCHFT_HOST to an address or a network interface that the other machines reach",
        )
        return
    address = _address(host)
    more = ", ".join([*([address] if address != host else []), *_interface(address)])
    yield Finding("ok", f"this machine announces itself as {host}" + (f" ({more})" if more else ""))
    if not lighthouse or is_loopback(_address(_host_of(lighthouse))):
        return  # the job is local, or there is none yet
    if is_loopback(address):
        yield Finding("warn", f"{host} cannot be reached from other machines", "set TORCHFT_HOST")
    name = socket.gethostname()
    if is_loopback(_address(name)) and "GLOO_SOCKET_IFNAME" not in os.environ:
        yield Finding(
            "warn",
            f"Gloo announces this machine as {name}, which is a loopback address here: other machines "
            "cannot connect",
            "set GLOO_SOCKET_IFNAME to the network interface that they reach",
        )


def _listener() -> socket.socket:
    """A server on any port, for IPv6 and IPv4 where this machine has both."""
    if _has_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _host_of(lighthouse: str) -> str:
    try:
        return urlsplit(lighthouses_of(lighthouse)[0]).hostname or ""
    except (OSError, ValueError):
        return ""  # the check that connects to it reports a bad address


def _address(host: str) -> str:
    """The IP address of a host name; the name itself if it does not resolve."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        return host


def _interface(address: str) -> list[str]:
    """The network interface with this address, if known."""
    from torchft.addresses import interface_address

    return [f"interface {name}" for _, name in socket.if_nameindex() if interface_address(name) == address][
        :1
    ]


def _torch() -> Iterator[Finding]:
    # In a separate process, so that a crash of CUDA does not end this one.
    script = (
        "import torch, torch.distributed as d; print(d.is_gloo_available(), d.is_nccl_available(), "
        "torch.cuda.device_count() if torch.cuda.is_available() else 0, "
        "'.'.join(map(str, torch.cuda.nccl.version())) if d.is_nccl_available() and "
        "torch.cuda.is_available() else '-')"
    )
    try:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        yield Finding(
            "bad", "PyTorch did not start within 120 s", "look for a full disk or a driver that hangs"
        )
        return
    if done.returncode != 0:
        yield Finding(
            "bad", "PyTorch does not start: " + (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        )
        return
    gloo, nccl, devices, version = done.stdout.split()[-4:]
    yield Finding("ok", "Gloo is available") if gloo == "True" else Finding("bad", "this PyTorch has no Gloo")
    if devices == "0":
        yield Finding("ok", "no GPU: groups use Gloo")
    elif nccl == "True":
        yield Finding("ok", f"{devices} GPUs, NCCL {version}")
        yield _monitor()
    else:
        yield Finding(
            "warn", f"{devices} GPUs, and this PyTorch has no NCCL", "install a CUDA build of PyTorch"
        )


def _monitor() -> Finding:
    """Whether PyTorch ends processes that survive a peer's failure."""
    if ends_survivors():
        return Finding(
            "warn",
            f"{DUMP_ENV}={dump_setting()}: with PyTorch's older NCCL backend, a failed peer may end healthy "
            "ranks "
            "minutes later",
            f"unset {DUMP_ENV}, or set it to 0, before the script makes its world",
        )
    if DUMP_ENV in os.environ:
        return Finding("ok", f"{DUMP_ENV}={dump_setting()}: ranks survive the failure of a peer")
    return Finding(
        "ok",
        f"{DUMP_ENV} is not set: torchft run, and the import of torchft.process_group, set it to 0 "
        "for the world",
    )


def _port(job: str | None) -> Iterator[Finding]:
    try:
        socket.create_server(("", DEFAULT_PORT)).close()
    except OSError as e:
        local = f"http://{host_port(loopback(), DEFAULT_PORT)}"
        if _is_lighthouse(local):
            yield Finding("ok", f"a lighthouse of torchft listens on port {DEFAULT_PORT}, its default")
            yield from _lighthouse(local, job)
        else:
            yield Finding(
                "warn",
                f"port {DEFAULT_PORT}, the lighthouse's default, is not free: {e}",
                "give it another: --bind [::]:PORT",
            )
        return
    yield Finding("ok", f"port {DEFAULT_PORT} is free for a lighthouse ({LIGHTHOUSE_ENV} is not set)")


def _is_lighthouse(address: str) -> bool:
    try:
        HttpLighthouse(address, timeout=_LOCAL_SEC).get("/jobs")
    except Unanswered:
        return False
    return True


def _lighthouse(addresses: str | None, job: str | None) -> Iterator[Finding]:
    try:
        lighthouse = HttpLighthouse(addresses, job)
        began = time.monotonic()
        known = any(job["job"] == lighthouse.job for job in lighthouse.get("/jobs"))
        members = lighthouse.get("/status")["members"] if known else []  # the job may not have begun
    except Unanswered as e:
        yield Finding("bad", str(e))
        return
    took = time.monotonic() - began
    yield Finding("ok", f"the lighthouse answers after {1000 * took:.0f} ms and knows {groups(len(members))}")
    if len(lighthouse.addresses) > 1:
        yield from _cluster(lighthouse.addresses)
    for member in members:
        yield from _reach(member)


def _cluster(addresses: list[str]) -> Iterator[Finding]:
    """Groups of this machine must reach each lighthouse of a cluster: any of them may lead later."""
    for address in addresses:
        try:
            HttpLighthouse(address).get("/cluster")
        except Unanswered as e:
            advice = (
                "groups on this machine wait while it leads; "
                "`torchft cluster` shows whether the others reach it"
            )
            yield Finding("bad", str(e), advice)


def _reach(member: dict[str, Any]) -> Iterator[Finding]:
    name = printable(member["replica_id"])
    places = [("manager", member.get("address")), ("store", member.get("store_address"))]
    for what, address in places:
        if not address:
            continue
        parts = urlsplit(address if "//" in address else f"//{address}")
        try:
            socket.create_connection((parts.hostname or "", parts.port or 0), timeout=_CONNECT_SEC).close()
        except (OSError, ValueError) as e:
            yield Finding(
                "bad",
                f"the {what} of {name} at {printable(address)} cannot be reached from here: {e}",
                "set TORCHFT_HOST where that group runs, and open its ports to the other groups",
            )
            return
    yield Finding("ok", f"{name} can be reached")
