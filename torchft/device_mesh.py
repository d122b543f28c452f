"""DeviceMesh over a changing number of replica groups; see `ft_init_device_mesh`."""

from __future__ import annotations

from torchft.process_group.device_mesh import ft_init_device_mesh

__all__ = ["ft_init_device_mesh"]
