"""How a replica group that comes back gets the weights of one that stayed."""

from torchft.checkpointing.http_transport import HTTPTransport
from torchft.checkpointing.transport import CheckpointTransport

__all__ = ["CheckpointTransport", "HTTPTransport"]
