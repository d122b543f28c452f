"""Encodes as JSON what turns a local tensor into a DTensor: mesh, placements, and the shape of the whole
tensor.

    ["spec", mesh, [placement, ...], [shape, strides, dtype] or null, [[tensor dim, [mesh dim, ...]], ...] or
    null]
    mesh       [device type, nested ranks, [name, ...] or null, groups, [name, ...] or null]
    groups     names of the process groups by dimension, or null; in PyTorch 2.7 [tag, [rank, ...], name]
    placement  ["S", dim], ["SS", dim, split factor], ["R"], ["+", reduction]

A submesh (``mesh["tp"]``) is described by its root mesh and the names of its dimensions (the last item of a
mesh), because PyTorch counts it as equal only to a submesh of the same root. Process groups are found by
their names, which are equal in all replica groups that run the same program. Neither encoding nor decoding
communicates.

This module uses private names of PyTorch, which differ between releases. So the encoder decodes its result at
once and compares: if the two differ, or a placement has another type, `encode` returns None and the caller
falls back.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist

from torchft.utils import dtype_name

_GROUPS = ("_dim_group_names", "_dim_group_infos")  # since PyTorch 2.8, and before


class SpecEncoder:
    """Describes the specs of the DTensors of one state."""

    def __init__(self) -> None:
        # By id: the mesh, kept alive so that its id stays unique, and its description.
        self._meshes: Dict[int, Tuple[Any, Any]] = {}
        self._decoder = SpecDecoder()

    def encode(self, spec: Any) -> Optional[List[Any]]:
        """The description of a `DTensorSpec`; None if it cannot be described completely."""
        try:
            if id(spec.mesh) not in self._meshes:
                self._meshes[id(spec.mesh)] = spec.mesh, _mesh(spec.mesh)
            meta, order = spec.tensor_meta, getattr(spec, "shard_order", None)
            node = [
                "spec",
                self._meshes[id(spec.mesh)][1],
                [_placement(p) for p in spec.placements],
                None if meta is None else [list(meta.shape), list(meta.stride), dtype_name(meta.dtype)],
                None if order is None else [[entry.tensor_dim, list(entry.mesh_dims)] for entry in order],
            ]
            return node if self._decoder.decode(node) == spec else None
        except Exception:  # this release of PyTorch differs from those that are known here
            return None


def _mesh(mesh: Any) -> List[Any]:
    root = _root(mesh)
    cut = None if root is mesh else list(mesh.mesh_dim_names)
    names = root.mesh_dim_names
    groups = next((getattr(root, name) for name in _GROUPS if hasattr(root, name)), None)
    if groups is not None:
        groups = [
            group if isinstance(group, str) else [group[0], [*iter(group[1])], group[2]] for group in groups
        ]
    return [root.device_type, root.mesh.tolist(), None if names is None else list(names), groups, cut]


def _root(mesh: Any) -> Any:
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources

    return _mesh_resources.get_root_mesh(mesh)


@lru_cache(maxsize=1)
def _kinds() -> Dict[str, Tuple[type, Tuple[str, ...], type]]:
    """Class, fields and their type of the placements, by tag."""
    from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

    return {
        "S": (Shard, ("dim",), int),
        "SS": (_StridedShard, ("dim", "split_factor"), int),
        "R": (Replicate, (), int),
        "+": (Partial, ("reduce_op",), str),
    }


def _placement(placement: Any) -> List[Any]:
    tag, fields = next(
        (tag, fields) for tag, (kind, fields, _) in _kinds().items() if kind is type(placement)
    )
    return [tag, *(getattr(placement, field) for field in fields)]


class SpecDecoder:
    """Decodes descriptions. Tensors with the same description of the mesh share one mesh."""

    def __init__(self) -> None:
        self._meshes: Dict[str, Any] = {}

    def decode(self, node: List[Any]) -> Any:
        """A `DTensorSpec`; ValueError, TypeError, ... if malformed, or without torch.distributed here."""
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        _, mesh, placements, meta, order = node
        made = tuple(_made_placement(p) for p in placements)
        spec = DTensorSpec(self._mesh(mesh), made)
        if len(made) != spec.mesh.ndim:
            raise ValueError(f"{len(made)} placements on a mesh of {spec.mesh.ndim} dimensions")
        if meta is not None:
            shape, strides, name = meta
            dtype = getattr(torch, name, None) if isinstance(name, str) else None
            if not isinstance(dtype, torch.dtype) or len(shape) != len(strides):
                raise ValueError(f"a tensor of dtype {name!r}, shape {shape} and strides {strides}")
            spec.tensor_meta = TensorMeta(torch.Size(_numbers(shape)), tuple(_numbers(strides)), dtype)
        entries = [(_numbers([dim])[0], tuple(_numbers(dims))) for dim, dims in order or []]
        if any(mesh_dim >= len(made) for _, dims in entries for mesh_dim in dims):
            raise ValueError(f"an order of shards {order} on a mesh of {len(made)} dimensions")
        if order is not None and hasattr(spec, "shard_order"):
            from torch.distributed.tensor._dtensor_spec import ShardOrderEntry

            wanted = tuple(ShardOrderEntry(dim, dims) for dim, dims in entries)
            if wanted != spec.shard_order:
                spec.shard_order = wanted
        return spec

    def _mesh(self, node: List[Any]) -> Any:
        key = json.dumps(node)
        if key not in self._meshes:
            self._meshes[key] = _made_mesh(*node)
        return self._meshes[key]


def _made_mesh(device_type: str, ranks: Any, names: Any, groups: Any, cut: Any) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    if not dist.is_initialized():
        raise ValueError("a DTensor is received only where torch.distributed is initialized")
    if not isinstance(device_type, str) or torch.device(device_type).type != device_type:
        raise ValueError(f"a mesh of devices {device_type!r}")
    members = torch.tensor(ranks)
    if len(members.unique()) != members.numel():
        raise ValueError(f"a mesh that has a rank twice: {ranks}")
    mesh = DeviceMesh(device_type, members, mesh_dim_names=_names(names), _init_backend=False)
    if groups is not None:
        if len(groups) != mesh.ndim:
            raise ValueError(f"{len(groups)} groups of a mesh of {mesh.ndim} dimensions")
        _find_groups(mesh, [_group(group) for group in groups])
    return mesh if cut is None else mesh[_names(cut) or ()]


def _find_groups(mesh: Any, groups: List[Any]) -> None:
    """Gives a mesh its process groups as unpickling does: it looks them up by name."""
    state = {_GROUPS[0] if all(isinstance(group, str) for group in groups) else _GROUPS[1]: groups}
    if hasattr(mesh, "__setstate__"):
        mesh.__setstate__(state)
    else:
        vars(mesh).update(state)


def _group(group: Any) -> Any:
    if isinstance(group, str):
        return group
    tag, ranks, name = group
    if not isinstance(tag, str) or not isinstance(name, str):
        raise ValueError(f"a process group {group}")
    return tag, _numbers(ranks), name


def _names(names: Any) -> Optional[Tuple[str, ...]]:
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"names of a mesh's dimensions: {names!r}")
    return None if names is None else tuple(names)


def _numbers(numbers: Any) -> List[int]:
    if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"{numbers!r} instead of numbers")
    return numbers


def _made_placement(node: List[Any]) -> Any:
    tag, *items = node
    kind, fields, of = _kinds()[tag]
    if len(items) != len(fields) or not all(type(item) is of for item in items):
        raise ValueError(f"placement {node}")
    return kind(**dict(zip(fields, _numbers(items) if of is int else items)))
