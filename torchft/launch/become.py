"""Turns a fork of the ready process into the program that was asked for, as if Python had been started."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import importlib.abc
import importlib.machinery
import io
import os
import resource
import runpy
import select
import signal
import socket
import sys
import time
import types
from collections.abc import Sequence
from typing import Any

from torchft import _forked
from torchft.launch import exec as protocol

_F_SETSIG = 10  # fcntl has it since Python 3.15
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_ABOVE = 1000  # where descriptors wait for their number
_libc = ctypes.CDLL(None)


def become(
    request: dict[str, Any],
    descriptors: list[int],
    connection: socket.socket,
    path: list[str],
    tell: int,
    changes: dict[str, str | None],
) -> None:
    """Runs the program to its end, which is that of this process.

    Args:
        request: `torchft.launch.exec.request`.
        descriptors: the pipe that ends with the process that stands for this one, and those of the program.
        connection: to whom the process id is sent, or why the program cannot be forked.
        path: sys.path of the program.
        tell: where the modules that it imports are told.
        changes: environment variables that imports have set or removed.
    """
    try:
        output = _output()
        tell = _take_over(request, descriptors, connection, tell)
        env = {**request["env"], **changes}
        os.environ.clear()
        os.environ.update({name: value for name, value in env.items() if value is not None})
        time.tzset()
        _standard_streams()
        os.write(2, output)
        _name(_arguments(request, path), request["env"])
        _seed()
        _forked.stood_for = True
    except BaseException as e:
        protocol.send(connection, {"refused": f"a fork cannot become it: {e}", "said": False})
        os._exit(1)
    answer = {"pid": os.getpid(), "notes": request["notes"]}
    protocol.send(connection, answer, [descriptor := os.pidfd_open(os.getpid())])
    os.close(descriptor)
    connection.close()
    sys.meta_path.insert(0, _Told(tell))
    _run(request)


def _take_over(request: dict[str, Any], descriptors: list[int], connection: socket.socket, tell: int) -> int:
    """Takes over what a program inherits, beside the pipe, the connection and `tell`, whose new number it
    returns. OSError: this process may not.
    """
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for descriptor in [*descriptors, tell]]
    kept = fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, _ABOVE)
    for descriptor in [*descriptors, tell]:
        os.close(descriptor)
    connection.close()
    connection.__init__(fileno=kept)  # type: ignore[misc]
    alive, *given, tell = moved
    os.setsid()
    _end_with(alive)
    for descriptor, number in zip(given, request["descriptors"]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    os.setpriority(os.PRIO_PROCESS, 0, request["nice"])
    os.sched_setaffinity(0, request["cpus"])
    for limit, value in request["limits"].items():
        if resource.getrlimit(limit) != value:
            resource.setrlimit(limit, value)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    return tell


def _end_with(alive: int) -> None:
    """The kernel kills this process when the other end of a pipe closes: PR_SET_PDEATHSIG is for the parent,
    which is the ready process.
    """
    fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([alive], [], [], 0)[0]:  # closed before
        os._exit(1)


def _output() -> bytes:
    """What the imports have printed."""
    with contextlib.suppress(OSError):
        size = os.fstat(1).st_size
        return os.pread(1, size, 0)
    return b""


def _standard_streams() -> None:
    """Makes the standard streams anew, which remember the kind of their file, as Python does with -u."""
    names = ("stdin", "stdout", "stderr")
    anew = {}
    for number, name in enumerate(names):
        old = getattr(sys, name)
        raw: Any = open(number, "wb" if number else "rb", 0 if number else -1, closefd=False)  # noqa: SIM115
        getattr(raw, "raw", raw).name = f"<{name}>"
        stream = io.TextIOWrapper(
            raw, old.encoding, old.errors, "\n", line_buffering=os.isatty(number), write_through=True
        )
        stream.mode = "w" if number else "r"  # type: ignore[misc]
        anew[id(old)] = stream
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if (logging := sys.modules.get("logging")) is not None:
        for handler in [reference() for reference in logging._handlerList]:
            if id(vars(handler).get("stream")) in anew:
                handler.stream = anew[id(handler.stream)]


def _arguments(request: dict[str, Any], path: list[str]) -> list[str]:
    """Sets sys.argv and sys.path. Returns the command line."""
    module, program = request["module"], request["program"]
    command = [request["executable"], "-u", *request["options"]]
    command += [program] if module is None else ["-m", module]
    sys.orig_argv[:] = [*command, *request["args"]]
    sys.argv[:] = ["-m" if module is not None else program, *request["args"]]
    sys.path[:] = path
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    return sys.orig_argv


class _Map(ctypes.Structure):
    _fields_ = [
        *((f"{what}_{end}", ctypes.c_uint64) for what in ("code", "data") for end in ("start", "end")),
        *((name, ctypes.c_uint64) for name in ("start_brk", "brk", "start_stack")),
        *((f"{what}_{end}", ctypes.c_uint64) for what in ("arg", "env") for end in ("start", "end")),
        ("auxv", ctypes.c_uint64),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


def _name(argv: Sequence[str], env: dict[str, str]) -> None:
    """Makes /proc/PID/cmdline and /proc/PID/environ those of the program, where the kernel can."""
    strings = [b"".join(os.fsencode(arg) + b"\0" for arg in argv)]
    strings.append(b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items()))
    global _names
    _names = ctypes.create_string_buffer(b"".join(strings))
    begin = ctypes.addressof(_names)
    middle, end = begin + len(strings[0]), begin + len(strings[0]) + len(strings[1])
    with open("/proc/self/stat") as file:
        stat = [0, 0, 0, 0, *map(int, file.read().rpartition(")")[2].split()[1:])]  # by number, as in proc(5)
    _libc.sbrk.restype = ctypes.c_void_p
    now = (stat[26], stat[27], stat[45], stat[46], stat[47], _libc.sbrk(0), stat[28])
    settings = _Map(*now, begin, middle, middle, end, 0, 0, 0xFFFFFFFF)
    _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(settings), ctypes.sizeof(settings), 0)


_names: Any = None


def _seed() -> None:
    """What every process draws by chance at an import."""
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()
    process: Any = sys.modules.get("multiprocessing.process")
    if process is not None:
        key = os.urandom(32)
        process.current_process()._config["authkey"] = process.AuthenticationString(key)
        process.ORIGINAL_DIR = os.path.abspath(os.getcwd())


class _Told(importlib.abc.MetaPathFinder):
    """Tells the ready process which modules are imported, and from where."""

    def __init__(self, tell: int) -> None:
        self._tell = tell
        self._pid = os.getpid()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is self or (spec := finder.find_spec(name, path, target)) is None:
                continue
            imports = sys._getframe(2).f_code.co_name == "_find_and_load_unlocked"  # others look for it only
            if imports and os.getpid() == self._pid:
                with contextlib.suppress(OSError):
                    os.write(self._tell, f"{name}\t{spec.origin or ''}\n".encode())
            return spec
        return None


def _run(request: dict[str, Any]) -> None:
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    main.__annotations__ = {}
    sys.modules["__main__"] = main
    try:
        if request["module"] is not None:
            sys.modules.pop(request["module"], None)  # it runs as __main__, and runpy warns of a second one
            runpy._run_module_as_main(request["module"])  # type: ignore[attr-defined]  # as python -m
            return
        file = os.path.join(os.getcwd(), request["program"])
        main.__file__ = file
        main.__dict__["__cached__"] = None
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", file)
        with io.open_code(file) as source:
            code = compile(source.read(), file, "exec", dont_inherit=True)
        exec(code, main.__dict__)
    except SystemExit:
        raise
    except BaseException as e:
        # Without the frames of this file. Python ends as usual, without showing the error again.
        trace = e.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.excepthook(type(e), e.with_traceback(trace), trace)
        sys.excepthook = lambda *_: None
        raise
