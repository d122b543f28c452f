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
from typing import Any, Callable

_PR_SET_PDEATHSIG = 1


def main(control: int, trainer: int) -> None:
    """Serves until the trainer, the process with id `trainer`, has ended or closes its end. Does not
    return.
    """
    # Ctrl-C and SIGTERM reach the whole process group. Only the trainer acts on them; this process ends with
    # it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    error = None
    worker: Any = None
    try:
        from torchft.process_group.isolated import worker
    except BaseException as e:
        # This error answers each request for a worker.
        traceback.print_exc()
        error = type(e).__name__, f"the worker's process could not start: {e}"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the workers
    try:
        _Server(socket.socket(fileno=control), trainer, worker, error).serve()
    finally:
        # The kernel kills the workers when this process ends (PR_SET_PDEATHSIG).
        os._exit(0)


class _Server:
    def __init__(
        self, control: socket.socket, trainer: int, worker: Any, error: tuple[str, str] | None
    ) -> None:
        self._control = control
        self._trainer = trainer
        self._worker = worker
        self._error = error
        self._prctl: Callable[..., int] = ctypes.CDLL(None, use_errno=True).prctl
        # Garbage collections in workers skip the present objects: touching them would copy memory that
        # workers share.
        gc.collect()
        gc.freeze()

    def serve(self) -> None:
        from torchft.process_group.isolated import protocol

        # The end of the socket alone is not enough: a child of the trainer may have inherited the trainer's
        # end.
        ended = os.pidfd_open(self._trainer)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(ended, select.POLLIN)
        while os.getppid() == self._trainer:
            if any(descriptor == ended for descriptor, _ in poll.poll()):
                return
            try:
                settings, (channel,) = protocol.receive(self._control)
            except EOFError:
                return
            with socket.socket(fileno=channel) as connection:
                self._spawn(settings, connection)

    def _spawn(self, settings: dict[str, Any], channel: socket.socket) -> None:
        from torchft.process_group.isolated import protocol

        error = self._error
        if error is None:
            try:
                if os.fork() == 0:
                    self._run(settings, channel)
            except OSError as e:
                error = type(e).__name__, f"the worker could not be forked: {e}"
        if error is not None:
            with contextlib.suppress(OSError):  # the trainer has closed its end
                protocol.send(channel, (0, (), error), timeout=0.0)

    def _run(self, settings: dict[str, Any], channel: socket.socket) -> None:
        """Runs in the worker's process. Does not return."""
        status = 1
        try:
            server = os.getppid()
            self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            # False if the server ended between the fork and prctl.
            if os.getppid() == server:
                self._worker.main(channel, settings)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
