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
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

from torchft.checkpointing.transport import CheckpointError, Interrupted

PROTOCOL = "torchft-heal/1"
_MAGIC = b"tfth"
_HEAD = struct.Struct("<4sII")
_SECRET = re.compile("[0-9a-f]{32}")
_MAX_FRAME = 1 << 30  # bytes
_MAX_BLOCK = 1 << 30  # bytes
_MAX_STATE = 1 << 63  # bytes


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


class StateRegion(NamedTuple):
    """One storage of a state."""

    nbytes: int
    device: str = "cpu"  # at the source
    name: Optional[Name] = None  # of a region that is not sent, because the target has it; its size is 0


class Structure(NamedTuple):
    """The content of the second frame."""

    regions: List[StateRegion]
    tree: Any

    @property
    def nbytes(self) -> int:
        return sum(region.nbytes for region in self.regions)


def pack_structure(regions: Sequence[StateRegion], tree: bytes) -> bytes:
    """Encodes the second frame; `tree` is the encoded structure."""
    return frame(b'{"regions":' + json.dumps(regions).encode() + b',"tree":' + tree + b"}")


def parse_structure(raw: bytes, what: str) -> Structure:
    fields = _json(raw, what)
    try:
        structure = Structure([_region(*region) for region in fields["regions"]], fields["tree"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{what}: no structure but {raw[:200]!r}") from None
    if structure.nbytes >= _MAX_STATE:
        raise CheckpointError(f"{what}: no memory for a state of {structure.nbytes} bytes")
    return structure


def _region(nbytes: Any, device: Any, name: Any) -> StateRegion:
    is_name = name is None or (isinstance(name, list) and [type(one) for one in name] == [int, str])
    if type(nbytes) is not int or nbytes < 0 or type(device) is not str or not is_name:
        raise ValueError("no region")
    return StateRegion(nbytes, device, None if name is None else (name[0], name[1]))


def frame(body: bytes) -> bytes:
    return _HEAD.pack(_MAGIC, len(body), zlib.crc32(body)) + body


def read_frame(file: io.BufferedIOBase, what: str) -> bytes:
    """Reads a frame; Interrupted if it was cut short, or its checksum is wrong."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        raise Interrupted(f"{what}: the connection ended during the handshake")
    magic, length, crc = _HEAD.unpack(head)
    if magic != _MAGIC or length > _MAX_FRAME:
        raise Interrupted(f"{what}: no frame but {head!r}")
    body = file.read(length)
    if len(body) < length:
        raise Interrupted(f"{what}: the connection ended during the handshake")
    if zlib.crc32(body) != crc:
        raise Interrupted(f"{what}: the structure was garbled on its way")
    return body


def _json(raw: bytes, what: str) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{what}: its structure cannot be read: {type(error).__name__}: {error}"
        ) from error
