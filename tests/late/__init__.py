"""A test accelerator whose work is late on purpose: device "late", on PyTorch's PrivateUse1.

Work that is queued on it runs on other threads, after the call has returned, and with any delay that a test chooses.
Code that mistakes "queued" for "finished" reads NaN or old values here, which on a GPU happens only rarely. A test gets
the device as a fixture, a child process by `load()`:

    def test_x(late):                       # tests/late/conftest.py; ends holds and delays after the test
        x = torch.ones(3, device="late")    # at once; y == 2 comes later
        with late.held():                   # nothing runs, on any stream, until the end of the block
            y = x + 1
            assert late.pending() > 0       # tasks queued on the current stream
        assert y.tolist() == [2, 2, 2]      # .item(), .tolist(), .cpu(), synchronize wait as on CUDA

    from tests.late import load
    late = load()                           # in a child: spawned, or forked by the test suite's fork server

When work runs:

    late.hold(stream), late.release(stream) stop and go on; without a stream: all, also those that are made later
    late.held(stream)                       both, as a context
    late.step(stream, n)                    a held stream runs n tasks more
    late.delays(seed, lo_us, hi_us)         each task waits for a random time from the seed; delays(0, 0, 0) ends that
    late.lazy(us)                           tasks run when a host waits for them, or after this time; lazy(0) ends that
    late.enqueue(function, stream)          calls a Python function in the order of a stream
    late.host_timeout_ms(ms)                a host that waits for longer (for a held stream) gets an error; 60 s
    late.stats()                            counts, and which operators ran synchronously since their shape is data

Streams and events are `torch.Stream("late")` and `torch.Event`, or those of `torch.accelerator`; `torch.late`
corresponds to `torch.cuda`. LATE_DEVICES (read when loaded; 4) is the number of devices: "late:0" and so on.
Memory has an address that the CPU cannot read: SIGSEGV. A freed block is handed out again at once, in the order of the
stream that it was allocated on; `record_stream` keeps it from that. It is NaN from then until written: a free itself
writes nothing, as on CUDA.

A group of two ranks, on threads with a device each, or in processes (test_processes.py):

    from tests.late.group import ProcessGroupLate, together   # torchft's ProcessGroupNCCL, over this backend
    together(lambda rank, pg: pg.allreduce([...], opts).wait())   # both ranks; returns what they return
    pg.parent._get_backend(torch.device("late"))              # the backend itself, which keeps NCCL's rules

The backend reads NCCL's environment variables. Work is returned at launch, its future is complete then; errors are
known by asking (`get_error`, `is_completed`), and by the watchdog; `asyncOp=False` gives None; a kernel whose peer has
ended hangs until an abort, which leaves finite garbage in its outputs, other than on the other ranks.

    ProcessGroupLate(implementation="nccl2")                  # over the second form: revokes, and has `reconfigure`
    tests.late.group.native_group(store)                      # the second form in a group of PyTorch's
    tests.late.isolated.ProcessGroupBabyLate                  # ProcessGroupBabyNCCL, by torchft's code for CUDA
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
