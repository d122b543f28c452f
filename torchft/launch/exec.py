"""Starts a program as a fork of the ready process, and stands in its place; or starts it in the ordinary way.

The launcher (torchrun, Slurm) knows the process id of this process. It forwards signals to the fork, ends
with its status or by its signal, and the kernel kills the fork when this process ends. `torchft run` runs
this file as a program of its own, without `site`: its start is a part of every restart, so it imports little,
and nothing for its annotations.
"""

from __future__ import annotations

import marshal
import os
import select
import signal
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

_ABOUT = """\
usage: torchft exec [OPTION OF PYTHON]... SCRIPT [ARGUMENT]...
       torchft exec [OPTION OF PYTHON]... -m MODULE [ARGUMENT]...

Starts a rank, as `python -u` does, by a fork of a process that has imported what the script imports:

  torchrun --no-python --max_restarts 3 torchft exec train.py
  srun torchft exec train.py

All ranks of a host share that process, which the first one starts, and which ends with torchrun or the step
of Slurm. A program that cannot be forked is started in the ordinary way, and one line says why."""
#: Set by `torchft run` for its ranks: the name of the socket of the process that they are forked from.
#: Default: none.
NAME_ENV = "TORCHFT_READY"
# One of these is in the environment of a process that a launcher has started, which may start it again.
_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
# The ready process answers when it has imported what the program imports.
_ANSWER_SEC = 300.0
_TRIES = 8  # it is made anew for each module that it must leave out
# Options of Python with a value, and those after which it runs no script, or not only a script.
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")
_OTHER = ("-c", "-h", "-?", "-V", "-i", "-x", "--help", "--version")
# The process for which a stand-in stands is at this descriptor, where `process_tree` finds it.
STANDS_FOR = 100
COMM = "torchft-exec"
_SIZE = 8  # bytes of the length of a message
_MOST_DESCRIPTORS = 200  # of one message; the kernel allows 253
_OF_KERNEL = ("KILL", "STOP", "CHLD", "PIPE", "SEGV", "BUS", "FPE", "ILL", "XFSZ")
_NOT_FORWARDED = {signal.Signals[f"SIG{name}"] for name in _OF_KERNEL}


class Refused(Exception):
    """The program cannot be forked; the message says why. `said`: whether somebody has been told already."""

    def __init__(self, reason: str, said: bool = False) -> None:
        super().__init__(reason)
        self.said = said


class Forked:
    """A program that was forked from the ready process, with the part of `subprocess.Popen`'s interface that
    launchers use. It is killed when this process ends.
    """

    def __init__(self, connection: socket.socket, alive: int, pid: int, descriptor: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.watched = connection.fileno()  # readable when it has ended, or its ready process
        self._connection = connection
        self.descriptor = descriptor  # a pidfd of the program
        self._alive = alive  # the other end of the pipe whose closing kills the program

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit status; TimeoutError if it still runs."""
        status = self._ended(timeout)
        if status is None:
            raise TimeoutError(f"process {self.pid} still runs: timed out after {timeout} s")
        return status

    def send_signal(self, number: int) -> None:
        try:  # noqa: SIM105  # contextlib is slow to import
            signal.pidfd_send_signal(self.descriptor, number)
        except ProcessLookupError:
            pass

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and readable(self.watched, timeout):
            try:
                self.returncode = receive(self._connection)["status"]
            except (EOFError, OSError):  # the ready process was killed
                self.watched = self.descriptor
                if not readable(self.descriptor, timeout):
                    return None
                why = "its ready process has ended before it"
                print(f"torchft: the status of process {self.pid} is not known: {why}", file=sys.stderr)
                self.returncode = 1
            self._connection.close()
            os.close(self._alive)
            os.close(self.descriptor)
        return self.returncode


def readable(descriptor: int, timeout: float | None, other: int | None = None) -> bool:
    """Waits until a descriptor is readable; with `other`, ends early without it when that one is."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if other is not None:
        poll.register(other, select.POLLIN)
    found = [ready for ready, _ in poll.poll(None if timeout is None else 1000 * timeout)]
    return descriptor in found


def send(connection: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Sends a message, with copies of descriptors."""
    body = marshal.dumps(message)
    socket.send_fds(connection, [len(body).to_bytes(_SIZE, "little")], list(descriptors))
    connection.sendall(body)


def receive(connection: socket.socket, descriptors: list[int] | None = None) -> dict[str, Any]:
    """Receives a message, and appends its descriptors. EOFError: the peer has closed the connection."""
    head, given, _, _ = socket.recv_fds(connection, _SIZE, _MOST_DESCRIPTORS)
    if descriptors is not None:
        descriptors += given
    size = int.from_bytes(head + _exactly(connection, _SIZE - len(head)), "little")
    return marshal.loads(_exactly(connection, size))


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        if not (more := connection.recv(size - len(data))):
            raise EOFError
        data += more
    return bytes(data)


def request(
    options: Sequence[str],
    module: str | None,
    program: str,
    args: Sequence[str],
    env: dict[str, str] | None = None,
) -> dict[str, Any]:
    """What a start takes over from this process, as if the program had been started by it."""
    import resource  # not by those that import this file for its names

    numbers = range(1, signal.NSIG)
    with open("/proc/self/cgroup") as group:
        cgroup = group.read()
    limits = {number: resource.getrlimit(number) for number in range(16)}
    return {
        "executable": sys.executable,
        "options": list(options),
        "module": module,
        "program": program,
        "args": list(args),
        "env": dict(os.environ if env is None else env),
        "cwd": os.getcwd(),
        "umask": _umask(),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "cpus": sorted(os.sched_getaffinity(0)),
        "ignored": [n for n in numbers if n not in (9, 19) and signal.getsignal(n) == signal.SIG_IGN],
        "blocked": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "limits": limits,
        "cgroup": cgroup,
    }


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def fork(name: str, message: dict[str, Any], given: dict[int, int], parent: int | None = None) -> Forked:
    """Asks the ready process for a start.

    Args:
        name: of its socket.
        message: a :func:`request`.
        given: the descriptors of the program, and what each is here.
        parent: a pidfd; the wait ends when that process has ended.

    Raises:
        ConnectionRefusedError: there is no ready process.
        Refused: it cannot fork this program.
    """
    message = {**message, "descriptors": list(given)}
    for _ in range(_TRIES):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        watched, alive = os.pipe()
        descriptors: list[int] = []
        forked: Forked | None = None
        try:
            connection.connect(f"\0{name}")
            _check_peer(connection)
            send(connection, message, [watched, *given.values()])
            if not readable(connection.fileno(), _ANSWER_SEC, parent):
                raise Refused(f"timed out: the ready process has not answered for {_ANSWER_SEC:g} s")
            answer = receive(connection, descriptors)
            if "pid" in answer:
                for note in answer["notes"]:
                    print(f"torchft exec: {note}", file=sys.stderr, flush=True)
                forked = Forked(connection, alive, answer["pid"], descriptors[0])
                return forked
            if "refused" in answer:
                raise Refused(answer["refused"], answer["said"])
        except (EOFError, ConnectionResetError, BrokenPipeError):
            pass  # it is made anew, or has ended: then the next connection fails
        except ConnectionRefusedError:
            raise
        except (OSError, ValueError) as e:
            raise Refused(f"the ready process cannot be asked: {e}") from None
        finally:
            os.close(watched)
            if forked is None:
                connection.close()
                os.close(alive)
    raise Refused("the ready process ends before it answers")


def _check_peer(connection: socket.socket) -> None:
    """Any user of this host can take the name of a socket."""
    pid_uid_gid = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    if int.from_bytes(pid_uid_gid[4:8], sys.byteorder) != os.geteuid():
        raise Refused("the socket of the ready process belongs to another user")


def settings(listener: int, owner: int, module: str | None, program: str, first: Sequence[str] = ()) -> str:
    """What a ready process reads from its standard input.

    Args:
        listener: descriptor of its socket, which listens.
        owner: pidfd of the process with which it ends.
        module: the module that it will run, or None.
        program: the script that it will run, or the module.
        first: modules that it imports in any case.
    """
    import json

    given = {"listener": listener, "owner": owner, "module": module, "program": program, "names": list(first)}
    return json.dumps(given)


def command(options: Sequence[str]) -> list[str]:
    """The command line of a ready process."""
    ready = os.path.join(os.path.dirname(os.path.abspath(__file__)), "ready.py")
    return [sys.executable, *options, "-u", ready]


def listen(name: str) -> socket.socket:
    """Takes the name of the socket, which is no file, and vanishes with its process. OSError: it is taken."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0{name}")
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def name_of(owner: int) -> str:
    """The name of the socket of the ready process of this owner, of which there is only one, also if hosts
    share their network. OSError: the owner has ended.
    """
    with open(f"/proc/{owner}/stat") as stat:
        started = stat.read().rpartition(")")[2].split()[19]
    spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "mnt")]
    return f"torchft-ready-{os.geteuid()}-{owner}-{started}-{spaces[0]}-{spaces[1]}"


def _begin(name: str, owner: int, options: Sequence[str], module: str | None, program: str) -> None:
    """Starts the ready process of a launcher, if no other of its processes does."""
    try:
        listener = listen(name)
    except OSError:
        return
    if (child := os.fork()) == 0:
        try:
            os.setsid()
            if os.fork() == 0:
                _become_ready(listener.fileno(), owner, options, module, program)
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    listener.close()


def _become_ready(
    listener: int, owner: int, options: Sequence[str], module: str | None, program: str
) -> None:
    """In the child: nothing of the job stays open."""
    kept = (listener, owner)
    given = os.memfd_create("torchft-ready")
    os.write(given, settings(*kept, module, program).encode())
    os.lseek(given, 0, os.SEEK_SET)
    os.dup2(given, 0)
    os.dup2(os.memfd_create("output"), 1)
    os.dup2(1, 2)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2:
            try:  # noqa: SIM105
                os.set_inheritable(descriptor, descriptor in kept)
            except OSError:
                pass  # that of the list itself
    os.execv(sys.executable, command(options))


def split(arguments: Sequence[str]) -> tuple[list[str], str | None, str, list[str], str | None]:
    """Splits the command line: options of Python, module, program, arguments, and why it is not forked."""
    options: list[str] = []
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        option = rest.pop(0)
        if option == "--":
            break
        if option.startswith("-m"):
            module = option[2:] or (rest.pop(0) if rest else "")
            return options, module, module, rest, None
        if option in _WITH_VALUE and rest:
            option, value = option, rest.pop(0)
            options += [option, value]
        elif option.startswith(_OTHER):
            return [*options, option], None, "", rest, f"python {option}"
        elif option != "-u":
            options.append(option)
    program = rest.pop(0) if rest else ""
    return options, None, program, rest, not_python(program)


def not_python(program: str) -> str | None:
    """Why a program is no script of Python; None if it is one."""
    if program.endswith((".py", ".pyw")):
        return None if os.path.isfile(program) else f"{program} is no file"
    try:
        with open(program, "rb") as file:
            first = file.readline(256)
    except OSError:
        return f"{program!r} is no file of this folder"
    return None if first.startswith(b"#!") and b"python" in first else f"{program} is no script of Python"


def main(arguments: Sequence[str]) -> NoReturn:
    """Runs a program in place of this process."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(_ABOUT)
        sys.exit(0)
    options, module, program, args, reason = split(arguments)
    python = module is not None or reason is None or reason.startswith("python ") or program.endswith(".py")
    if not program and not options:
        print(_ABOUT, file=sys.stderr)
        sys.exit(2)
    told = False
    parent = os.getppid()
    if reason is None:
        try:
            stand_in(parent, options, module, program, args)
        except Refused as e:
            reason, told = str(e), e.said
    if not told and any(variable in os.environ for variable in _LAUNCHERS):
        print(f"torchft exec: an ordinary start: {reason}", file=sys.stderr, flush=True)
    _end_with(parent)
    if not python:
        os.execvp(program, [program, *args])
    start = ["-m", module] if module is not None else [program] if program else []
    os.execv(sys.executable, [sys.executable, "-u", *options, *start, *args])


def _end_with(parent: int) -> None:
    """The kernel kills this process when the launcher ends, which could not end it any more."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG is 1
    if os.getppid() != parent:
        os._exit(1)


def stand_in(parent: int, options: list[str], module: str | None, program: str, args: list[str]) -> NoReturn:
    """Forks the program, and ends as it does; Refused if it cannot be forked."""
    try:
        owner = os.pidfd_open(parent)
        name = os.environ.get(NAME_ENV) or name_of(parent)
    except OSError as e:
        raise Refused(f"its launcher cannot be watched: {e}") from None
    if NAME_ENV not in os.environ and not any(variable in os.environ for variable in _LAUNCHERS):
        raise Refused("no launcher has started it")
    descriptors = _inherited()
    if not {0, 1, 2} <= set(descriptors) or len(descriptors) >= _MOST_DESCRIPTORS:
        raise Refused("a standard stream is closed, or too many files are open")
    message = request(options, module, program, args)
    for _ in range(3):
        try:
            forked = fork(name, message, {number: number for number in descriptors}, owner)
            break
        except ConnectionRefusedError:
            if NAME_ENV in os.environ:
                raise Refused("the ready process has ended") from None
            _begin(name, owner, options, module, program)
    else:
        raise Refused("no ready process starts")
    os._exit(_stand_for(forked, owner))


def _inherited() -> list[int]:
    """The descriptors that a program started by this process would have."""
    found = []
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):
        try:
            if os.get_inheritable(number):
                found.append(number)
        except OSError:
            pass  # that of the list itself
    return found


def _stand_for(forked: Forked, owner: int) -> int:
    os.dup2(forked.descriptor, STANDS_FOR, inheritable=False)
    with open("/proc/self/comm", "w") as comm:
        comm.write(COMM)

    def forward(number: int, frame: object) -> None:
        if number in (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
            forked.send_signal(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            forked.send_signal(number)

    for number in signal.valid_signals():
        if number not in _NOT_FORWARDED and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    while forked.poll() is None:
        if not readable(forked.watched, None, owner):
            return 1  # the launcher has ended: the kernel kills the program
    status = forked.returncode or 0
    if status >= 0:
        return status
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has written its own
    if -status not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
    return 1


if __name__ == "__main__":
    main(sys.argv[1:])
