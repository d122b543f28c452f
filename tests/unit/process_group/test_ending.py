"""The end of a process whose threads wait in PyTorch, and whose waits may end at the same time."""

from __future__ import annotations

import sys

import pytest

from tests.unit.children import run_python

# The wait ends after 1 s, and Python takes 3 s to end: most of that time only the main thread may run Python.
_SCRIPT = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
from torch.distributed import AllreduceOptions, PrefixStore, ProcessGroupGloo, TCPStore

import torchft.process_group

SOON = timedelta(seconds=1)
store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

def pair(name):
    def member(rank):
        own = TCPStore("localhost", store.port, is_master=False, wait_for_workers=False)
        return ProcessGroupGloo(PrefixStore(name, own), rank, 2, timedelta(seconds=60))
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(member, range(2)))

pairs = {name: pair(name) for name in ("waits", "calls back", "is destroyed")}
opts = AllreduceOptions()
opts.timeout = SOON
works = {name: group.allreduce([torch.ones(1)], opts) for name, (group, _) in pairs.items()}
works["calls back"].get_future().add_done_callback(lambda _: None)
doomed = [pairs["is destroyed"].pop(0)]
del works["is destroyed"]
waits = works["waits"]
for call in (lambda: store.wait(["never"], SOON), lambda: waits.wait(timedelta(seconds=60)), doomed.clear):
    threading.Thread(target=call, daemon=True).start()

class Last:
    def __init__(self):
        self.kept = store, pairs, works  # kept alive until the process ends

    def __del__(self, sleep=time.sleep, write=sys.stdout.write, flush=sys.stdout.flush):
        sleep(3)
        write("last")
        flush()

sys.last = Last()  # is deleted when only the main thread still runs Python
"""


@pytest.mark.slow
def test_a_wait_that_ends_while_python_ends_does_not_abort_the_process() -> None:
    done = run_python(_SCRIPT, by_itself=True)
    assert (done.returncode, done.stdout) == (0, "last"), done.stderr


_ABORTS = """
import atexit, ctypes
atexit.register(lambda: ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev())  # runs after torchft's
import torchft.process_group
"""


@pytest.mark.skipif(sys.platform != "linux", reason="names libstdc++ as Linux does")
def test_the_main_thread_still_aborts() -> None:
    done = run_python(_ABORTS)
    assert done.returncode == -6 and "terminate called" in done.stderr, done.stderr
