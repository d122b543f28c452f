"""Checkpoint transports, by which a healing replica group receives the state of another group.

Rooms, each of which lists its modules: memory (of the host, and its copies to devices), codec (a state as
bytes), source (offers and serves it), client (fetches it), native (calls the Go core). Above them: transport,
the interface, and http_transport and pg_transport, which users make.
"""

from torchft.checkpointing.http_transport import HTTPTransport
from torchft.checkpointing.transport import CheckpointTransport

__all__ = ["CheckpointTransport", "HTTPTransport"]
