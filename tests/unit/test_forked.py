"""A forked child of a process with Managers, servers and process groups: no call hangs, and the parent goes
on.
"""

from __future__ import annotations

import json

from tests.unit.children import run_python

# Makes two groups as threads of one process, forks for each call, and prints what the call returned or raised
# in the child. After each child the parent's groups must still be able to reduce.
SCRIPT = """
import gc, json, os, signal, sys, threading, warnings
from datetime import timedelta
import torch
from torch.distributed import ReduceOp
from torchft import Manager
from torchft.checkpointing import HTTPTransport
from torchft.coordination import LighthouseClient, LighthouseServer
from torchft.ftlib.shared_storage import SharedStorage
from torchft.parameter_server import ParameterServer
from torchft.process_group import ProcessGroupBabyGloo, ProcessGroupGloo
from torchft.process_group.reconfigure import host_store

warnings.simplefilter("ignore", DeprecationWarning)  # of fork in a process with threads
MINUTE = timedelta(seconds=60)
lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2)
stores, groups, managers = [], [], []

def replica(number):
    store = host_store(MINUTE)[0]
    group = ProcessGroupGloo(timeout=MINUTE)
    manager = Manager(
        group, lambda state: None, lambda: {}, 2, rank=0, world_size=1, store_addr="127.0.0.1",
        store_port=store.port, lighthouse_addr=lighthouse.address(), replica_id=f"group_{number}",
        timeout=MINUTE,
    )
    stores.append(store), groups.append(group), managers.append(manager)
    manager.start_quorum()
    manager.allreduce(torch.ones(2)).wait()
    assert manager.should_commit()

threads = [threading.Thread(target=replica, args=(number,)) for number in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]

class Serving(ParameterServer):
    @classmethod
    def new_process_group(cls):
        return ProcessGroupGloo(timeout=MINUTE)
    def forward(self, session_id, pg):
        pass

serving = Serving(port=0)
transport = HTTPTransport(timeout=MINUTE, num_chunks=0)
state = {"weights": torch.ones(4)}
transport.send_checkpoint([1], 1, state, MINUTE)
client = LighthouseClient(lighthouse.address(), MINUTE)
storage = SharedStorage(sys.argv[1], name="member")
storage.get_member_list()
isolated = ProcessGroupBabyGloo(timeout=MINUTE)
isolated.configure(f"127.0.0.1:{stores[0].port}/isolated", "me", 0, 1)
manager, group, flying = managers[0], groups[0], None
one = torch.ones(2)

def reduces():
    works = [each.allreduce([torch.ones(2)], ReduceOp.SUM) for each in groups]
    return all([work.wait() for work in works]) and isolated.allreduce([torch.ones(2)], ReduceOp.SUM).wait()

def drop():
    global manager, group, isolated, serving, transport, client, storage, lighthouse
    del manager, group, isolated, serving, transport, client, storage, lighthouse
    stores.clear(), groups.clear(), managers.clear()
    gc.collect()
    sys.exit()  # with atexit handlers and destructors

def unfinished():
    return flying.wait()

calls = dict(
    start_quorum=lambda: manager.start_quorum(),
    wait_quorum=lambda: manager.wait_quorum(),
    allreduce=lambda: manager.allreduce(one),
    should_commit=lambda: manager.should_commit(),
    participants=lambda: manager.num_participants(),
    shutdown=lambda: manager.shutdown(),
    shutdown_at_once=lambda: manager.shutdown(wait=False),
    send_checkpoint=lambda: transport.send_checkpoint([1], 2, state, MINUTE),
    disallow_checkpoint=lambda: transport.disallow_checkpoint(),
    transport_shutdown=lambda: transport.shutdown(),
    server_shutdown=lambda: serving.shutdown(),
    lighthouse_shutdown=lambda: lighthouse.shutdown(),
    client_shutdown=lambda: client.shutdown() if hasattr(client, "shutdown") else client.heartbeat("me"),
    group_allreduce=lambda: group.allreduce([one], ReduceOp.SUM),
    unfinished=unfinished,
    group_size=lambda: group.size(),
    isolated_allreduce=lambda: isolated.allreduce([one], ReduceOp.SUM).wait(),
    storage_close=lambda: storage.close(),
    group_abort=lambda: group.abort(),
    group_shutdown=lambda: group.shutdown(),
    isolated_shutdown=lambda: isolated.shutdown(),
    drop=drop,
)
for name, call in calls.items():
    if name == "unfinished":
        flying = group.allreduce([torch.ones(2)], ReduceOp.SUM)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that hangs
        try:
            result = f"returned {call()!r}"
        except Exception as e:
            result = f"{type(e).__name__}: {e}"
        except SystemExit:
            os.write(write, b"exits")
            raise
        os.write(write, result.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        result = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if flying is not None:
        assert groups[1].allreduce([torch.ones(2)], ReduceOp.SUM).wait() and flying.wait()
        flying = None
    print(json.dumps([name, result, status, bool(reduces())]), flush=True)
assert storage.get_member_list().members  # its record is there
storage.close()
serving.shutdown()
for each in managers:
    each.shutdown()
for each in [*groups, isolated]:
    each.shutdown()
"""
NOTHING = {"group_abort", "group_shutdown", "isolated_shutdown"}


def test_every_object_refuses_a_forked_child_at_once_and_the_parent_goes_on(tmp_path: object) -> None:
    done = run_python(SCRIPT, tmp_path)
    assert done.returncode == 0, done.stderr
    results = {name: rest for name, *rest in map(json.loads, done.stdout.splitlines())}
    for name, (result, status, reduces) in results.items():
        assert status == 0 and reduces, f"{name}: {result!r}, status {status}, the parent reduces: {reduces}"
        if name == "drop":
            assert result == "exits"
        elif name in NOTHING:
            assert result == "returned None", name
        else:
            assert result.startswith("RuntimeError: ") and "fork" in result, f"{name}: {result}"
    assert len(results) == 22
