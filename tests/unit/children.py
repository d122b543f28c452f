"""Runs scripts in processes that are forked from one with PyTorch imported (tests/process/forkserver.py)."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from os import killpg
from pathlib import Path

import processes


def run_python(
    script: str,
    *args: object,
    env: dict[str, str] | None = None,
    timeout: float = 110.0,
    by_itself: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs a script like `python SCRIPT ARGS`, with the torchft of this process and additional variables
    `env`.

    With `by_itself` it is started as a new Python process, for tests of how Python starts or ends; else it is
    forked.
    """
    full = processes.child_environment(processes.ours_path(), env)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(script)
        argv = [str(path), *map(str, args)]
        server = processes.fork_server
        if by_itself or server is None or not server.can_start(full):
            command = [sys.executable, *argv]
            return subprocess.run(
                command, env=full, cwd=folder, capture_output=True, text=True, timeout=timeout
            )
        with open(Path(folder) / "stderr", "w+b") as stderr:
            child = server.start(argv, full, folder, stderr)
            child.stdin.close()

            def end() -> None:
                with suppress(ProcessLookupError):
                    killpg(child.pid, signal.SIGKILL)

            too_long = threading.Timer(timeout, end)
            too_long.start()
            with child.stdout as stdout:
                output = stdout.read().decode()
            code = child.wait(timeout)
            too_long.cancel()
            too_long.join()
            stderr.seek(0)
            return subprocess.CompletedProcess(argv, code, output, stderr.read().decode())
