"""A process ends while its Manager waits: nothing may keep the process alive, because its peers would
consider it healthy.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from processes import START_TIMEOUT_S, Job, ours_path

from tests.promises import LEAVE_PYTHON_S, within

SCRIPT = """
import signal
import sys
import threading
import time
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
if sys.argv[1] == "raises":
    threading.Thread(target=manager.start_quorum, daemon=True).start()
    while manager._round is None:
        time.sleep(0.01)
print('{"event": "waiting"}', flush=True)
if sys.argv[1] == "raises":
    raise ValueError("the user's own")
manager.start_quorum()
"""


@pytest.mark.parametrize("how", ["ctrl-c", "raises"])
def test_process_ends_at_once(how: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with Job() as job:
        child = job.python("waiter", script, how, path=ours_path())
        job.wait(lambda: child.of("waiting"), START_TIMEOUT_S, "it waits for a quorum")
        child.expected_to_live = False
        if how == "ctrl-c":
            time.sleep(0.2)  # until it waits
            os.kill(child.pid, signal.SIGINT)
        # The quorum's timeout is 600 s.
        job.wait(lambda: child.returncode is not None, within(LEAVE_PYTHON_S), "it ends")
        assert child.returncode != 0
        assert ("KeyboardInterrupt" if how == "ctrl-c" else "the user's own") in child.log_tail(100)
