"""A test accelerator whose work is late on purpose: device "late", on PyTorch's PrivateUse1.

Work that is queued on it runs on other threads, after the call has returned, and with any delay that a test
chooses. Code that mistakes "queued" for "finished" reads NaN or old values here, which on a GPU happens only
rarely. A test gets the device as a fixture, a child process by `load()`:

    def test_x(late):                       # tests/late/conftest.py; ends holds and delays after the test
        x = torch.ones(3, device="late")    # returns at once, and runs later
        with late.held():                   # nothing runs, on any stream, until the end of the block
            y = x + 1
            assert late.pending() > 0       # tasks queued on the current stream
        assert y.tolist() == [2, 2, 2]      # .item(), .tolist(), .cpu(), synchronize wait as on CUDA

    from tests.late import load
    late = load()                           # in a child: spawned, or forked by the test suite's fork server

When work runs:

    late.hold(stream), late.release(stream) stop a stream, and continue it; without a stream: all, including
    new ones
    late.held(stream)                       both, as a context manager
    late.step(stream, n)                    a held stream runs n further tasks
    late.delays(seed, lo_us, hi_us)         each task waits for a random time from the seed; all 0 ends that
    late.lazy(us)                           tasks run when a host waits for them, or after this time; 0: not
    late.enqueue(function, stream)          calls a Python function in the order of a stream
    late.host_timeout_ms(ms)                a host that waits longer gets an error; default: 60 s
    late.contexts()                         the devices with a context of this process, and the stack that
                                            made it
    late.fill(index, True)                  that device has no memory left but for what the allocator keeps,
                                            until fill(index, False)
    late.room_for_communicators(index, n, ms)
                                            that device has memory for n more communicators; -1: for any
                                            number. The abort of one takes this time, and frees its memory
    late.algorithms()                       the algorithms, "tree" or "ring", for which a launch has connected
                                            a communicator since the last call, and the stack that launched
    late.stats()                            counters; operators that ran synchronously, for their shapes

Streams and events are `torch.Stream("late")` and `torch.Event`, or those of `torch.accelerator`; `torch.late`
corresponds to `torch.cuda`. The environment variable LATE_DEVICES (default and limit: 8), read when the
device is loaded, is the number of devices: "late:0" and so on. A read of device memory by the CPU is a
SIGSEGV. A freed block is allocated again at once, in the order of the stream that it was allocated on;
`record_stream` delays that. A block is NaN from its allocation until it is written; a free itself writes
nothing, as on CUDA.

A group of two ranks, on threads with a device each, or in processes (test_processes.py):

    from tests.late.group import ProcessGroupLate, together   # torchft's ProcessGroupNCCL, over this backend
    together(lambda rank, pg: pg.allreduce([...], opts).wait())   # both ranks; returns what they return
    pg.parent._get_backend(torch.device("late"))              # the backend itself, which keeps NCCL's rules

A thread begins with device 0 as its current one, as with CUDA. A context is made by the first call that needs
one, also by one that leaves a stream of another device (`with torch.late.stream(s)` sets the thread's device
back), destroys an event, or queries one on a thread that has not set its device.

The backend reads NCCL's environment variables. An operation returns its work at launch, with a complete
future. Errors are visible in `get_error` and `is_completed` only, and to the watchdog. `asyncOp=False`
returns None. A kernel whose peer has ended hangs until an abort, which leaves finite garbage in its outputs,
different on each rank.

    tests.late.group.native_group(store)                      # PyTorch's own group, reconfigurable
    tests.late.isolated.ProcessGroupBabyLate                # ProcessGroupBabyNCCL, with code for CUDA
    tests/late/job.py                                         # a replica group as a process, to be killed
"""

from __future__ import annotations

from types import ModuleType

# Headers of PyTorch change; the device is built against this version's.
OLDEST_TORCH = (2, 15)


def torch_version() -> tuple[int, int]:
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def load() -> ModuleType:
    """Returns the device, registered with PyTorch in this process; builds it first if necessary."""
    from tests.late import device

    return device
