"""Forks children of tests from a process that has imported PyTorch, whose import takes seconds.

    ForkServer                                  in the tests: starts that process, and asks it for children
    python forkserver.py DESCRIPTOR MODULE...   the process, at the other end of a socket, which imports these

It does not import torchft: a child imports the torchft on its PYTHONPATH, and the Go runtime starts after the
fork. It has one thread and has not used a device, so that a fork is safe. A child runs and ends its script in
the same way as Python, with these differences: /proc/PID/cmdline and /proc/PID/environ are those of the
server, and all children have the same hash seed. So `make test-all` and benchmarks start each child as a
program (FORK_SERVER=0).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

# PyTorch modules that the scripts import, or that are slow to import. Optimizers import the last one on first
# use.
IMPORTS = (
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.data",
    "torch._dynamo",
)
# Variables that are read while Python starts or PyTorch is imported. A child in which one of them differs
# from the server's is started as a program.
READ_AT_START = (
    "CUDA_",
    "GLIBC_",
    "KMP_",
    "LANG",
    "LC_",
    "LD_",
    "MALLOC_",
    "MKL_",
    "NCCL_",
    "OMP_",
    "OPENBLAS_",
)
READ_AT_START += ("PYTHON", "PYTORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_", "TRITON_")
# Exceptions: the first is taken from the child's environment. The second is set by PyTorch itself in a
# process that has used an optimizer, to the default path.
NOT_COMPARED = {"PYTHONPATH", "TORCHINDUCTOR_CACHE_DIR"}
# Read when a process group is created.
READ_LATER = ("TORCH_NCCL_",)
# One datagram holds a request: the script, its arguments, folder and environment.
REQUEST_BYTES = 1 << 18
START_TIMEOUT_S = 120.0
# The server's messages about a child: its process id, and later its exit status.
STATUS = struct.Struct("ci")
PID, EXIT = b"p", b"e"


class Forked:
    """A child of the server, with the part of `subprocess.Popen`'s interface that is used."""

    def __init__(self, status: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.stdin, self.stdout = stdin, stdout
        self.returncode: int | None = None
        self._status = status
        kind, self.pid = self._next()
        if kind != PID:
            raise RuntimeError(f"the fork server started no child: {kind!r} {self.pid}")

    def poll(self) -> int | None:
        if self.returncode is None and _readable(self._status, 0):
            _, self.returncode = self._next()
            os.close(self._status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not _readable(self._status, timeout):
            raise subprocess.TimeoutExpired(["a child of the fork server"], timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def _next(self) -> tuple[bytes, int]:
        record = os.read(self._status, STATUS.size)
        # If the server has ended, its children have, too.
        return STATUS.unpack(record) if record else (EXIT, -signal.SIGKILL)


class ForkServer:
    """Runs scripts in forks of a process that has imported PyTorch. Close it to end that process and its
    children.

    Args:
        env: the environment of most children, and of the server, which starts on first use.
        imports: the modules that it imports.
    """

    def __init__(self, env: dict[str, str], imports: Sequence[str] = IMPORTS) -> None:
        self._imports = imports
        # Without the path of a torchft, which differs between children.
        self._env = {**env, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        self._process: subprocess.Popen[bytes] | None = None
        self._threads = 0
        self._starting = threading.Lock()

    def can_start(self, env: dict[str, str]) -> bool:
        """Whether a forked child with this environment behaves like one that is started as a program."""
        read = {name for name in {**env, **self._env} if name.startswith(READ_AT_START)} - NOT_COMPARED
        read = {name for name in read if not name.startswith(READ_LATER)}
        return all(env.get(name) == self._env.get(name) for name in read) and self._has_one_thread()

    def start(self, argv: Sequence[str], env: dict[str, str], cwd: str, stderr: IO[bytes]) -> Forked:
        """Run `python ARGV`, a script and its arguments, in a new session, with pipes for stdin and
        stdout.
        """
        request = json.dumps({"argv": list(argv), "env": env, "cwd": cwd}).encode()
        its_stdin, stdin = os.pipe()
        stdout, its_stdout = os.pipe()
        status, its_status = os.pipe()
        try:
            socket.send_fds(self._control, [request], [its_stdin, its_stdout, stderr.fileno(), its_status])
        finally:
            for descriptor in (its_stdin, its_stdout, its_status):
                os.close(descriptor)
        return Forked(status, open(stdin, "wb"), open(stdout, "rb"))

    def close(self) -> None:
        if self._process is not None:
            # A process that was forked from this one may still have the socket open.
            self._control.shutdown(socket.SHUT_RDWR)
            self._control.close()
            self._process.wait(START_TIMEOUT_S)

    def _has_one_thread(self) -> bool:
        with self._starting:
            if self._process is None:
                self._begin()
        return self._threads == 1

    def _begin(self) -> None:
        self._control, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_TIMEOUT_S)
        with its:
            command = [sys.executable, __file__, str(its.fileno()), *self._imports]
            # In a new session, because Ctrl-C is meant for the tests.
            self._process = subprocess.Popen(
                command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
                start_new_session=True,
            )
        self._threads = int(self._control.recv(16) or 0)
        if self._threads != 1:
            print(
                f"the fork server has {self._threads} threads: children start by themselves", file=sys.stderr
            )


def _readable(descriptor: int, timeout: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout is None else 1000 * timeout))


def serve(control: socket.socket, imports: Sequence[str]) -> dict[str, Any]:
    """Fork a child for each request until the tests have ended. Returns in the children only, with the
    request.
    """
    for name in imports:
        if name == imports[-1]:
            # Frozen objects are not collected at the end of a child, which would take a second. But Triton,
            # which the last module imports, prints errors about objects that were not collected, so it is
            # imported after the freeze.
            gc.collect()
            gc.freeze()
        importlib.import_module(name)
    # torch.distributed.checkpoint imports the registry of rendezvous, which has loaded the installed torchft;
    # a child must import the torchft on its own path.
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchft"]:
        del sys.modules[name]
    control.send(str(len(os.listdir("/proc/self/task"))).encode())
    poll = select.poll()
    poll.register(control, select.POLLIN)
    # for each process descriptor: the process id, and the socket to report its end to
    children: dict[int, tuple[int, int]] = {}
    while True:
        for ready, _ in poll.poll():
            if ready in children:
                pid, status = children.pop(ready)
                poll.unregister(ready)
                _, ended = os.waitpid(pid, 0)
                _report(status, EXIT, os.waitstatus_to_exitcode(ended))
                os.close(status)
                os.close(ready)
                continue
            request, given, _, _ = socket.recv_fds(control, REQUEST_BYTES, 4)
            if not request:
                for pid, _ in children.values():
                    os.killpg(pid, signal.SIGKILL)
                os._exit(0)
            *standard, status = given
            pid = os.fork()
            if pid == 0:
                control.close()
                for descriptor, (_, other) in children.items():
                    os.close(descriptor)
                    os.close(other)
                become(asked := json.loads(request), standard, status)
                return asked
            for descriptor in standard:
                os.close(descriptor)
            descriptor = os.pidfd_open(pid)
            children[descriptor] = pid, status
            poll.register(descriptor, select.POLLIN)


def become(request: dict[str, Any], standard: Sequence[int], status: int) -> None:
    """Sets up a forked process like exec: session, descriptors, folder, environment, arguments and path."""
    os.setsid()
    # Sent only now, because its receiver may send a signal to the session.
    _report(status, PID, os.getpid())
    os.close(status)
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
        os.close(descriptor)
    # Created again, because the object remembers the type of its file.
    sys.stdin = os.fdopen(0, closefd=False)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])  # makes it visible to getenv in C, too
    script = request["argv"][0]
    sys.argv[:] = request["argv"]
    # The first entry is the folder of this file, where the server was started.
    sys.path[:1] = [
        os.path.dirname(script),
        *filter(None, request["env"].get("PYTHONPATH", "").split(os.pathsep)),
    ]
    importlib.invalidate_caches()


def _report(status: int, kind: bytes, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # no process waits for this child any more
        os.write(status, STATUS.pack(kind, number))


if __name__ == "__main__":
    script = serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])["argv"][0]
    main = types.ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    # Not by runpy, which removes the module at the end, while pickled classes and daemon threads still need
    # it. And not in a function: at this level the end of the script is Python's own, with status, traceback,
    # atexit and threads.
    exec(compile(Path(script).read_bytes(), script, "exec", dont_inherit=True), main.__dict__)
