"""NCCL in this process: fast, but a GPU that hangs in it for good takes the process along."""

from __future__ import annotations

import logging
import os
from datetime import timedelta

import torch
from torch.distributed import Store

from torchft.process_group.accelerator import _NEVER, AcceleratorProcessGroup
from torchft.process_group.base import BaseProcessGroup

TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
TORCHFT_TRIGGER_FR_ON_ABORT = "TORCHFT_TRIGGER_FR_ON_ABORT"

_logger: logging.Logger = logging.getLogger(__name__)


def trigger_nccl_fr_trace_through_pipe(rank: int) -> bool:
    """Makes PyTorch dump NCCL's flight recorder of this process.

    PyTorch listens on a named pipe, `TORCH_NCCL_DEBUG_INFO_PIPE_FILE` followed by "{rank}.pipe".

    Args:
        rank: of this process in the whole job.

    Returns:
        Whether there was somebody to tell.
    """
    prefix = os.environ.get(TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR, "")
    if not prefix:
        _logger.info("no flight recorder trace: %s is not set", TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR)
        return False
    pipe = f"{prefix}{rank}.pipe"
    try:
        # Without O_NONBLOCK this would wait for a reader that may never come.
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(descriptor, b"1\n")
        finally:
            os.close(descriptor)
    except OSError as e:
        _logger.warning("no flight recorder trace: could not write to %s: %s", pipe, e)
        return False
    return True


def _trigger_on_abort() -> bool:
    return os.environ.get(TORCHFT_TRIGGER_FR_ON_ABORT, "").lower() in ("1", "true")


class ProcessGroupNCCL(AcceleratorProcessGroup):
    """A reconfigurable NCCL group on the current CUDA device.

    The communicator is non-blocking, so that it can be aborted while a peer is silent. It is made when
    the peers are, not by the first operation.

    Args:
        timeout: of every operation that is not given one, and of connecting with new peers.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60.0)) -> None:
        super().__init__(timeout)
        # PyTorch reads these in its own code. Its default on an error in NCCL (a peer died) is to end the
        # process; 2 aborts the communicator and lets the process live.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        # How long a non-blocking communicator may take to connect; the default is half an hour.
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(max(1, int(timeout.total_seconds()))))

    def _create_pg(self, store: Store, rank: int, world_size: int) -> BaseProcessGroup:
        # Not in every build of PyTorch, so not at the top.
        from torch.distributed import ProcessGroupNCCL as BaseProcessGroupNCCL

        # Read from the package: a replacement put there must take effect.
        from torchft import process_group

        opts = BaseProcessGroupNCCL.Options()
        opts.config.blocking = 0
        opts._timeout = _NEVER
        if self._global_ranks is not None:
            opts.global_ranks_in_group = self._global_ranks

        pg = BaseProcessGroup(store, rank, world_size)
        pg._set_default_backend(BaseProcessGroup.BackendType.NCCL)
        backend = BaseProcessGroupNCCL(store, rank, world_size, opts)
        device = torch.device("cuda", torch.cuda.current_device())
        with process_group.context_timeout(backend.abort, self._connect_timeout):
            backend.eager_connect_single_device(device)
        pg._register_backend(device, BaseProcessGroup.BackendType.NCCL, backend)
        return pg

    def abort(self, errored: bool = True) -> None:
        """Aborts the communicator, without waiting for the device.

        With `TORCHFT_TRIGGER_FR_ON_ABORT` set to "true", the flight recorder is dumped first.

        Args:
            errored: whether `errored` shall tell, until there are new peers.
        """
        pg = self._pg
        if errored and pg is not None and _trigger_on_abort():
            # PyTorch names the pipe by the rank in the first NCCL group of the process: whichever that is.
            ranks = (self._global_rank, int(os.environ.get("RANK", "0")), pg.rank())
            any(trigger_nccl_fr_trace_through_pipe(rank) for rank in dict.fromkeys(ranks) if rank is not None)
        super().abort(errored=errored)

    def getBackendName(self) -> str:
        return "torchft-nccl"
