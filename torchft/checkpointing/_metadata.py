"""The metadata by which a peer finds a checkpoint server.

With one address it is `http://{host}:{port}/checkpoint/`, as in upstream. Further ones are a part of the
path, `http://{host}:{port}/checkpoint/also={host},{host}/`: an upstream peer appends its request to that path and uses
the first address; our server ignores that part.
"""

from __future__ import annotations

from typing import List, Sequence, Tuple
from urllib.parse import quote, unquote, urlsplit

from torchft.addresses import host_port

PREFIX = "/checkpoint/"
_ALSO = "also="


def announce(hosts: Sequence[str], port: int) -> str:
    """Returns the metadata of a server with these hosts, the preferred one first."""
    also = f"{_ALSO}{quote(','.join(hosts[1:]), safe=',')}/" if len(hosts) > 1 else ""
    return f"http://{host_port(hosts[0], port)}{PREFIX}{also}"


def read(metadata: str) -> Tuple[List[str], int, str]:
    """Returns hosts, port and path of a checkpoint server from its metadata.

    Raises:
        ValueError: the metadata is malformed
    """
    try:
        parts = urlsplit(metadata)
        if parts.scheme == "http" and parts.hostname is not None and parts.port is not None:
            path, also = _without_also(parts.path)
            return [parts.hostname, *also], parts.port, path
    except ValueError:
        pass
    raise ValueError(f"checkpoint metadata is {metadata!r}: allowed is http://host:port/checkpoint/")


def strip(path: str) -> str:
    """Returns the path of a request without the further addresses."""
    return _without_also(path)[0]


def _without_also(path: str) -> Tuple[str, List[str]]:
    before, found, rest = path.partition(f"{PREFIX}{_ALSO}")
    if before or not found:
        return path, []
    hosts, _, rest = rest.partition("/")
    return PREFIX + rest, [host for host in unquote(hosts).split(",") if host]
