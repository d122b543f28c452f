"""A process that ends while its Manager waits: nothing may keep it alive, since for its peers it is alive."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import signal
import sys
from datetime import timedelta
from torch.distributed import TCPStore
from torchft.coordination import LighthouseServer
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2)  # there is no second group: no quorum
store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=ProcessGroupGloo(), load_state_dict=lambda s: None, state_dict=lambda: {}, min_replica_size=1,
    rank=0, world_size=1, store_addr="localhost", store_port=store.port, lighthouse_addr=lighthouse.address(),
    quorum_timeout=timedelta(seconds=600),
)
manager.start_quorum()
print("waiting", flush=True)
if sys.argv[1] == "raises":
    raise ValueError("the user's own")
manager.wait_quorum()
"""


@pytest.mark.parametrize("how", ["ctrl-c", "raises"])
def test_process_ends_at_once(how: str) -> None:
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waiting\n"
            started = time.monotonic()
            if how == "ctrl-c":
                time.sleep(0.2)  # into the wait
                process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=100)
        finally:
            process.kill()
    assert time.monotonic() - started < 60  # seconds; the quorum's timeout is 600, leaving Python takes 0.6
    assert process.returncode != 0
    assert ("KeyboardInterrupt" if how == "ctrl-c" else "the user's own") in stderr
