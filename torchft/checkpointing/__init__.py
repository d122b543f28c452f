"""Checkpoint transports, by which a healing replica group receives the state of another group."""

from torchft.checkpointing.http_transport import HTTPTransport
from torchft.checkpointing.transport import CheckpointTransport

__all__ = ["CheckpointTransport", "HTTPTransport"]
