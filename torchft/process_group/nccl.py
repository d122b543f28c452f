"""NCCL in this process: fast, but if a GPU hangs in NCCL forever, only the end of the process frees it."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar, Iterator, List, Optional

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store

from torchft._nccl_env import DUMP_ENV, dump_setting, ends_survivors
from torchft.process_group._attempt import running
from torchft.process_group._first_operation import first_operation
from torchft.process_group.accelerator import _NEVER, AcceleratorProcessGroup
from torchft.process_group.base import _NO_OPTIONS, BaseProcessGroup, ProcessGroup
from torchft.utils import out_of_memory, poll

TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
#: 1: an abort of NCCL after an error first dumps its flight recorder (TORCH_NCCL_DEBUG_INFO_PIPE_FILE).
#: Default: 0.
TORCHFT_TRIGGER_FR_ON_ABORT = "TORCHFT_TRIGGER_FR_ON_ABORT"

_logger: logging.Logger = logging.getLogger(__name__)


def trigger_nccl_fr_trace_through_pipe(rank: int) -> bool:
    """Makes PyTorch dump NCCL's flight recorder of this process.

    PyTorch listens on a named pipe, `TORCH_NCCL_DEBUG_INFO_PIPE_FILE` followed by "{rank}.pipe".

    Args:
        rank: rank of this process in the whole job.

    Returns:
        Whether a process listens on the pipe.
    """
    prefix = os.environ.get(TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR, "")
    if not prefix:
        _logger.info("no flight recorder trace: %s is not set", TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR)
        return False
    pipe = f"{prefix}{rank}.pipe"
    try:
        # Without O_NONBLOCK this would wait for ever if there is no reader.
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(descriptor, b"1\n")
        finally:
            os.close(descriptor)
    except OSError as e:
        _logger.warning("no flight recorder trace: could not write to %s: %s", pipe, e)
        return False
    return True


_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_MONITORING = "TORCH_NCCL_ENABLE_MONITORING"
_environment = threading.Lock()


def _monitor_warning() -> str:
    """Why the process may end some time after a peer's failure; empty if it does not."""
    if ends_survivors():
        return (
            f"{DUMP_ENV}={dump_setting()}: the monitor of PyTorch's older NCCL backend may end this process "
            "some minutes after a peer's failure"
        )
    if DUMP_ENV in os.environ or not dist.is_available() or not dist.is_initialized():
        return ""
    newer = hasattr(dist, "ProcessGroupNCCL2") and os.environ.get("TORCH_DIST_USE_NCCL2") != "0"
    if dist.get_backend() not in (["nccl-legacy"] if newer else ["nccl", "nccl-legacy"]):
        return ""
    return (
        "the world was made before torchft.process_group was imported: its monitor may end this process some "
        f"minutes after a peer's failure; import torchft before init_process_group, or set {DUMP_ENV}=0"
    )


# When this module is imported, since the world is made after that, and reads the variable then.
_warning = _monitor_warning()
os.environ[DUMP_ENV] = dump_setting()


@contextmanager
def _failures_survived() -> Iterator[None]:
    """Sets variables while a backend is created, which reads them then.

    TORCH_NCCL_ASYNC_ERROR_HANDLING: on an error in NCCL (a peer failed) PyTorch by default ends the process;
    with 2 it only aborts the communicator. The user's value is kept, except a 1 under torchrun: that is
    torchrun's own default, and ends the process, too.

    TORCH_NCCL_ENABLE_MONITORING: by default PyTorch ends the process if NCCL's abort does not return for
    TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC; with 0 it does not. The user's value is kept.

    The variables are reset afterwards, because other groups, whose errors torchft does not check, need
    PyTorch's defaults.
    """
    with _environment:
        ours = {}
        handling = os.environ.get(_ERROR_HANDLING)
        if handling is None or (handling == "1" and "TORCHELASTIC_RUN_ID" in os.environ):
            ours[_ERROR_HANDLING] = "2"
        if _MONITORING not in os.environ:
            ours[_MONITORING] = "0"
        before = {name: os.environ.get(name) for name in ours}
        os.environ.update(ours)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


# The devices on which this process has used NCCL, or tried to.
_rehearsed: set[torch.device] = set()
# Variables of PyTorch and torchft that let the flight recorder write.
_NAMED_AFTER_FIRST_GROUP = (
    TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR,
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_FR_DUMP_TEMP_FILE",
    TORCHFT_TRIGGER_FR_ON_ABORT,
)


class WithSizes(ProcessGroup):
    """A group on NCCL: an all-to-all operation gets the sizes of its slices, also if all are equal.

    Without sizes PyTorch calls ncclAlltoAll, where NCCL has it. On a non-blocking communicator that returns
    "in progress" while it connects with the peers, and PyTorch's older backend takes this for an error. With
    sizes the backend sends and receives the slices one by one, and waits for the connections.
    """

    def _run(self, name: str, *args: Any, opts: Any = _NO_OPTIONS) -> Any:
        if name == "alltoall_base":
            args = self._with_sizes(*args)
        return super()._run(name, *args, opts=opts)

    def _with_sizes(
        self, output: torch.Tensor, given: torch.Tensor, sizes: List[int], given_sizes: List[int]
    ) -> tuple[Any, ...]:
        both, n = (output, given), self.size()
        # PyTorch refuses the last.
        if sizes or given_sizes or any(t.numel() % n or not t.is_contiguous() for t in both):
            return output, given, sizes, given_sizes
        if any(t.dim() == 0 or t.shape[0] % n for t in both):
            output, given = output.view(-1), given.view(-1)
        return output, given, [output.shape[0] // n] * n, [given.shape[0] // n] * n


def nccl_options(timeout: timedelta, global_ranks: Optional[List[int]]) -> Any:
    """The options of PyTorch's backend for a communicator that does not block the host."""
    from torch.distributed import (
        ProcessGroupNCCL as BaseProcessGroupNCCL,  # not every build of PyTorch has it
    )

    opts = BaseProcessGroupNCCL.Options()
    opts.config.blocking = 0
    opts._timeout = timeout
    if global_ranks is not None:
        opts.global_ranks_in_group = global_ranks
    return opts


class ProcessGroupNCCL(WithSizes, AcceleratorProcessGroup):
    """A reconfigurable NCCL group on the current CUDA device.

    The communicator is non-blocking, so that it can be aborted while a peer is silent. It is created by
    `configure`, not by the first operation.

    Args:
        timeout: default timeout of operations, and timeout of connecting to new peers.
    """

    # The device type; tests replace it.
    _device: ClassVar[str] = "cuda"
    _averages: ClassVar[bool] = True  # type: ignore[override]

    def __init__(self, timeout: timedelta = timedelta(seconds=60.0)) -> None:
        super().__init__(timeout)
        global _warning
        if _warning:
            _logger.warning("%s", _warning)
            _warning = ""
        # How long a non-blocking communicator may take to connect. PyTorch's default is half an hour, and it
        # reads the variable once per process.
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(max(1, int(timeout.total_seconds()))))

    def get_reconfigure_handle(self) -> str:
        """The handle by which peers find this group.

        The first call for a device uses NCCL there once, without peers, since that takes long: peers that
        receive the handle will wait for this group, and should not have to wait for that.

        Raises:
            RuntimeError: the device has too little memory.
        """
        self._rehearse()
        return super().get_reconfigure_handle()

    def _rehearse(self) -> None:
        """Loads NCCL, and lets it find the machine's networks and load its kernels. Errors are those of
        connecting, except that the device lacks memory: then no other group should wait for this one.
        """
        try:
            device = self._current_device()
        except Exception:
            return  # there is no device
        # PyTorch's flight recorder names files and pipes after the rank in the process's first group.
        if device in _rehearsed or any(os.environ.get(name) for name in _NAMED_AFTER_FIRST_GROUP):
            return
        _rehearsed.add(device)
        try:
            box = [self._create_pg(HashStore(), 0, 1)]
            try:
                work = first_operation(box[0], device)
                if not poll(work.is_completed, self._connect_timeout.total_seconds()):
                    _logger.warning(
                        "%s: an operation of one rank has not ended in time", self.getBackendName()
                    )
            finally:
                self._drop(box)
        except Exception as e:
            if out_of_memory(e):
                _rehearsed.discard(device)
                raise RuntimeError(
                    f"{self.getBackendName()}: {device} has too little memory for NCCL, also without peers; "
                    f"another process may use it: {e}"
                ) from e
            _logger.warning("%s: could not be used by one rank alone: %s", self.getBackendName(), e)

    def _create_pg(self, store: Store, rank: int, world_size: int) -> BaseProcessGroup:
        device, attempt = self._current_device(), running()
        if attempt is None or not attempt.standby:  # otherwise other peers are in use
            self._make_room(device, world_size)
        from torch.distributed import ProcessGroupNCCL as BaseProcessGroupNCCL

        opts = nccl_options(_NEVER, self._global_ranks)
        pg = BaseProcessGroup(store, rank, world_size)
        pg._set_default_backend(BaseProcessGroup.BackendType.NCCL)
        with _failures_survived():
            backend = BaseProcessGroupNCCL(store, rank, world_size, opts)
        self._connect(backend, device)
        pg._register_backend(device, BaseProcessGroup.BackendType.NCCL, backend)
        return pg

    def _current_device(self) -> torch.device:
        return torch.device(self._device, torch.get_device_module(self._device).current_device())

    def abort(self, errored: bool = True) -> None:
        """Aborts the communicator, without waiting for the device.

        With `TORCHFT_TRIGGER_FR_ON_ABORT` set to "true", the flight recorder is dumped first.

        Args:
            errored: whether `errored` returns the error, until there are new peers.
        """
        if errored and os.environ.get(TORCHFT_TRIGGER_FR_ON_ABORT, "").lower() in ("1", "true"):
            self._dump_flight_recorder()
        super().abort(errored=errored)

    def _dump_flight_recorder(self) -> None:
        pg = self._pg  # not in `abort`: that frame would keep the group longest, and its destruction may wait
        if pg is not None:
            # PyTorch names the pipe after the rank in the process's first NCCL group: any of these ranks.
            ranks = (self._global_rank, int(os.environ.get("RANK", "0")), pg.rank())
            any(trigger_nccl_fr_trace_through_pipe(rank) for rank in dict.fromkeys(ranks) if rank is not None)

    def getBackendName(self) -> str:
        return "torchft-nccl"
