"""A lighthouse whose standard error is not read continues to serve, and later reports the number of dropped
lines.

It also continues if the reader of its standard error has ended.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from typing import IO

import pytest
from processes import HERE, child_environment, ours_path

from torchft.coordination import LighthouseClient

REFUSED = 600  # requests, each with a log line of about 4 kB: more than a pipe and the lighthouse can buffer
WAIT = timedelta(seconds=30)


@contextlib.contextmanager
def lighthouse() -> Iterator[tuple[subprocess.Popen[str], IO[str], str]]:
    """A lighthouse in a process, its standard error, and its address."""
    command = [sys.executable, str(HERE / "chaos_lighthouse.py"), "--min_replicas=1", "--bind=127.0.0.1:0"]
    with subprocess.Popen(
        command, env=child_environment(ours_path()), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            port = re.search(r":(\d+)$", process.stdout.readline().strip())
            assert port
            yield process, process.stderr, f"http://127.0.0.1:{port[1]}"
        finally:
            process.kill()


@pytest.mark.timeout(120)
def test_a_lighthouse_serves_while_its_log_is_not_read() -> None:
    with lighthouse() as (process, stderr, address):
        foreign = {"Origin": "http://elsewhere/" + "x" * 4000}
        for _ in range(REFUSED):
            request = urllib.request.Request(f"{address}/api/v1/kill", b"{}", foreign, method="POST")
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(request, timeout=WAIT.total_seconds())

        client = LighthouseClient(address, WAIT)
        assert client.quorum("a", WAIT).quorum_id > 0
        with urllib.request.urlopen(f"{address}/metrics", timeout=WAIT.total_seconds()) as answer:
            dropped = re.search(
                r"^torchft_log_lines_dropped_total (\S+)$", answer.read().decode(), re.MULTILINE
            )
        assert dropped and float(dropped[1]) > 0

        process.terminate()
        counts = [
            int(lines) for lines in re.findall(r"lines of the log were dropped.* lines=(\d+)", stderr.read())
        ]
        assert sum(counts) >= float(dropped[1])
        assert process.wait(WAIT.total_seconds()) == 0


@pytest.mark.timeout(120)
def test_a_lighthouse_serves_after_the_reader_of_its_log_has_ended() -> None:
    with lighthouse() as (process, stderr, address):
        stderr.close()
        client = LighthouseClient(address, WAIT)
        assert client.quorum("a", WAIT).quorum_id > 0  # and a line of the log

        process.terminate()  # the command writes the last lines of its log before it ends
        assert process.wait(WAIT.total_seconds()) == 0
