"""A DeviceMesh with a dimension whose size changes from step to step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, List

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchft.process_group.base import BaseProcessGroup
from torchft.process_group.managed import ManagedProcessGroup

if TYPE_CHECKING:
    from torchft.manager import Manager


def ft_init_device_mesh(
    *,
    device_type: str,
    mesh_shape: tuple[int, ...],
    mesh_dim_names: tuple[str, ...],
    replicate_dim: int,
    manager: Manager,
) -> DeviceMesh:
    """A mesh for HSDP (`fully_shard`) whose number of replica groups changes.

    The world of torch.distributed is this replica group, and all dimensions but one divide its ranks. The
    mesh has a single entry along `replicate_dim`. The process group of that dimension is a
    `ManagedProcessGroup`: its size is the number of participating groups, and its allreduce is the Manager's.

    Args:
        device_type: device type, such as "cuda".
        mesh_shape: the size of every dimension; the size of `replicate_dim` is ignored.
        mesh_dim_names: a name for every dimension.
        replicate_dim: the index of the dimension whose entries are the replica groups.
        manager: Manager of this replica group.

    Raises:
        ValueError: the dimensions do not fit together.
    """
    if len(mesh_shape) != len(mesh_dim_names):
        raise ValueError(
            f"mesh_shape={mesh_shape} and mesh_dim_names={mesh_dim_names} must have the same length"
        )
    if not 0 <= replicate_dim < len(mesh_shape):
        raise ValueError(f"replicate_dim={replicate_dim} must be an index of mesh_shape={mesh_shape}")

    replicas = ManagedProcessGroup(manager)
    replicas.register(mesh_dim_names[replicate_dim])

    shape = [1 if dim == replicate_dim else size for dim, size in enumerate(mesh_shape)]
    fixed = init_device_mesh(device_type, tuple(shape), mesh_dim_names=mesh_dim_names)
    groups: list[BaseProcessGroup] = [
        replicas if dim == replicate_dim else fixed.get_group(dim) for dim in range(len(shape))
    ]
    mesh = [dist.get_rank()] if len(groups) == 1 else fixed.mesh
    made = DeviceMesh.from_group(
        replicas if len(groups) == 1 else groups, device_type, mesh=mesh, mesh_dim_names=mesh_dim_names
    )
    found_by_size = getattr(made, "_dim_group_infos", None)
    if found_by_size is not None:
        tag, ranks, name = found_by_size[replicate_dim]
        found_by_size[replicate_dim] = (tag, _Ranks(ranks, replicas), name)
    return made


class _Ranks(List[int]):
    """The list of ranks of a group whose size changes; its length is always the present size.

    Older releases of PyTorch (2.7) look up the group of a mesh dimension by its tag and a list of its ranks,
    whose length must be the size of the group.
    """

    def __init__(self, ranks: List[int], group: BaseProcessGroup) -> None:
        super().__init__(ranks)
        self._group = group

    def __len__(self) -> int:
        return self._group.size()

    def __reduce__(self) -> Any:
        return list, ([*iter(self)],)  # the mesh is pickled together with a DTensor
