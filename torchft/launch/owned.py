"""The ready process of a launcher, which starts its replica groups and their ranks as forks of it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from torchft.launch import exec as protocol
from torchft.launch.process_tree import end_with_parent

AGENT = "torchft.launch.agent"  # torchrun


class ReadyProcess:
    """A process that has imported torchrun and what a script imports, and forks both. It ends with this
    process, even if that is killed.

    Args:
        script: the program of the ranks.
        env: the environment of the groups, without what differs between them.
    """

    def __init__(self, script: str, env: Mapping[str, str]) -> None:
        self._script = script
        self._env = dict(env)
        self._process: subprocess.Popen[bytes] | None = None
        self._said: set[str] = set()
        self.name = protocol.name_of(os.getpid()) + f"-{os.urandom(4).hex()}"
        self.begin()

    def begin(self) -> None:
        """Starts it, if it does not run."""
        if self._process is not None and self._process.poll() is None:
            return
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            listener = stack.enter_context(protocol.listen(self.name))
            owner = os.pidfd_open(os.getpid())
            stack.callback(os.close, owner)
            output = stack.enter_context(open(os.memfd_create("output"), "wb"))
            given = stack.enter_context(open(os.memfd_create("torchft-ready"), "w+b"))
            given.write(protocol.settings(listener.fileno(), owner, None, self._script, [AGENT]).encode())
            given.seek(0)
            self._process = subprocess.Popen(
                protocol.command([]),
                env=self._env,
                stdin=given,
                stdout=output,
                stderr=output,
                pass_fds=[listener.fileno(), owner],
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    @property
    def pid(self) -> int:
        """Process id of the ready process."""
        assert self._process is not None, "it was not started"
        return self._process.pid

    def agent(self, args: list[str], log: Path, env: Mapping[str, str]) -> protocol.Forked | None:
        """Starts torchrun in a new session, which appends to `log`. None: it cannot be forked, said once."""
        self.begin()
        with open(os.devnull, "rb") as nothing, log.open("ab") as output:
            given = {0: nothing.fileno(), 1: output.fileno(), 2: output.fileno()}
            message = protocol.request([], AGENT, AGENT, args, dict(env))
            try:
                return protocol.fork(self.name, message, given)
            except (protocol.Refused, ConnectionRefusedError) as e:
                why = str(e) if isinstance(e, protocol.Refused) else "it has ended"
        if why not in self._said:
            self._said.add(why)
            print(f"torchft: groups start without the ready process: {why}", file=sys.stderr)
        return None

    def close(self) -> None:
        """Ends it. What it has forked lives on."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
