"""Sources that agree to the native data plane, and then send invalid data."""

from __future__ import annotations

import json
import random
from datetime import timedelta
from typing import Any

import pytest

from tests.unit.checkpointing.forged_source import server_that_sends
from torchft.checkpointing import HTTPTransport
from torchft.checkpointing.codec.handshake import StateRegion, Ticket, frame, pack_structure, parse_structure
from torchft.checkpointing.native import core
from torchft.checkpointing.transport import CheckpointError

TIMEOUT = timedelta(seconds=20)
AGREES = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: torchft-heal/1\r\n\r\n"
FIELDS: dict[str, Any] = {"port": 1, "secret": "0a" * 16, "session": "s", "block_size": 4096}
STATE = pack_structure([StateRegion(8)], b'["T",0,"float32",0,[2],[1],0]')
STRANGE = [
    None,
    True,
    -1,
    0,
    1 << 31,
    1 << 62,
    1 << 90,
    1e308,
    "",
    "zz",
    "0a" * 17,
    "\ud800",
    [],
    {},
    [-1],
    [1 << 63],
]


def ticket(**changes: Any) -> bytes:
    return frame(json.dumps({**FIELDS, **changes}).encode())


@pytest.mark.parametrize(
    ("frames", "error"),
    [
        (b"", "the connection ended during the handshake"),
        (ticket()[:-1], "the connection ended during the handshake"),
        (ticket(), "the connection ended during the handshake"),
        (b"HTTP" + ticket()[4:] + STATE, "no frame but"),
        (ticket()[:4] + b"\xff" * 8 + STATE, "no frame but"),
        (ticket()[:8] + b"\0" * 4 + ticket()[12:] + STATE, "the structure was garbled on its way"),
        (frame(b"{") + STATE, "its structure cannot be read"),
        (frame(b"[" * 100_000) + STATE, "its structure cannot be read"),
        (frame(b"[]") + STATE, "no ticket but"),
        (ticket(port="1") + STATE, "no ticket but"),
        (ticket(block_size=True) + STATE, "no ticket but"),
        (ticket(port=70_000) + STATE, "port 70000"),
        (ticket(block_size=0) + STATE, "blocks of 0 bytes, allowed are 1 to 1073741824"),
        (ticket(block_size=1 << 70) + STATE, "blocks of 1180591620717411303424 bytes"),
        (ticket(secret="zz") + STATE, "the secret in its ticket is malformed"),
        (ticket(secret="\ud800") + STATE, "the secret in its ticket is malformed"),
        (ticket() + frame(b'{"regions":[[8,"cpu",null]]}'), "no structure"),
        (ticket() + pack_structure([StateRegion(-1)], b"1"), "no structure"),
        (ticket() + frame(b'{"regions":[[NaN,"cpu",null]],"tree":1}'), "no structure"),
        (
            ticket() + pack_structure([StateRegion(1 << 62)], b"1"),
            "no memory for a tensor of 4611686018427387904 bytes",
        ),
        (
            ticket() + pack_structure([StateRegion(1 << 62)] * 2, b"1"),
            "no memory for a state of 9223372036854775808 bytes",
        ),
        (ticket() + pack_structure([StateRegion(1 << 90)], b"1"), "no memory for a state of"),
    ],
)
@pytest.mark.usefixtures("at_once_again")
def test_a_forged_handshake_is_an_error_that_names_the_source(frames: bytes, error: str) -> None:
    target: HTTPTransport[Any] = HTTPTransport(TIMEOUT, 0)
    try:
        with (
            server_that_sends(AGREES + frames) as metadata,
            pytest.raises(CheckpointError, match=error) as raised,
        ):
            target.recv_checkpoint(0, metadata, 7, TIMEOUT)
        assert metadata in str(raised.value) and "step 7" in str(raised.value)
        assert not core._registered
    finally:
        target.shutdown()


def test_changed_fields() -> None:
    """A ticket that is accepted must be usable."""
    understood = 0
    for seed in range(2000):
        rng = random.Random(seed)
        fields = dict(FIELDS)
        for _ in range(rng.randint(1, 2)):
            fields[rng.choice([*FIELDS, "more"])] = rng.choice([*STRANGE, *FIELDS.values()])
        try:
            got = Ticket.parse(json.dumps(fields).encode(), "the state")
        except CheckpointError:
            continue
        understood += 1
        assert (
            0 < got.port < 1 << 16 and 0 < got.block_size <= 1 << 30 and len(bytes.fromhex(got.secret)) == 16
        ), seed
    assert 0 < understood < 2000


@pytest.mark.parametrize("strange", STRANGE)
def test_changed_structures(strange: Any) -> None:
    def parse(regions: Any) -> list[StateRegion]:
        return parse_structure(json.dumps({"regions": regions, "tree": 1}).encode(), "the state").regions

    assert parse([[5, "cuda:1", None], [0, "cpu", [3, "exp_avg"]]]) == [
        StateRegion(5, "cuda:1"),
        StateRegion(0, "cpu", (3, "exp_avg")),
    ]
    is_size = type(strange) is int and 0 <= strange < 1 << 63
    for regions, valid in [
        (strange, strange in ([], {}, "")),
        ([strange], False),
        ([[strange, "cpu", None]], is_size),
        ([[5, strange, None]], isinstance(strange, str)),
        ([[5, "cpu", strange]], strange is None),
        ([[5, "cpu", [strange, "exp_avg"]]], type(strange) is int),
        ([[5, "cpu", [3, strange]]], isinstance(strange, str)),
    ]:
        if valid:
            assert len(parse(regions)) == len(regions)
            continue
        with pytest.raises(CheckpointError, match=r"the state: no (structure|memory)"):
            parse(regions)
