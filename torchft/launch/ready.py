"""The ready process of a host and job: it has imported what the script imports, and forks each start of it.

It runs as a program of its own (`torchft.launch.exec` starts it), has one thread, and holds no device, no
port and no file of the job. It ends with its owner, even if that is killed; the programs that were forked
from it live on, and end with their launchers. It imports installed modules only: those that the script
imports at its beginning, and those that a start was seen to import. A module that starts a thread, opens a
file, a socket or a device, or reads a variable that differs between ranks is named and left out: the process
is made anew without it, by exec, so that its children stay its children. The same happens when a module's
file or a variable that was read has changed.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import sysconfig
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

# The Go runtime does not survive a fork.
_AFTER_THE_FORK = ("torchft._torchft_go",)
# Read by libraries when they are loaded, or by Python. Those of the second row are read later.
_READ_BY_LIBRARIES = (
    "ATEN_", "BLIS_", "GLIBC_", "GOMP_", "GOTO_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "OMP_",
    "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH_",
)  # fmt: skip
_READ_LATER = ("TORCH_NCCL_", "TORCH_FR_")
_SETTLED_SEC = 1.0  # a start that has imported nothing for so long has probably imported everything
_LOOK_SEC = 0.1


# These differ between the starts of a job.
_OF_A_RANK = (
    "CUDA_VISIBLE", "GROUP_", "LOCAL_RANK", "MASTER_", "OMPI_", "PMI", "RANK", "REPLICA_", "ROLE_", "SLURM_",
    "TORCHELASTIC_", "TORCHFT_",
)  # fmt: skip


def read_by_libraries(variable: str) -> bool:
    return variable.startswith(_READ_BY_LIBRARIES) and not variable.startswith(_READ_LATER)


class _Environment(os._Environ):  # type: ignore[type-arg]
    """os.environ, which notes the names of the variables that are read."""

    def __getitem__(self, key: str) -> str:
        _reads.setdefault(key, _unit[0])
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[str]:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if str(caller).partition(".")[0] not in sys.stdlib_module_names:
            for name in os.environb:
                _reads.setdefault(os.fsdecode(name), _unit[0])
        return super().__iter__()


_reads: dict[str, str] = {}  # by whom each variable was read first
_unit = [""]  # the module that is imported


class Ready:
    """The ready process; `given`: `torchft.launch.exec.settings`, and what `_remake` keeps."""

    def __init__(self, given: dict[str, Any]) -> None:
        from torchft.launch import exec as protocol

        self._protocol = protocol
        self._given = given
        self._listener = socket.socket(fileno=given["listener"])
        self._owner: int = given["owner"]
        # Modules that a start has imported.
        self._names: dict[str, str | None] = given.setdefault("found", {})
        self._left_out: dict[str, str] = given.setdefault("left_out", {})
        self._said: list[str] = given.setdefault("said", [])
        self._notes: list[str] = given.setdefault("notes", [])  # to be said
        given.setdefault("adopted", [])
        self._children: dict[int, tuple[int, socket.socket]] = {}  # pid and connection, by pidfd
        for pid, connection in given.pop("children", []):
            self._children[os.pidfd_open(pid)] = pid, socket.socket(fileno=connection)
        self._killed: set[int] = set()  # those of them for which no process stands any more
        self._waiting: list[socket.socket] = []  # accepted since the files were looked at
        # Starts write here what they import.
        self._news, self._tell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._environment = dict(os.environ)
        self._files: dict[str, tuple[int, int, int]] = {}
        self._before: Collection[str] = ()  # the descriptors before an import

    def import_all(self) -> None:
        """Imports what the script imports, and what its starts have been seen to import."""
        first = self._of_script()
        self._import({**dict.fromkeys([*self._given["names"], *first]), **self._names}, first)

    def _of_script(self) -> dict[str, set[str]]:
        if self._given["module"] is not None:
            return {}
        try:
            with open(self._given["program"], "rb") as file:
                return first_imports(file.read())
        except (OSError, SyntaxError, ValueError):
            return {}  # the start will say it

    def _import(
        self,
        names: dict[str, str | None],
        used: Mapping[str, Collection[str]] | None = None,
        asked: Callable[[], bool] = bool,
    ) -> bool:
        """Imports modules, and what these import when an attribute is used. Returns whether it has imported
        all: a start that is `asked` for meanwhile comes before the next module.
        """
        self._before = descriptors().keys()
        os.environ.__class__ = _Environment
        signal.setitimer(signal.ITIMER_REAL, _LOOK_SEC, _LOOK_SEC)  # ends are told meanwhile
        gc.disable()  # collections are a seventh of the time of an import, and find little
        try:
            for name, origin in names.items():
                attributes = (used or {}).get(name, ())
                if (name in sys.modules and not attributes) or self._is_left_out(name):
                    continue
                if asked():
                    return False
                if _installed(name, origin):
                    self._import_one(name, attributes)
        finally:
            os.environ.__class__ = os._Environ
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._files = files()
            gc.freeze()  # a collection in a child, also at its end, would copy the memory that it shares
            gc.enable()
        return True

    def _import_one(self, name: str, used: Collection[str]) -> None:
        _unit[0] = name
        try:
            module = importlib.import_module(name)
            if "__getattr__" in vars(module):
                for attribute in used:
                    getattr(module, attribute, None)
        except (Exception, SystemExit) as e:
            self._left_out[name] = f"its import fails: {type(e).__name__}: {e}"
        if why := self._dirt():
            self._remake(name, why)

    def _is_left_out(self, name: str) -> bool:
        return any(f"{name}.".startswith(f"{out}.") for out in (*self._left_out, *_AFTER_THE_FORK))

    def _dirt(self) -> str:
        """Why a process that has imported the last module cannot be forked; empty if it can."""
        torch = sys.modules.get("torch")
        if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
            return "it has made a context of a device"
        now = descriptors()
        if opened := [now[number] for number in now.keys() - set(self._before)]:
            return f"it has opened {opened[0]}"
        if threads() > 1:
            # Some libraries, OpenBLAS for one, end their threads before a fork, and start them again on use.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python's own about such a fork
                if (child := os.fork()) == 0:
                    os._exit(0)
            os.waitpid(child, 0)
            if threads() > 1:
                return "it has started a thread"
        return ""

    def _remake(self, left_out: str | None = None, why: str = "") -> None:
        """Begins again by exec, as the same process. Does not return."""
        if left_out is not None:
            self._left_out[left_out] = why
            self._notes.append(f"{left_out} is imported anew by each start: {why}")
        signal.setitimer(signal.ITIMER_REAL, 0)  # it would survive the exec
        kept = [self._listener.fileno(), self._owner]
        self._given["children"] = [(pid, connection.fileno()) for pid, connection in self._children.values()]
        for descriptor in [*kept, *(connection for _, connection in self._given["children"])]:
            os.set_inheritable(descriptor, True)
        settings = os.memfd_create("torchft-ready")
        os.write(settings, json.dumps(self._given).encode())
        os.lseek(settings, 0, os.SEEK_SET)
        os.dup2(settings, 0)
        os.execve(sys.executable, [sys.executable, *options(), "-u", __file__], self._environment)

    def serve(self) -> tuple[dict[str, Any], list[int], socket.socket]:
        """Forks a start for each request. Returns in children only: request, descriptors, connection."""
        new = False
        while True:
            poll = select.poll()
            for descriptor in (self._listener.fileno(), self._owner, self._news, *self._children):
                poll.register(descriptor, select.POLLIN)
            for child, (_, connection) in self._children.items():
                if child not in self._killed:
                    poll.register(connection, select.POLLIN)
            timeout = 0 if self._waiting else 1000 * _SETTLED_SEC if new else None
            found = {descriptor for descriptor, _ in poll.poll(timeout)}
            if new and not found and not self._waiting:
                new = not self._import(self._names, asked=self._is_asked)
            if self._news in found:
                new = self._hear() or new
            self.look()
            if self._waiting or self._listener.fileno() in found:
                connection = self._next()
                request, descriptors = self._take(connection)
                if request is None:
                    continue
                if (pid := os.fork()) == 0:
                    return {**request, "notes": self._notes}, descriptors, connection
                self._notes.clear()
                for given in descriptors:
                    os.close(given)
                self._children[os.pidfd_open(pid)] = pid, connection

    def _is_asked(self) -> bool:
        return self._protocol.readable(self._listener.fileno(), 0)

    def _next(self) -> socket.socket:
        """The connection of the next request. The files, thousands, are looked at once for all that wait."""
        if not self._waiting:
            while self._is_asked():
                self._waiting.append(self._listener.accept()[0])
            if any(state_of(path) != state for path, state in self._files.items()):
                self._remake()  # those that wait ask again
        return self._waiting.pop(0)

    def look(self) -> None:
        """Ends with the owner, and tells how children have ended; also while it imports, for seconds."""
        readable = self._protocol.readable
        if readable(self._owner, 0):
            os._exit(0)
        for child, (pid, connection) in list(self._children.items()):
            if readable(child, 0):
                self._reap(child)
            elif child not in self._killed and readable(connection.fileno(), 0):
                self._killed.add(child)  # who stood for it has ended: the kernel has killed it
                _kill_session(pid)

    def in_child(self) -> int:
        """Closes what belongs to the ready process. Returns where a start tells what it imports."""
        self._listener.close()
        os.close(self._owner)
        os.close(self._news)
        for descriptor, (_, connection) in self._children.items():
            os.close(descriptor)
            connection.close()
        for connection in self._waiting:
            connection.close()
        return self._tell

    def changes(self) -> dict[str, str | None]:
        """The environment variables that imports have set, or removed (None)."""
        now = os.environ
        names = now.keys() | self._environment.keys()
        return {n: now.get(n) for n in names if now.get(n) != self._environment.get(n)}

    def _hear(self) -> bool:
        try:
            lines = os.read(self._news, 1 << 20).decode().splitlines()
        except BlockingIOError:
            return False
        before = len(self._names)
        for line in lines:
            name, _, origin = line.partition("\t")
            self._names.setdefault(name, origin)
        return len(self._names) > before

    def _reap(self, descriptor: int) -> None:
        pid, connection = self._children.pop(descriptor)
        self._killed.discard(descriptor)
        os.close(descriptor)
        if not self._protocol.readable(connection.fileno(), 0):
            _, status = os.waitpid(pid, 0)
            with contextlib.suppress(OSError):
                self._protocol.send(connection, {"status": os.waitstatus_to_exitcode(status)})
        else:  # who stood for it has ended
            _kill_session(pid)
            os.waitpid(pid, 0)
        connection.close()

    def _take(self, connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
        """Receives a request, and answers it if it is refused."""
        descriptors: list[int] = []
        try:
            connection.settimeout(5.0)
            self._protocol._check_peer(connection)
            request = self._protocol.receive(connection, descriptors)
            connection.settimeout(None)
            if not (why := self._difference(request)):
                return request, descriptors
            self._protocol.send(connection, {"refused": why, "said": why in self._said})
            self._said.append(why)
        except (EOFError, OSError, self._protocol.Refused):
            pass
        for descriptor in descriptors:
            os.close(descriptor)
        connection.close()
        return None, []

    def _difference(self, request: dict[str, Any]) -> str:
        """Why a fork would differ from a program that starts; empty if it would not."""
        own = self._protocol.request(options(), None, "", [])
        kinds = {"executable": "Python", "options": "Python's options", "cgroup": "its control group"}
        for key, what in kinds.items():
            if own[key] != request[key]:
                return f"{what} is not that of the ready process"
        if request["nice"] < own["nice"]:
            return "its priority is higher than that of the ready process"
        env, before, changes = request["env"], self._environment, self.changes()
        for name in sorted(before.keys() | env.keys() | _reads.keys()):
            if name in changes and env.get(name) == changes[name]:
                continue  # torchrun was forked from this process, and has what the imports have set
            if env.get(name) != before.get(name) and (name in _reads or read_by_libraries(name)):
                unit = _reads.get(name, "a library")
                if name.startswith(_OF_A_RANK) and name in _reads:
                    self._remake(unit, f"it reads {name}, which differs between ranks")
                if name not in self._given["adopted"]:
                    self._given["adopted"].append(name)
                    self._environment = env
                    self._remake()
                return f"{name} is {env.get(name)!r}, and {unit} has read {before.get(name)!r}"
        if request["module"] is not None:
            return shadowed(request["cwd"]) if request["module"] not in self._given["names"] else ""
        folder = os.path.dirname(os.path.realpath(request["program"]))
        return shadowed(folder) or sets_before_imports(request["program"], _reads)


def _kill_session(pid: int) -> None:
    """Kills what a start has started, as a signal to the process group of a program would."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def descriptors() -> dict[str, str]:
    """The open files, by number."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the list itself
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def state_of(path: str) -> tuple[int, int, int]:
    """Changes with the content of a file."""
    try:
        stat = os.stat(path)
    except OSError:
        return 0, 0, 0
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def files() -> dict[str, tuple[int, int, int]]:
    """The states of the files of all imported modules."""
    paths = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return {path: state_of(path) for path in paths if isinstance(path, str)}


_STANDARD = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib"))


def _installed(name: str, origin: str | None) -> bool:
    """Whether a module is installed, not part of the user's sources, and found where a start has found it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, ValueError):
        return False
    if spec is None or (origin is not None and (spec.origin or "") != origin):
        return False
    if spec.origin is None or spec.origin in ("built-in", "frozen"):
        return spec.origin is not None
    parts = spec.origin.split(os.sep)
    ours = name.partition(".")[0] == "torchft"
    return ours or "site-packages" in parts or "dist-packages" in parts or spec.origin.startswith(_STANDARD)


def first_imports(source: bytes) -> dict[str, set[str]]:
    """The modules that a script imports before it does anything else, and which attributes it uses."""
    script = ast.parse(source)
    found: dict[str, set[str]] = {}
    known: dict[str, str] = {}  # modules, by the name that the script has for them
    for statement in script.body:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                found.setdefault(alias.name, set())
                known[alias.asname or alias.name] = alias.name
        elif isinstance(statement, ast.ImportFrom):
            if statement.level == 0 and statement.module and statement.module != "__future__":
                found.setdefault(statement.module, set()).update(alias.name for alias in statement.names)
        elif not _harmless(statement):
            break
    for node in ast.walk(script):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known:
            found[known[node.value.id]].add(node.attr)
    return found


def shadowed(folder: str) -> str:
    """The file of a folder, first in the path of a program, that it would import in place of a module that
    has been imported; empty if there is none.
    """
    for entry in os.listdir(folder or "."):
        name, dot, kind = entry.partition(".")
        file = os.path.join(folder, entry, "__init__.py") if not dot else os.path.join(folder, entry)
        if (module := sys.modules.get(name)) is None or (dot and kind != "py"):
            continue
        own = getattr(module, "__file__", None) or ""
        if os.path.isfile(file) and os.path.realpath(own) != os.path.realpath(file) and name != "__main__":
            return f"{file} hides an installed module"
    return ""


def _harmless(statement: ast.stmt) -> bool:
    if isinstance(statement, (ast.Expr, ast.Assign, ast.AnnAssign)):
        return not any(
            isinstance(node, (ast.Call, ast.Attribute, ast.Subscript)) for node in ast.walk(statement)
        )
    return isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.Pass))


def sets_before_imports(program: str, reads: dict[str, str]) -> str:
    """The line of a script that sets a variable before an import that may read it; empty if there is none."""
    try:
        with open(program, "rb") as file:
            body = ast.parse(file.read()).body
    except (OSError, SyntaxError, ValueError):
        return ""
    last = max((i for i, s in enumerate(body) if isinstance(s, (ast.Import, ast.ImportFrom))), default=0)
    for statement in body[:last]:
        if isinstance(statement, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)):
            continue
        if not any(
            isinstance(n, ast.Attribute) and n.attr in ("environ", "putenv") for n in ast.walk(statement)
        ):
            continue
        named = [
            n.value for n in ast.walk(statement) if isinstance(n, ast.Constant) and isinstance(n.value, str)
        ]
        if not named or any(name in reads or read_by_libraries(name) for name in named):
            return f"line {statement.lineno} of {program} changes the environment before an import"
    return ""


def options() -> list[str]:
    """The options of Python with which this process was started, but -u."""
    return [option for option in sys.orig_argv[1:-1] if option != "-u"]


def has_folder_of_script() -> bool:
    """Whether Python puts the folder of the script first in its path."""
    return not (sys.flags.isolated or getattr(sys.flags, "safe_path", False))


def _put_folder_first(path: list[str], start: Mapping[str, Any]) -> None:
    """Begins a path as Python does: with the folder of the script, or for a module with the current one."""
    if has_folder_of_script():
        script = start["program"] if start["module"] is None else os.path.join(os.getcwd(), "-m")
        path.insert(0, os.path.dirname(os.path.realpath(script)))


def main() -> None:
    """Serves. Returns in forked programs, after they have run."""
    given = json.loads(sys.stdin.buffer.read())
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:  # Python ignores these two
        if signal.getsignal(number) == signal.SIG_IGN:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    if has_folder_of_script():
        del sys.path[0]  # the folder of this file
    path = list(sys.path)
    _put_folder_first(sys.path, given)
    from torchft.launch import become

    ready = Ready(given)
    signal.signal(signal.SIGALRM, lambda *_: ready.look())
    ready.import_all()
    request, descriptors, connection = ready.serve()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _put_folder_first(path, request)
    become.become(request, descriptors, connection, path, ready.in_child(), ready.changes())


if __name__ == "__main__":
    main()
