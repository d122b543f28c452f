"""The number of replica groups of a job, chosen by how much each added group brings.

``policy``: the decisions, without IO. ``places``: :class:`Scaler`, which reads and sets the number, for
Kubernetes and Slurm. ``loop``: joins both with a lighthouse. ``torchft run --scale auto`` does so for the
groups of one machine.
"""

from __future__ import annotations

from torchft.scaling.loop import follow
from torchft.scaling.places import Kubernetes, Scaler, ScalerError, Slurm

__all__ = ["Kubernetes", "Scaler", "ScalerError", "Slurm", "follow"]
