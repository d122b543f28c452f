"""The fork server: a process that has imported PyTorch once, and forks a worker in milliseconds.

It runs one thread, holds no device and no connection, and never imports the trainer's `__main__`. It ends
with its trainer, even if that is killed, and its workers end with it. Each message of the trainer, the
settings of a worker with the worker's end of its channel, is a request for a worker. The kernel reaps the
workers; the trainer watches and kills them by the descriptors of their processes, which they send.

`multiprocessing.forkserver` imports the trainer's `__main__` in each child, and does not end when the trainer
is killed while a forked child of it lives, nor do its children.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import sys
import traceback
from typing import Any, Optional

_PR_SET_PDEATHSIG = 1


def main(control: int, trainer: int) -> None:
    """Serves until the trainer, a process id, has ended or closes its end. Does not return."""
    # Ctrl-C and SIGTERM reach the whole process group. Only the trainer acts; this process ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    error = None
    try:
        from torchft.process_group.isolated import worker  # noqa: F401  # once, for all workers
    except BaseException as e:
        # This error answers each request for a worker.
        traceback.print_exc()
        error = type(e).__name__, f"the worker's process could not start: {e}"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the workers
    # Garbage collections in workers skip the present objects: touching them would copy shared memory.
    gc.collect()
    gc.freeze()
    try:
        serve(socket.socket(fileno=control), trainer, error)
    finally:
        # The kernel kills the workers when this process ends (PR_SET_PDEATHSIG).
        os._exit(0)


def serve(control: socket.socket, trainer: int, error: Optional[tuple[str, str]]) -> None:
    from torchft.process_group.isolated import protocol

    # The end of the socket alone is not enough: a child of the trainer may have inherited the trainer's end.
    ended = os.pidfd_open(trainer)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(ended, select.POLLIN)
    while os.getppid() == trainer:
        if any(descriptor == ended for descriptor, _ in poll.poll()):
            return
        try:
            settings, (channel,) = protocol.receive(control)
        except EOFError:
            return
        with socket.socket(fileno=channel) as connection:
            spawn(settings, connection, control, error)


def spawn(
    settings: dict[str, Any], channel: socket.socket, control: socket.socket, error: Optional[tuple[str, str]]
) -> None:
    """Forks a worker, or sends it an error as its answer."""
    from torchft.process_group.isolated import protocol

    if error is None:
        try:
            if os.fork() == 0:
                control.close()
                _work(settings, channel)
        except OSError as e:
            error = type(e).__name__, f"the worker could not be forked: {e}"
    if error is not None:
        with contextlib.suppress(OSError):  # the trainer has closed its end
            protocol.send(channel, (0, None, error))


def _work(settings: dict[str, Any], channel: socket.socket) -> None:
    """Runs in the worker's process. Does not return."""
    status = 1
    try:
        from torchft.process_group.isolated import worker

        server = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # False if the server ended between the fork and prctl.
        if os.getppid() == server:
            worker.main(channel, settings)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
