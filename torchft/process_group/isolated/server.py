"""The fork server: a process that has imported PyTorch once, and forks a worker in milliseconds.

It runs one thread, holds no device and no connection, and never imports the trainer's `__main__`. It ends with its
trainer, even if that is killed, and its workers end with it. Only the server reaps its workers. So the process id of a
worker is not reused before the server has removed it from its table, and no signal reaches another process.

The trainer sends two requests, as JSON. It numbers the workers, because it does not know their process ids:

    spawn  number and settings of a new worker; with the worker's ends of its channel, and a pipe that is closed when
           the worker has been reaped
    kill   number of the worker
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from typing import Any, Callable

_PR_SET_PDEATHSIG = 1

# The interval at which the server checks whether its trainer has ended, without pidfd_open (Linux < 5.3).
_LOOK_EVERY_MS = 500


def main(control: int, trainer: int) -> None:
    """Serves until the trainer, the process with id `trainer`, has ended or closes its end. Does not return."""
    # Ctrl-C and SIGTERM reach the whole process group. Only the trainer acts on them; this process ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    error = ""
    worker: Any = None
    try:
        from torchft.process_group.isolated import worker
    except BaseException as e:
        # This error answers each request for a worker.
        traceback.print_exc()
        error = f"{type(e).__name__}\nthe worker's process could not start: {e}"
    try:
        _Server(socket.socket(fileno=control), trainer, worker, error).serve()
    finally:
        # The kernel kills the workers when this process ends (PR_SET_PDEATHSIG).
        os._exit(0)


class _Server:
    def __init__(self, control: socket.socket, trainer: int, worker: Any, error: str) -> None:
        self._control = control
        self._trainer = trainer
        self._worker = worker
        self._error = error
        # By the worker's number: its process id, and the pipe that is closed when the worker has been reaped.
        self._workers: dict[int, tuple[int, int]] = {}
        self._wake, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._prctl: Callable[..., int] = ctypes.CDLL(None, use_errno=True).prctl
        # Garbage collections in workers skip the present objects: touching them would copy memory that workers share.
        gc.collect()
        gc.freeze()

    def serve(self) -> None:
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        try:
            # The end of the socket alone is not enough: a child of the trainer may have inherited the trainer's end.
            poll.register(os.pidfd_open(self._trainer), select.POLLIN)
            timeout = None
        except OSError:
            timeout = _LOOK_EVERY_MS
        while os.getppid() == self._trainer:
            ready = {descriptor for descriptor, _ in poll.poll(timeout)}
            if self._wake in ready:
                os.read(self._wake, 512)
                self._reap()
            if self._control.fileno() in ready and not self._handle():
                break
        for number in list(self._workers):
            self._kill(number)

    def _handle(self) -> bool:
        from torchft.process_group.isolated.messages import receive

        data, descriptors = receive(self._control)
        if not data:
            return False
        message = json.loads(data)
        if "kill" in message:
            self._kill(message["kill"])
        else:
            self._spawn(message, *descriptors)
        return True

    def _spawn(self, message: dict[str, Any], requests: int, answers: int, ended: int) -> None:
        from torchft.process_group.isolated import protocol

        error = self._error
        if not error:
            try:
                pid = os.fork()
                if pid == 0:
                    self._run(message, requests, answers, ended)
                self._workers[message["spawn"]] = pid, ended
            except OSError as e:
                error = f"{type(e).__name__}\nthe worker could not be forked: {e}"
        if error:
            os.write(answers, protocol.answer(protocol.FATAL, 0, error.encode(errors="replace")))
            os.close(ended)
        os.close(requests)
        os.close(answers)

    def _run(self, message: dict[str, Any], requests: int, answers: int, ended: int) -> None:
        """Runs in the worker's process. Does not return."""
        status = 1
        try:
            server = os.getppid()
            self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            for descriptor in (self._wake, ended, *(pipe for _, pipe in self._workers.values())):
                os.close(descriptor)
            # False if the server ended between the fork and prctl.
            if os.getppid() == server:
                self._worker.main(requests, answers, message)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _kill(self, number: int) -> None:
        if number in self._workers:
            os.kill(self._workers[number][0], signal.SIGKILL)

    def _reap(self) -> None:
        for number, (pid, ended) in list(self._workers.items()):
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                del self._workers[number]
                os.close(ended)
