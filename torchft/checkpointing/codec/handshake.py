"""The handshake by which two transports agree on the native data plane, within an HTTP request for a
checkpoint.

The target's request has the header `Upgrade: torchft-heal/1`. An upstream source ignores it and sends its
stream. A source of torchft answers with status 101 and two frames of JSON: a ticket, with the port and the
secret of the data connections, and the state's structure. The data is then sent on separate connections,
while this one stays open until the target has everything: each side notices if the other ends.

A frame begins with magic bytes, its length and the CRC32 of its body, so that a damaged frame is detected.
"""

from __future__ import annotations

import io
import json
import re
import struct
import zlib
from dataclasses import asdict, dataclass
from typing import Any, Dict, List, Mapping, NamedTuple, Tuple

from torchft.checkpointing.transport import CheckpointError, Interrupted

PROTOCOL = "torchft-heal/1"
_MAGIC = b"tfth"
_HEAD = struct.Struct("<4sII")
_SECRET = re.compile("[0-9a-f]{32}")
_MAX_FRAME = 1 << 30  # bytes
_MAX_BLOCK = 1 << 30  # bytes
_MAX_STATE = 1 << 63  # bytes


class Garbled(Interrupted):
    """The received bytes differ from those that were sent; another request may succeed."""


@dataclass(frozen=True)
class Ticket:
    """Address and secret for the data connections to one offer."""

    port: int
    secret: str
    session: str  # constant while the same bytes are offered
    block_size: int

    def frame(self) -> bytes:
        return frame(json.dumps(asdict(self)).encode())

    @classmethod
    def parse(cls, raw: bytes, what: str) -> Ticket:
        fields = _json(raw, what)
        kinds = {"port": int, "secret": str, "session": str, "block_size": int}
        if not isinstance(fields, dict) or any(
            type(fields.get(name)) is not kind for name, kind in kinds.items()
        ):
            raise CheckpointError(f"{what}: no ticket but {raw[:200]!r}")
        if not 0 < fields["port"] < 1 << 16:
            raise CheckpointError(f"{what}: port {fields['port']}")
        if not 0 < fields["block_size"] <= _MAX_BLOCK:
            raise CheckpointError(
                f"{what}: blocks of {fields['block_size']} bytes, allowed are 1 to {_MAX_BLOCK}"
            )
        if not _SECRET.fullmatch(fields["secret"]):
            raise CheckpointError(f"{what}: the secret in its ticket is malformed")
        return cls(**{name: fields[name] for name in kinds})  # ignores fields of later versions


# The name of a storage of source and target: number of a parameter, and key of its optimizer state.
Name = Tuple[int, str]


def pack_structure(
    sizes: List[int], structure: bytes, devices: Mapping[int, str] = {}, named: Mapping[int, Name] = {}
) -> bytes:
    """Encodes the second frame: the sizes of the regions in bytes, the devices of the regions that are not on
    the CPU, the names of those that are not sent, and the encoded structure.
    """
    where = b',"devices":' + json.dumps(devices).encode() if devices else b""
    where += b',"named":' + json.dumps(named).encode() if named else b""
    return frame(b'{"sizes":' + json.dumps(sizes).encode() + where + b',"tree":' + structure + b"}")


class Structure(NamedTuple):
    """The content of the second frame."""

    sizes: List[int]  # sizes of the regions in bytes
    tree: Any
    devices: Dict[int, str]  # devices of regions that are not on the CPU
    named: Dict[int, Name]  # names of regions that are not sent, because the target has them; their size is 0


def parse_structure(raw: bytes, what: str) -> Structure:
    fields: Dict[str, Any] = _json(raw, what)
    sizes = fields.get("sizes") if isinstance(fields, dict) else None
    if (
        not isinstance(sizes, list)
        or "tree" not in fields
        or not all(type(n) is int and n >= 0 for n in sizes)
    ):
        raise CheckpointError(f"{what}: no structure")
    if sum(sizes) >= _MAX_STATE:
        raise CheckpointError(f"{what}: no memory for a state of {sum(sizes)} bytes")
    devices, named = fields.get("devices", {}), fields.get("named", {})
    if not _by_region(devices) or not all(type(device) is str for device in devices.values()):
        raise CheckpointError(f"{what}: its devices are {str(devices)[:200]}")
    if not _by_region(named) or not all(_is_name(name) for name in named.values()):
        raise CheckpointError(f"{what}: its names are {str(named)[:200]}")
    return Structure(
        sizes,
        fields["tree"],
        {int(key): device for key, device in devices.items()},
        {int(key): (number, of) for key, (number, of) in named.items()},
    )


def _by_region(value: Any) -> bool:
    return isinstance(value, dict) and all(key.isascii() and key.isdigit() for key in value)


def _is_name(value: Any) -> bool:
    return isinstance(value, list) and [type(one) for one in value] == [int, str]


def frame(body: bytes) -> bytes:
    return _HEAD.pack(_MAGIC, len(body), zlib.crc32(body)) + body


def read_frame(file: io.BufferedIOBase, what: str) -> bytes:
    """Reads a frame; Garbled if it was cut short, or its checksum is wrong."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        raise Garbled(f"{what}: the connection ended during the handshake")
    magic, length, crc = _HEAD.unpack(head)
    if magic != _MAGIC or length > _MAX_FRAME:
        raise Garbled(f"{what}: no frame but {head!r}")
    body = file.read(length)
    if len(body) < length:
        raise Garbled(f"{what}: the connection ended during the handshake")
    if zlib.crc32(body) != crc:
        raise Garbled(f"{what}: the structure was garbled on its way")
    return body


def _json(raw: bytes, what: str) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{what}: its structure cannot be read: {type(error).__name__}: {error}"
        ) from error
