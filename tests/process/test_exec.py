"""`torchft exec`: a fork of the ready process is a start of Python in all that a program can see, and it ends
with its launcher. The scripts import no PyTorch, so that each test takes a second.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import ours_path

from tests.unit.waiting import wait_until
from torchft.launch import process_tree
from torchft.launch.exec import name_of, not_python, split
from torchft.launch.ready import first_imports, sets_before_imports

# A launcher: runs one command for each line of its input, and writes the status of each.
LAUNCHER = """
import json, subprocess, sys
for line in sys.stdin:
    given = json.loads(line)
    with open(given["out"], "wb") as out, open(given["err"], "wb") as err:
        child = subprocess.Popen(given["argv"], env=given["env"], stdout=out, stderr=err, cwd=given["cwd"],
                                 stdin=open(given["in"]) if given["in"] else subprocess.DEVNULL,
                                 start_new_session=True)
        print(json.dumps({"pid": child.pid}), flush=True)
        print(json.dumps({"status": child.wait()}), flush=True)
"""
# Forked or not: the parent of a fork is the ready process.
FORKED = "b'ready.py' in os.read(os.open('/proc/%d/cmdline' % os.getppid(), os.O_RDONLY), 999)"


class Launcher:
    """A process that starts programs by `torchft exec`, as torchrun does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.site = folder / "lib" / "site-packages"
        self.site.mkdir(parents=True)
        self._starts = 0
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def script(self, text: str, name: str = "script.py") -> str:
        (self.folder / name).write_text(text)
        return str(self.folder / name)

    def module(self, name: str, text: str) -> None:
        """An installed module."""
        (self.site / f"{name}.py").write_text(text)

    def start(self, *args: str, how: str = "exec", input: str | None = None, **env: str) -> int:
        """Starts a program, and returns the process id that a launcher knows."""
        argv = (
            [sys.executable, "-u", *args]
            if how == "python"
            else [sys.executable, "-m", "torchft.cli", "exec", *args]
        )
        self._starts += 1
        files = [self.folder / f"{self._starts}.{kind}" for kind in ("out", "err", "in")]
        if input is not None:
            files[2].write_text(input)
        path = os.pathsep.join([str(ours_path()), str(self.site)])
        message = {
            "argv": argv,
            "env": {**os.environ, "PYTHONPATH": path, "TORCHELASTIC_RUN_ID": "1", **env},
            "cwd": str(self.folder),
            "out": str(files[0]),
            "err": str(files[1]),
            "in": str(files[2]) if input is not None else "",
        }
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        return self._answer()["pid"]

    def status(self) -> int:
        return self._answer()["status"]

    def run(self, *args: str, **settings: Any) -> tuple[int, str, str]:
        """Runs a program to its end: status, output, errors."""
        self.start(*args, **settings)
        return self.status(), self.output(), self.output("err")

    def output(self, kind: str = "out") -> str:
        return (self.folder / f"{self._starts}.{kind}").read_text()

    def wait(self, pattern: str) -> None:
        """Waits for a whole line that has the pattern."""
        wait_until(lambda: pattern in self.output().rpartition("\n")[0])

    def ready(self) -> list[int]:
        """Its ready processes."""
        found = []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            try:
                command, environment = (
                    Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")
                )
                if b"ready.py" in command and os.fsencode(self.site) in environment:
                    found.append(pid)
            except OSError:
                continue
        return found

    def _answer(self) -> dict[str, int]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    it = Launcher(tmp_path)
    yield it
    it.process.kill()
    it.process.wait()
    for pipe in (it.process.stdin, it.process.stdout):
        assert pipe is not None
        pipe.close()
    wait_until(lambda: not it.ready())


# What a program can see of its start.
SEEN = f"""
import json, os, signal, sys, resource, locale
def seen():
    with open("/proc/self/cmdline") as cmdline, open("/proc/self/environ") as environ:
        shown = [cmdline.read(), sorted(environ.read().split("\\0"))]
    fds = sorted(int(fd) for fd in os.listdir("/proc/self/fd"))
    main = sys.modules["__main__"]
    return {{
        "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": list(sys.flags),
        "warnings": sys.warnoptions, "x": sys._xoptions, "dont_write": sys.dont_write_bytecode,
        "main": [__name__, main.__file__, main.__name__, main.__spec__ and main.__spec__.name,
                 main.__package__, main.__doc__,
                 type(main.__loader__).__name__],
        "cwd": os.getcwd(), "umask": os.umask(0), "env": dict(os.environ), "shown": shown,
        "nice": os.nice(0), "cpus": sorted(os.sched_getaffinity(0)), "few": [fd for fd in fds if fd < 900],
        "signals": [str(signal.getsignal(n)) for n in range(1, 32)],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "limits": [resource.getrlimit(n) for n in range(16)], "leader": os.getsid(0) == os.getpid(),
        "streams": [[s.encoding, s.errors, s.line_buffering, s.write_through, s.mode, s.name, s.seekable(),
                     type(s.buffer).__name__] for s in (sys.stdin, sys.stdout, sys.stderr)],
        "executable": sys.executable, "prefix": sys.prefix, "threads": len(os.listdir("/proc/self/task")),
    }}
if __name__ == "__main__":
    print(json.dumps(seen()))
    print({FORKED}, file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["script.py", "--steps", "3", "a b", ""],
        ["./script.py"],
        ["-m", "script", "-O"],
        ["-O", "script.py"],
        ["-X", "dev", "-W", "error", "-B", "script.py"],
    ],
)
def test_a_fork_is_a_start_of_python(launcher: Launcher, arguments: list[str]) -> None:
    launcher.script(SEEN)
    status, plain, _ = launcher.run(*arguments, how="python", WITH="ünï")
    assert status == 0
    for _ in range(2):  # the first one, and one after what that has imported is imported
        status, forked, errors = launcher.run(*arguments, WITH="ünï")
        assert (status, errors) == (0, "True\n")
        assert json.loads(forked) == json.loads(plain)


@pytest.mark.parametrize(
    "body",
    [
        "sys.exit(7)",
        "sys.exit('a text')",
        "1 / 0",
        "def f(): raise ValueError('deep') from KeyError('cause')\nf()",
        "raise KeyboardInterrupt",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "os.abort()",
        "os._exit(3)",
        "atexit.register(print, 'at exit')\n"
        "threading.Thread(target=lambda: (time.sleep(.1), print('thread'))).start()",
        "syntax error",
        "exec(compile('import nothing_of_this_name', 'x', 'exec'))",
    ],
)
def test_it_ends_as_python_does(launcher: Launcher, body: str) -> None:
    launcher.script(f"import atexit, os, signal, sys, threading, time\n{body}\n")
    assert launcher.run("script.py") == launcher.run("script.py", how="python")


def test_each_start_has_its_own_standard_input_and_chance(launcher: Launcher) -> None:
    launcher.script(
        "import multiprocessing.process, os, random, sys, uuid\n"
        "print(sys.stdin.read())\n"
        "print(random.random(), uuid.uuid4(), bytes(multiprocessing.process.current_process().authkey))\n"
    )
    seen = [launcher.run("script.py", input=text)[1].splitlines() for text in ("one", "two", "")]
    assert [lines[0] for lines in seen] == ["one", "two", ""]
    assert len({lines[1] for lines in seen}) == 3


def test_the_launcher_signals_the_process_that_it_knows(launcher: Launcher) -> None:
    launcher.script(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('asked', flush=True), sys.exit(5)))\n"
        "print('pid', os.getpid(), flush=True)\n"
        "time.sleep(600)\n"
    )
    known = launcher.start("script.py")
    launcher.wait("pid")
    forked = int(launcher.output().split()[1])
    assert forked != known
    wait_until(lambda: process_tree.tree(known) == [known, forked])
    os.kill(known, signal.SIGTSTP)
    wait_until(lambda: [_state(pid) for pid in (known, forked)] == ["T", "T"])
    os.kill(known, signal.SIGCONT)
    os.kill(known, signal.SIGTERM)
    assert (launcher.status(), launcher.output().split()[2:]) == (5, ["asked"])

    known = launcher.start("script.py")
    launcher.wait("pid")
    forked = int(launcher.output().split()[1])
    os.kill(known, signal.SIGKILL)
    wait_until(lambda: not process_tree.alive([forked]))
    assert launcher.status() == -signal.SIGKILL


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


WAITS = (
    "import os, subprocess, sys, time\n"
    "child = subprocess.Popen(['sleep', '600'])\n"
    "print('pids', os.getpid(), child.pid, os.getppid(), flush=True)\n"
    "time.sleep(600)\n"
)


def test_nothing_outlives_a_killed_launcher(launcher: Launcher) -> None:
    launcher.script(WAITS)
    known = launcher.start("script.py")
    launcher.wait("pids")
    pids = [known, *map(int, launcher.output().split()[1:])]
    assert pids[3] in launcher.ready()
    os.kill(launcher.process.pid, signal.SIGKILL)
    wait_until(lambda: not process_tree.alive([pids[0], pids[1], pids[3]]))
    os.kill(pids[2], signal.SIGKILL)  # a program started by Python would have left it too


def test_what_it_has_started_ends_with_the_process_that_the_launcher_kills(launcher: Launcher) -> None:
    """torchrun kills the process group of its child."""
    launcher.script(WAITS)
    known = launcher.start("script.py")
    launcher.wait("pids")
    pids = list(map(int, launcher.output().split()[1:3]))
    os.killpg(known, signal.SIGKILL)
    wait_until(lambda: not process_tree.alive(pids))


def test_a_rank_outlives_the_ready_process(launcher: Launcher) -> None:
    launcher.script(
        "import os, sys, time\n"
        "print('pid', os.getpid(), os.getppid(), flush=True)\n"
        "while not os.path.exists('end'): time.sleep(.01)\n"
        "print('ended', flush=True)\n"
    )
    launcher.start("script.py")
    launcher.wait("pid")
    _, pid, ready = launcher.output().split()
    os.kill(int(ready), signal.SIGKILL)
    wait_until(lambda: not process_tree.alive([int(ready)]))
    assert process_tree.alive([int(pid)])
    (launcher.folder / "end").touch()
    assert launcher.status() == 1
    assert "is not known: its ready process has ended before it" in launcher.output("err")
    assert launcher.output().endswith("ended\n")
    status, output, _ = launcher.run("script.py")  # another one
    assert status == 0
    assert output.split()[2] != ready


IMPORTS = f"import os, sys\nimport one, {{}}\nprint({FORKED}, 'one' in sys.modules)\nprint({{}})\n"


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
            "thread",
        ),
        ("import socket\nlistener = socket.create_server(('127.0.0.1', 0))", "opened socket"),
        ("import os\nfile = open(os.devnull)", "opened /dev/null"),
        ("import os\nrank = os.environ.get('RANK')", "reads RANK"),
    ],
)
def test_a_module_that_must_not_be_forked_is_left_out(launcher: Launcher, module: str, why: str) -> None:
    launcher.module("one", "value = 1")
    launcher.module("bad", module)
    launcher.script(IMPORTS.format("bad", "getattr(bad, 'rank', None)"))
    said = ""
    for rank in ("0", "1", "1"):
        status, output, errors = launcher.run("script.py", RANK=rank)
        said += errors
        assert (status, output) == (0, f"True True\n{rank if why == 'reads RANK' else None}\n")
    assert said.count(why) == 1, said
    assert said.startswith("torchft exec: bad is imported anew by each start: it ")


def test_changes_are_noticed(launcher: Launcher) -> None:
    launcher.module("one", "import os\nvalue = 1, os.environ.get('SETTING')")
    launcher.script(IMPORTS.format("json", "one.value"))
    assert launcher.run("script.py")[1] == "True True\n(1, None)\n"
    assert launcher.run("script.py", SETTING="a")[1] == "True True\n(1, 'a')\n"
    launcher.module("one", "value = 22")  # the environment is updated
    assert launcher.run("script.py")[1] == "True True\n22\n"
    launcher.module("two", "value = 3")
    launcher.script(IMPORTS.format("two", "one.value, two.value"))  # the script is changed
    assert launcher.run("script.py")[1] == "True True\n22 3\n"


@pytest.mark.slow
def test_what_a_start_imports_later_is_imported_before_the_next_one(launcher: Launcher) -> None:
    launcher.module("late", "import time, os\nwhen = os.getpid()")
    launcher.module("sought", "where = 'looked for only'")
    launcher.script(
        f"import os, sys, time\nnames = 'late', 'sought'\n"
        f"print({FORKED}, *(name in sys.modules for name in names), flush=True)\n"
        "import importlib.util, late\nassert importlib.util.find_spec('sought')\ntime.sleep(2.5)\n"
    )
    assert launcher.run("script.py")[1] == "True False False\n"
    assert launcher.run("script.py")[1] == "True True False\n"


SLOW = """
import os, sys, time
if sys.argv[0].endswith("ready.py"):
    open({0!r} + "/begun", "w").close()
    deadline = time.monotonic() + 60
    while not os.path.exists({0!r} + "/go") and time.monotonic() < deadline:
        time.sleep(0.01)
    open({0!r} + "/imported", "w").close()
"""


def test_requests_are_answered_between_two_imports(launcher: Launcher) -> None:
    folders = [launcher.folder / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
        launcher.module(f"slow_{folder.name}", SLOW.format(str(folder)))
    launcher.script("print()\nimport slow_first, slow_second")
    assert launcher.run("script.py")[0] == 0
    wait_until((folders[0] / "begun").exists)
    with socket.socket(socket.AF_UNIX) as request:
        request.settimeout(120)
        request.connect(f"\0{name_of(launcher.process.pid)}")
        request.shutdown(socket.SHUT_WR)  # ended before it has said anything: the answer is its end
        (folders[0] / "go").touch()
        assert request.recv(1) == b""
    assert not (folders[1] / "imported").exists()
    (folders[1] / "go").touch()


@pytest.mark.parametrize("ended", ["program", "launcher's child"])
def test_ends_are_noticed_while_the_ready_process_imports(launcher: Launcher, ended: str) -> None:
    """torchrun begins a restart when all ranks have ended."""
    begun, go, imported = (launcher.folder / name for name in ("begun", "go", "imported"))
    launcher.module("slow", SLOW.format(str(launcher.folder)))
    launcher.script(WAITS.replace("time.sleep", "import slow\ntime.sleep"))
    known = launcher.start("script.py")
    launcher.wait("pids")
    program, child, _ = map(int, launcher.output().split()[1:])
    wait_until(begun.exists)
    if ended == "program":
        os.kill(program, signal.SIGTERM)
        assert launcher.status() == -signal.SIGTERM
        os.kill(child, signal.SIGKILL)
    else:
        os.killpg(known, signal.SIGKILL)
        wait_until(lambda: not process_tree.alive([program, child]))
    assert not imported.exists()
    go.touch()


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (
            "os.environ['OMP_NUM_THREADS'] = '3'",
            "line 2 of script.py changes the environment before an import",
        ),
        ("os.environ['MINE'] = '3'", ""),
        ("", "one.py hides an installed module"),
        ("", "its priority is higher"),
    ],
)
def test_a_start_that_cannot_be_a_fork_is_an_ordinary_one(launcher: Launcher, lines: str, why: str) -> None:
    launcher.module("one", "value = 1")
    launcher.script(f"import os, sys\n{lines}\nimport one\nprint({FORKED}, one.value)\n")
    first = launcher.run("script.py")
    assert first[1] == f"{not why.startswith('line')} 1\n"
    if "hides" in why:
        launcher.script("value = 2", "one.py")
    if "priority" in why:
        if os.geteuid():
            pytest.skip("only root may raise a priority")
        _, pid = launcher.run("-c", "import os; print(os.getppid())")[1], launcher.ready()[0]
        os.setpriority(os.PRIO_PROCESS, pid, 5)
    status, output, errors = launcher.run("script.py")
    assert status == 0
    assert output == f"{not why} {2 if 'hides' in why else 1}\n"
    if why:
        assert why in first[2] + errors
        assert "torchft exec: an ordinary start: " in first[2] + errors
        assert launcher.run("script.py")[2] == "", "it is said once"


def test_other_programs_are_started(launcher: Launcher) -> None:
    shell = launcher.script("#!/bin/sh\necho shell $1; exit 4", "run.sh")
    os.chmod(shell, 0o755)
    status, output, errors = launcher.run("./run.sh", "argument")
    assert (status, output) == (4, "shell argument\n")
    assert errors == "torchft exec: an ordinary start: ./run.sh is no script of Python\n"
    assert launcher.run("-c", "import sys; print(sys.argv)", "x")[1] == "['-c', 'x']\n"
    assert launcher.run("no_such.py")[0] == 2
    assert launcher.ready() == []


def test_a_start_without_a_launcher_leaves_nothing(launcher: Launcher) -> None:
    launcher.script(SEEN)
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ours_path()), str(launcher.site)])
    command = [sys.executable, "-m", "torchft.cli", "exec", str(launcher.folder / "script.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "False\n")
    assert launcher.ready() == []


def test_scripts_that_change_their_process(launcher: Launcher) -> None:
    launcher.module("one", "value = 1")
    launcher.script("value = 2", "hidden.py")
    (launcher.folder / "other").mkdir()
    launcher.script("value = 3", "other/hidden.py")
    launcher.script(
        "import os, sys, multiprocessing\n"
        "sys.path.insert(0, 'other'); sys.argv[1:] = ['changed']\n"
        "import hidden, one\n"
        "def told(queue): queue.put((hidden.value, one.value, sys.argv))\n"
        "if __name__ == '__main__':\n"
        "    if os.fork() == 0:\n"
        "        print('child', hidden.value, flush=True); os._exit(0)\n"
        "    os.wait()\n"
        "    for method in ('fork', 'spawn'):\n"
        "        context = multiprocessing.get_context(method)\n"
        "        queue = context.SimpleQueue()\n"
        "        process = context.Process(target=told, args=(queue,)); process.start()\n"
        "        print(method, queue.get(), flush=True); process.join()\n"
    )
    plain = launcher.run("script.py", how="python")
    assert plain[1].startswith("child 3\nfork (3, 1, ['script.py', 'changed'])\n")
    for _ in range(2):
        assert launcher.run("script.py") == plain


def test_eight_ranks_share_one_ready_process(launcher: Launcher) -> None:
    """torchrun starts all ranks at once, and one of them starts the ready process."""
    launcher.script("import os, time\nprint(os.getppid(), flush=True)\n")
    launcher.script(
        "import subprocess, sys\n"
        "command = [sys.executable, '-m', 'torchft.cli', 'exec', 'script.py']\n"
        "children = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(8)]\n"
        "print(len({child.communicate()[0] for child in children}))\n",
        "many.py",
    )
    assert launcher.run("many.py", how="python")[:2] == (0, "1\n")


def test_the_command_line_is_split() -> None:
    assert split(["-u", "-O", "-X", "dev", "a.py", "-m"])[:4] == (["-O", "-X", "dev"], None, "a.py", ["-m"])
    assert split(["-m", "torch.a", "-O"]) == ([], "torch.a", "torch.a", ["-O"], None)
    assert split(["-i", "a.py"])[4] == "python -i"
    assert not_python(__file__) is None
    assert not_python(sys.executable) == f"{sys.executable} is no script of Python"


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        (
            "'text'\nfrom __future__ import annotations\nimport a.b, c\nfrom d.e import f\nX = 1\nimport g",
            ["a.b", "c", "d.e", "g"],
        ),
        ("import a\nimport sys\nsys.path.insert(0, 'x')\nimport b", ["a", "sys"]),
        ("import os\nos.environ['X'] = '1'\nimport a", ["os"]),
        ("import os\nif os.name: import a", ["os"]),
        ("from . import a", []),
    ],
)
def test_the_first_imports_of_a_script(source: str, modules: list[str]) -> None:
    assert list(first_imports(source.encode())) == modules


def test_the_attributes_that_a_script_uses() -> None:
    script = b"import a, b.c as d\nfrom e import f, g as h\ndef main():\n    a.x.y(d.z, f.w)\n"
    assert first_imports(script) == {"a": {"x"}, "b.c": {"z"}, "e": {"f", "g"}}


def test_a_script_that_sets_what_an_import_reads(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nos.environ.setdefault('READ', '1')\nimport a\n")
    assert sets_before_imports(str(script), {"READ": "a"}).startswith("line 2 of ")
    assert sets_before_imports(str(script), {}) == ""
    script.write_text("import os, a\nos.environ['READ'] = '1'\n")
    assert sets_before_imports(str(script), {"READ": "a"}) == ""
    script.write_text("import os\nos.environ.update(more)\nimport a\n")
    assert sets_before_imports(str(script), {}) != ""


@pytest.mark.slow  # the tests above start them without torchrun
@pytest.mark.timeout(240)
def test_torchrun_restarts_its_workers_by_fork(launcher: Launcher) -> None:
    """It counts restarts as before, and all lives of its ranks have one ready process."""
    launcher.script(
        "import os, sys\n"
        f"print({FORKED}, os.environ['TORCHELASTIC_RESTART_COUNT'], os.getppid(), flush=True)\n"
        "sys.exit(3)\n"
    )
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--no-python", "--max_restarts", "2"]
    exec = [sys.executable, "-m", "torchft.cli", "exec", "script.py"]
    status, output, _ = launcher.run(*torchrun, *exec, how="python")
    lives = [line.split() for line in output.splitlines() if line.startswith(("True", "False"))]
    assert status == 1
    assert [life[:2] for life in lives] == [["True", "0"], ["True", "1"], ["True", "2"]]
    assert len({life[2] for life in lives}) == 1
    wait_until(lambda: launcher.ready() == [])
