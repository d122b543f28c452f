"""The safe encoding of a state: its structure and plain values as JSON, its tensors as regions of memory.

Plain scalars are JSON values. Everything else is a list whose first item is its kind, so that the reader
looks up no names. Values of other types are sent as a pickle, which PyTorch's restricted unpickler reads with
its own list of allowed types and the user's.

| item | value |
|---|---|
| `["l", ...]`, `["t", ...]`, `["s", ...]` | list, tuple, torch.Size |
| `["d", key, value, ...]`, `["o", key, value, ...]` | dict, OrderedDict |
| `["i", hex]`, `["c", real, imaginary]`, `["b", base64]` | an int of more than 64 bits, complex, bytes |
| `["dtype", name]`, `["device", name]` | dtype and device of PyTorch |
| `["T", region, dtype, offset, shape, strides, flags]` | a tensor; flags: 1 requires grad, 2 is a Parameter |
| `["D", local tensor, spec, flags]` | a DTensor; spec: see `dtensor.py`, or a `P` if it cannot describe it |
| `["n", dtype, shape or null, region]` | an array of numpy, or a scalar |
| `["P", base64, [region, ...], type]` | a pickle, with its storages as regions |
"""

from __future__ import annotations

import base64
import collections
import json
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np
import torch

from torchft.checkpointing.codec.dtensor import SpecDecoder, SpecEncoder
from torchft.checkpointing.codec.stream import pickle_object, unpickle
from torchft.checkpointing.transport import CheckpointError, Unsendable
from torchft.utils import dtype_name

_REQUIRES_GRAD, _PARAMETER = 1, 2
_MAX_PLAIN_INT = 2**63

Path = Tuple[str, ...]


def show_path(path: Path) -> str:
    return "".join(path) or "the state itself"


class Encoded:
    """A state without its tensors' memory. Unsendable: it refers to itself, or contains an object that cannot
    be pickled or a tensor without data.
    """

    def __init__(self, state: object) -> None:
        self.storages: List[torch.UntypedStorage] = []
        self._numbers: Dict[int, int] = {}
        self._specs = SpecEncoder()
        try:
            tree = self._encode(state, ())
        except RecursionError:
            raise Unsendable("the state to send refers to itself, or is nested too deeply") from None
        self.structure: bytes = json.dumps(tree, separators=(",", ":")).encode()

    def _region(self, storage: torch.UntypedStorage) -> int:
        number = self._numbers.setdefault(storage._cdata, len(self.storages))
        if number == len(self.storages):
            self.storages.append(storage)
        return number

    def _encode(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str, float):
            return value
        if kind is int:
            return value if -_MAX_PLAIN_INT < value < _MAX_PLAIN_INT else ["i", hex(value)]
        if kind in _SEQUENCES:
            tag = _SEQUENCES[kind]
            return [tag, *(self._encode(item, (*path, f"[{i}]")) for i, item in enumerate(value))]
        if kind in _DICTS:
            flat = [_DICTS[kind]]
            for key, item in value.items():
                where = (*path, f"[{key!r}]")
                flat += (self._encode(key, where), self._encode(item, where))
            return flat
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(value, path)
        if kind is bytes:
            return ["b", _text(value)]
        if kind is complex:
            return ["c", value.real, value.imag]
        if kind is torch.dtype:
            return ["dtype", dtype_name(value)]
        if kind is torch.device:
            return ["device", str(value)]
        return self._encode_numpy(value) or self._pickle(value, path)

    def _encode_tensor(self, tensor: torch.Tensor, path: Path) -> Any:
        if tensor.is_meta:
            raise Unsendable(
                f"{show_path(path)} is on the meta device: it has no data to send; materialize it first"
            )
        flags = _REQUIRES_GRAD * tensor.requires_grad + _PARAMETER * isinstance(tensor, torch.nn.Parameter)
        if is_dtensor(tensor):
            local = self._encode_tensor(tensor._local_tensor.detach(), path)  # type: ignore[attr-defined]
            spec = tensor._spec  # type: ignore[attr-defined]
            return ["D", local, self._specs.encode(spec) or self._pickle(spec, path), flags]
        if not is_plain(tensor):
            return self._pickle(tensor, path)
        region = self._region(tensor.untyped_storage())
        dtype = dtype_name(tensor.dtype)
        return ["T", region, dtype, tensor.storage_offset(), list(tensor.shape), list(tensor.stride()), flags]

    def _encode_numpy(self, value: Any) -> Any:
        is_scalar = isinstance(value, np.generic)
        if not (is_scalar or type(value) is np.ndarray) or value.dtype.kind not in _NUMPY_KINDS:
            return None
        own = torch.from_numpy(np.frombuffer(bytearray(value.tobytes()), dtype=np.uint8))
        shape = None if is_scalar else list(value.shape)
        return ["n", value.dtype.str, shape, self._region(own.untyped_storage())]

    def _pickle(self, value: object, path: Path) -> Any:
        try:
            pickled = pickle_object(value)
        except Exception as error:
            raise Unsendable(
                f"{show_path(path)}, a {_type_name(type(value))}, cannot be sent: {type(error).__name__}: "
                f"{error}; keep it out of the state dict"
            ) from error
        return [
            "P",
            _text(pickled.structure),
            [self._region(s) for s in pickled.storages],
            _type_name(type(value)),
        ]


_SEQUENCES: Dict[type, str] = {list: "l", tuple: "t", torch.Size: "s"}
_DICTS: Dict[type, str] = {dict: "d", collections.OrderedDict: "o"}
_NUMPY_KINDS = "biufcSUMm"  # kinds whose memory is their complete value

# The replacement of a tensor in the structure; None: the tensor is made from its region.
Replace = Callable[[Path, List[Any]], Optional[torch.Tensor]]


def decode(
    tree: Any, flats: List[torch.Tensor], what: str, replace: Optional[Replace] = None, trusted: bool = False
) -> Any:
    """Builds the state from its structure and the memory of each region; `what` names it in errors.

    Args:
        replace: returns existing tensors to be used instead
        trusted: whether this process made the tree itself, so that its pickles may hold any type

    Raises:
        CheckpointError: it is malformed, or holds a type that is not allowed
    """
    decoder = _Decoder(flats, what, replace or (lambda path, node: None), trusted)
    try:
        return decoder.decode(tree, ())
    except (CheckpointError, TimeoutError):
        raise
    except RecursionError:
        raise CheckpointError(f"{what} is nested too deeply") from None
    except Exception as error:
        raise CheckpointError(
            f"{what}: its structure is malformed: {type(error).__name__}: {error}"
        ) from error


class _Decoder:
    def __init__(self, flats: List[torch.Tensor], what: str, replace: Replace, trusted: bool) -> None:
        self._flats = flats
        self._what = what
        self._replace = replace
        self._trusted = trusted
        self._specs = SpecDecoder()

    def decode(self, node: Any, path: Path) -> Any:
        if not isinstance(node, list):
            if isinstance(node, dict):
                raise ValueError("an object of JSON")
            return node
        tag, *items = node
        if tag in ("l", "t", "s"):
            made = [self.decode(item, (*path, f"[{i}]")) for i, item in enumerate(items)]
            return made if tag == "l" else tuple(made) if tag == "t" else torch.Size(made)
        if tag in ("d", "o"):
            target: Dict[Any, Any] = {} if tag == "d" else collections.OrderedDict()
            for key_node, item in zip(items[::2], items[1::2], strict=True):
                key = self.decode(key_node, path)
                target[key] = self.decode(item, (*path, f"[{key!r}]"))
            return target
        if tag in _PLAIN:
            return _PLAIN[tag](*items)
        return getattr(self, _LEAVES[tag])(path, node)

    def _tensor(self, path: Path, node: List[Any]) -> torch.Tensor:
        _, region, _, _, _, _, flags = node
        tensor = self._replace(path, node)
        return (
            tensor if tensor is not None else with_flags(tensor_at(self._flats[_index(region)], node), flags)
        )

    def _dtensor(self, path: Path, node: List[Any]) -> torch.Tensor:
        _, local, spec, flags = node
        tensor = self._replace(path, node)
        if tensor is not None:
            return tensor
        spec = self._specs.decode(spec) if spec[0] == "spec" else self.decode(spec, path)
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._dtensor_spec import DTensorSpec

        if not isinstance(spec, DTensorSpec):
            raise ValueError(f"{show_path(path)}: no spec of a DTensor but {type(spec)}")
        made = self.decode(local, path)
        return with_flags(DTensor(made, spec, requires_grad=False), flags)

    def _array(self, path: Path, node: List[Any]) -> Any:
        _, name, shape, region = node
        dtype = np.dtype(name) if isinstance(name, str) else None
        if dtype is None or dtype.kind not in _NUMPY_KINDS:
            raise ValueError(f"{name!r} is no plain dtype of numpy")
        values = np.frombuffer(self._flats[_index(region)].numpy().tobytes(), dtype=dtype)
        return values[0] if shape is None else values.reshape(shape).copy()

    def _pickled(self, path: Path, node: List[Any]) -> Any:
        _, structure, regions, kind = node
        flats = [self._flats[_index(region)] for region in regions]
        what = f"{self._what}: {show_path(path)}, a {kind},"
        return unpickle(_raw(structure), flats, what, self._trusted)


_LEAVES = {"T": "_tensor", "D": "_dtensor", "n": "_array", "P": "_pickled"}


def tensor_at(flat: torch.Tensor, node: List[Any]) -> torch.Tensor:
    """The tensor that a `T` item describes, in the memory of its region."""
    _, _, dtype_name, offset, shape, strides, _ = node
    dtype = dtype_of(dtype_name)
    # Qint8, quint4x2, ...: is_plain rejects these, because they also have a quantizer.
    if dtype_name.startswith("q"):
        raise ValueError(f"a tensor of dtype {dtype_name!r} is more than its memory")
    numbers = [offset, *shape, *strides]
    if len(shape) != len(strides) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"a tensor of shape {shape} with strides {strides} at {offset}")
    # Checked here, because set_ would enlarge a storage that is too small.
    end = (
        offset + sum((size - 1) * stride for size, stride in zip(shape, strides)) + 1 if 0 not in shape else 0
    )
    if end * dtype.itemsize > flat.numel():
        raise ValueError(f"a tensor that ends at byte {end * dtype.itemsize} of {flat.numel()}")
    return torch.empty(0, dtype=dtype, device=flat.device).set_(
        flat.untyped_storage(), offset, shape, strides
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor consists of memory, shape and strides only."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not (tensor.is_quantized or tensor.is_meta or tensor.is_conj() or tensor.is_neg())
        and not tensor.__dict__
    )


def is_dtensor(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "_local_tensor") and hasattr(tensor, "_spec") and is_plain(tensor._local_tensor)


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of this PyTorch")
    return dtype


def with_flags(tensor: torch.Tensor, flags: int) -> torch.Tensor:
    """Returns the tensor as a Parameter or with requires_grad set, as its `T` item says."""
    requires_grad = bool(flags & _REQUIRES_GRAD)
    if flags & _PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


def _index(region: Any) -> int:
    if type(region) is not int or region < 0:
        raise ValueError(f"region {region!r}")
    return region


def _type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _raw(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


# The values that consist of their items.
_PLAIN: Dict[str, Callable[..., Any]] = {
    "i": lambda text: int(text, 16),
    "c": lambda real, imaginary: complex(real, imaginary),
    "b": _raw,
    "dtype": dtype_of,
    "device": torch.device,
}
