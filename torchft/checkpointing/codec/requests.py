"""The request for a state: `GET /checkpoint/{step}/{key}`, at the address that the source has announced.

This address is the source's metadata. With one host it is `http://{host}:{port}/checkpoint/`, as in upstream.
Further ones are a part of the path, `http://{host}:{port}/checkpoint/also={host},{host}/`: an upstream peer
appends its request to that path and uses the first address; our server ignores that part.
"""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple
from urllib.parse import quote, unquote, urlsplit

import torch

from torchft.addresses import host_port

PREFIX = "/checkpoint/"
_ALSO = "also="

# Keys of requests
FULL = "full"
METADATA = "metadata"  # the structure, if the leaves come in chunks; their keys are numbers
REST = "rest"  # the state without the regions that have names
PART, DECISION = "part.", "decision."  # prefixes of keys; the quorum id follows the latter


class StatePart(NamedTuple):
    """A part of a state: a JSON value that describes it, and its bytes in host memory."""

    value: Any
    memory: torch.Tensor


def announce(hosts: Sequence[str], port: int) -> str:
    """Returns the metadata of a server with these hosts, the preferred one first."""
    also = f"{_ALSO}{quote(','.join(hosts[1:]), safe=',')}/" if len(hosts) > 1 else ""
    return f"http://{host_port(hosts[0], port)}{PREFIX}{also}"


def read(metadata: str) -> Tuple[List[str], int, str]:
    """Hosts, port and path of a checkpoint server, from its metadata; ValueError if that is malformed."""
    try:
        parts = urlsplit(metadata)
        if parts.scheme == "http" and parts.hostname is not None and parts.port is not None:
            path, also = _without_also(parts.path)
            return [parts.hostname, *also], parts.port, path
    except ValueError:
        pass
    raise ValueError(f"checkpoint metadata is {metadata!r}: allowed is http://host:port/checkpoint/")


def parse(path: str) -> Optional[Tuple[int, str]]:
    """Step and part of `/checkpoint/{step}/{part}`; None for an unknown path."""
    path, _ = _without_also(path)
    parts = path.removeprefix(PREFIX).split("/")
    if not path.startswith(PREFIX) or len(parts) != 2:
        return None
    step, key = parts
    return (int(step), key) if is_number(step.removeprefix("-")) and key else None


def is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19


def _without_also(path: str) -> Tuple[str, List[str]]:
    before, found, rest = path.partition(f"{PREFIX}{_ALSO}")
    if before or not found:
        return path, []
    hosts, _, rest = rest.partition("/")
    return PREFIX + rest, [host for host in unquote(hosts).split(",") if host]
