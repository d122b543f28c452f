"""The names that users import from torchft.process_group, and their signatures."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from torchft import device_mesh, process_group

OPERATIONS = {
    "allgather": "output_tensors, input_tensor, opts",
    "allgather_into_tensor_coalesced": "output_tensors, input_tensors, opts",
    "allreduce": "tensors, opts",
    "allreduce_coalesced": "tensors, opts",
    "alltoall_base": "output_buffer, input_buffer, output_split_sizes, input_split_sizes, opts",
    "barrier": "opts",
    "broadcast": "tensor_list, opts",
    "broadcast_one": "tensor, root",
    "recv": "tensors, src_rank, tag",
    "reduce_scatter": "output_tensors, input_tensors, opts",
    "reduce_scatter_tensor_coalesced": "output_tensors, input_tensors, opts",
    "send": "tensors, dst_rank, tag",
}
THE_REST = {
    "configure": "store_addr, replica_id, rank, world_size, quorum_id=None, group_rank=None, "
    "group_world_size=None, "
    "global_ranks=None",
    "set_rank_info": "replica_id, group_rank, group_world_size, global_rank=None",
    "get_reconfigure_handle": "",
    "reconfigure": "opts",
    "size": "",
    "getBackendName": "",
    "register": "name",
    "unregister": "",
    "shutdown": "",
    "errored": "",
    "set_timeout": "timeout",
}
CONSTRUCTORS = {
    "ProcessGroupWrapper": f"timeout={timedelta(seconds=60)!r}, pg=None",
    "ProcessGroupGloo": f"timeout={timedelta(seconds=60)!r}, pg=None",
    "ProcessGroupNCCL": f"timeout={timedelta(seconds=60)!r}",
    "ProcessGroupXCCL": f"timeout={timedelta(seconds=60)!r}",
    "ProcessGroupDummy": "rank, world",
    "ErrorSwallowingProcessGroupWrapper": "pg",
    "FakeProcessGroupWrapper": "pg",
    "ManagedProcessGroup": "manager",
    "_ErrorSwallowingWork": "pg, work, default_result",
    "_WorkAcceleratorTimeout": "pg, work, timeout",
}
GROUPS = ["ProcessGroup", *(name for name in CONSTRUCTORS if not name.startswith("_"))]


def parameters(callable: Any) -> str:
    names = [
        f"{p.name}={p.default!r}" if p.default is not p.empty else p.name
        for p in inspect.signature(callable).parameters.values()
        if p.name != "self"
    ]
    return ", ".join(names)


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_constructors(name: str) -> None:
    assert parameters(getattr(process_group, name).__init__) == CONSTRUCTORS[name]


@pytest.mark.parametrize("group", GROUPS)
def test_methods(group: str) -> None:
    cls = getattr(process_group, group)
    assert issubclass(cls, dist.ProcessGroup)
    for name, expected in {**OPERATIONS, **THE_REST}.items():
        found = parameters(getattr(cls, name))
        # PyTorch 2.7's dist.all_gather passes no options.
        assert found in (
            expected,
            f"{expected}=None" if name == "allgather" else expected,
            "opts=None" if name == "barrier" else expected,
        ), name
    assert parameters(cls.abort) in ("", "errored=True")
    for name in ("group_name", "supports_reconfigure"):
        assert isinstance(inspect.getattr_static(cls, name), property)


def test_functions() -> None:
    assert parameters(process_group.create_store_client) == "store_addr, timeout"
    assert parameters(process_group.trigger_nccl_fr_trace_through_pipe) == "rank"
    assert (
        parameters(process_group.reconfigure_with_store)
        == f"pg, store_addr, rank, world_size, timeout={timedelta(seconds=60)!r}"
    )
    opts = process_group.ReconfigureOptions()
    assert (opts.timeout, opts.hints) == (None, {})


def test_constants() -> None:
    assert process_group._QUEUE_CLOSE == "queue_close"
    assert process_group._FUTURE_RESULT == "fut_result"
    assert process_group._FUTURE_EXCEPTION == "fut_exception"
    assert process_group.TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR == "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
    assert process_group.TORCHFT_TRIGGER_FR_ON_ABORT == "TORCHFT_TRIGGER_FR_ON_ABORT"


def test_device_mesh_is_the_same_function_in_both_modules() -> None:
    assert process_group.ft_init_device_mesh is device_mesh.ft_init_device_mesh


def test_names_that_others_replace_exist() -> None:
    for name in ("stream_timeout", "context_timeout", "_ErrorSwallowingWork"):
        assert name in process_group.__all__


def test_an_operation_that_a_group_lacks_is_named() -> None:
    group = process_group.ProcessGroup(0, 1)
    for name, names in OPERATIONS.items():
        if name == "broadcast_one":
            continue
        with pytest.raises(NotImplementedError, match=rf"ProcessGroup\.{name}"):
            getattr(group, name)(*[None] * len(names.split(", ")))
    for name in ("size", "getBackendName"):
        with pytest.raises(NotImplementedError, match=name):
            getattr(group, name)()
    with pytest.raises(NotImplementedError, match="set_timeout"):
        group.set_timeout(timedelta(seconds=1))
    group.abort()
    group.shutdown()
    assert group.errored() is None
