"""A process with a lighthouse of the torchft on PYTHONPATH. Ends with its parent."""

from __future__ import annotations

import argparse

from events import Commands, emit

from torchft.coordination import LighthouseServer

parser = argparse.ArgumentParser()
parser.add_argument("--min_replicas", type=int, default=1)
parser.add_argument("--join_timeout_ms", type=int, default=2000)
parser.add_argument("--quorum_tick_ms", type=int, default=100)
parser.add_argument("--heartbeat_timeout_ms", type=int, default=1000)
args = parser.parse_args()

commands = Commands()
server = LighthouseServer(
    bind="[::]:0",
    min_replicas=args.min_replicas,
    join_timeout_ms=args.join_timeout_ms,
    quorum_tick_ms=args.quorum_tick_ms,
    heartbeat_timeout_ms=args.heartbeat_timeout_ms,
)
emit("listening", address=server.address())
commands.next()
server.shutdown()
