"""PyTorch's own reconfigurable groups (`init_process_group(..., enable_reconfigure=True)`, PyTorch >= 2.14).

A native group stays the same object while its peers change; the code that created it also destroys it. Gloo's
own abort does not affect operations in flight. Such an operation would occupy one of the group's two threads
until its timeout, and operations with the next peers would wait behind it. So this module adds an abort that
first cuts the connections with the peers, as every reconfiguration does. The cut ends nearly all operations
in flight; for the others, _gloo/operations.py ends the waits.

Gloo groups meet in the store with which they were created, so all replica groups must share that store. The
handle of a group that has not had peers yet contains the rank with which the group was created, so each
replica group must be created with a different rank.
"""

from __future__ import annotations

import logging
import threading
import weakref
from datetime import timedelta
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Callable, Optional

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, Work

from torchft._handoff import Handed, hand_off
from torchft.process_group._errors import named_timeout
from torchft.process_group._gloo.connections import GlooConnections
from torchft.utils import DeviceThread

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ReconfigureOptions

# The connections of each native Gloo group with its last peers. An abort cuts them and keeps the entry.
_connections: weakref.WeakKeyDictionary[dist.ProcessGroup, GlooConnections] = weakref.WeakKeyDictionary()

# The thread of the last abort, for each native group that has not been reconfigured since.
_aborts: weakref.WeakKeyDictionary[dist.ProcessGroup, threading.Thread] = weakref.WeakKeyDictionary()
_aborts_lock = threading.Lock()

# How long the caller waits for an abort. Most aborts end earlier; others continue in the background.
ABORT_TIMEOUT_SEC = 0.05
# How long a reconfiguration waits for the previous abort if its options have no timeout.
_LONGEST_ABORT_SEC = 60.0

_logger: logging.Logger = logging.getLogger(__name__)


def is_native(pg: object) -> bool:
    """Whether `pg` is a group of PyTorch: it has no `configure`, and handles of another format."""
    return isinstance(pg, dist.ProcessGroup) and not hasattr(pg, "configure")


def native_error(pg: dist.ProcessGroup) -> Optional[Exception]:
    """The error that the backends of a native group report; None if there is none."""
    for device in pg._device_types:
        error = backend_error(pg._get_backend(device))
        if error is not None:
            return error
    return None


def backend_error(backend: Any) -> Optional[Exception]:
    """The error that a backend of PyTorch reports; None if there is none, or it cannot report errors."""
    ask = getattr(backend, "get_error", None)
    if ask is None:  # PyTorch < 2.8
        return None
    error = ask()
    if error.name == "SUCCESS":
        return None
    return RuntimeError(f"backend {backend.name()} reports {error.name}")


def errors_of(pg: Any) -> Callable[[], Optional[Exception]]:
    """Makes a function that returns the error that makes a group unusable at present; None if there is none.
    A test double may lack ``errored``, or return another one from it. The kind is determined once, here.
    """
    if is_native(pg):
        return lambda: error_of_native(pg)
    if issubclass(type(pg), dist.ProcessGroup):  # a mock may pass isinstance, but its type is no subclass
        return partial(methodcaller("errored"), pg)
    if not hasattr(pg, "errored"):
        return lambda: None
    return lambda: error if isinstance(error := pg.errored(), Exception) else None


def error_of_native(pg: dist.ProcessGroup) -> Optional[Exception]:
    """The present error of a native group: an abort by torchft since the last reconfiguration, or the error
    that its backends report. None if there is neither.
    """
    if pg in _aborts:  # the backend does not report an abort by torchft as an error
        return RuntimeError(
            f"the native group {pg.name()} was aborted and has no peers until it is reconfigured"
        )
    return native_error(pg)


def reconfigure_group(pg: dist.ProcessGroup, opts: ReconfigureOptions) -> None:
    """Connects a group, native or torchft's, with the peers of `opts`, and waits until it is connected.

    Operations in flight among the previous peers end with an error.

    Raises:
        ValueError: two peers have the same handle, or a group of torchft refuses the handles.
        RuntimeError: the peers could not be reached, or the abort of the previous peers did not end in time.
            The group cannot be used until a later call succeeds.
    """
    if not is_native(pg):
        reconfigure_and_wait(pg, opts)
        return
    if len(set(opts.handles)) != len(opts.handles):
        raise ValueError(
            f"two peers of a native group have the same handle: {sorted(opts.handles)}; give every replica "
            "group a rank of its own in init_process_group(..., rank=, world_size=)"
        )
    # Ends operations with the previous peers, which would keep the group's threads until their timeouts.
    _cut(pg)
    with _aborts_lock:  # without it, the recorded thread may not have started yet, and could not be joined
        abort = _aborts.get(pg)
    if abort is not None:
        seconds = _LONGEST_ABORT_SEC if opts.timeout is None else opts.timeout.total_seconds()
        abort.join(seconds)
        if abort.is_alive():  # it may take effect later: then it would abort operations with the next peers
            raise RuntimeError(
                f"reconfigure: timed out: the abort of its last peers has not ended within {seconds} s"
            )
    reconfigure_and_wait(pg, opts)
    connections = GlooConnections(_published(pg, opts.uuid), pg.rank(), pg.size()) if _is_gloo(pg) else None
    with _aborts_lock:
        if connections is not None:
            _connections[pg] = connections
        last = _aborts.get(pg)
        if last is not None and last is not abort:
            # An abort began in the meantime, and has cut only the connections with the previous peers.
            _cut(pg)
        elif last is not None:
            del _aborts[pg]


def reconfigure_and_wait(pg: dist.ProcessGroup, opts: ReconfigureOptions) -> None:
    """Calls the group's own ``reconfigure`` and waits for it. A timeout's error contains "timed out"."""
    try:
        work: Optional[Work] = pg.reconfigure(opts)
        if work is not None:  # a group that returns None is connected already
            work.wait()
    except RuntimeError as e:
        raise named_timeout(e) from e.__cause__


def abort_group(pg: dist.ProcessGroup) -> None:
    """Ends operations in flight in a group, native or torchft's. The group cannot be used until it is
    reconfigured.

    Waits at most `ABORT_TIMEOUT_SEC` for a native group's own abort, which then continues on its thread.
    """
    if not is_native(pg):
        pg.abort()
        return
    with _aborts_lock:
        last = _aborts.get(pg)
        # An abort that still runs has cut the connections with the present peers: a reconfiguration waits for
        # the end of an earlier one, and cuts the new connections if one has begun meanwhile. No second one is
        # started: it would replace the first in `_aborts`, and a reconfiguration would not wait for the
        # first.
        if last is None or not last.is_alive():
            # The abort is recorded first: a wait that the cut or the group's own abort ends may call
            # `error_of_native` at once. The thread starts after the cut, because the group's own abort may be
            # slow, and must not delay the cut. A reconfiguration takes the lock too: between the record and
            # the cut it would remove the record and connect new peers, whose connections would then be cut
            # without a recorded abort.
            last = _aborts[pg] = _abort_thread(pg.name(), pg)
            _cut(pg)
            last.start()
    last.join(ABORT_TIMEOUT_SEC)


def abort_elsewhere(name: str, pg: Any) -> Handed:
    """Aborts a group or a backend on a separate thread, because NCCL's abort may block. The caller may be the
    timer thread, and a callback that blocks it would delay all timeouts of the process.
    """
    return hand_off(partial(_abort, name, pg), "torchft_abort")


def _abort_thread(name: str, pg: Any) -> threading.Thread:
    return DeviceThread(target=_abort, args=(name, pg), name="torchft_abort")


def _abort(name: str, pg: Any) -> None:
    try:
        pg.abort()
    except Exception:
        _logger.exception("%s: could not abort the old group", name)


def set_operation_timeout(pg: dist.ProcessGroup, timeout: timedelta) -> None:
    """Sets the timeout of a group's operations that have none of their own."""
    if hasattr(pg, "set_timeout"):
        pg.set_timeout(timeout)
    else:  # PyTorch < 2.8, whose Gloo keeps the timeout that it was made with
        for device in pg._device_types:
            pg._get_backend(device)._set_default_timeout(timeout)


def reset_flight_recorder() -> None:
    """Empties PyTorch's flight recorder of NCCL, so that a dump contains ranks of one quorum only."""
    reset = getattr(torch._C._distributed_c10d, "_reset_fr_recording_nccl", None)
    if reset is not None:
        reset()


def connections_of(pg: dist.ProcessGroup) -> Optional[GlooConnections]:
    """The connections of a native group with its present peers, or its last ones; None: not known."""
    return _connections.get(pg)


def collectives_at_once(pg: dist.ProcessGroup) -> Optional[int]:
    """The number of aborted collectives that can occupy all threads of a native group, so that operations
    with its next peers have to wait; None if the group has no Gloo backend, and so no such threads.
    """
    backends = [pg._get_backend(device) for device in pg._device_types]
    # pyrefly: ignore [missing-attribute]  # Gloo's options have this attribute
    return min((b.options._threads for b in backends if b.name() == "gloo"), default=None)


def _cut(pg: dist.ProcessGroup) -> None:
    # The entry is not removed: an operation that begins after the abort also gets it from `connections_of`,
    # and so detects that its connections are cut.
    connections = _connections.get(pg)
    if connections is not None:
        connections.shutdown()


def _published(pg: dist.ProcessGroup, uuid: int) -> Store:
    """The store in which Gloo, as of PyTorch 2.14, publishes the addresses of its ranks. If another version
    publishes them elsewhere, no connections are found, and nothing is cut.
    """
    store = pg.get_group_store()
    # init_process_group and new_group give each device's backend a prefix of the group's store.
    below = [PrefixStore(f"{device.type}/", store) for device in pg._device_types]
    places = [PrefixStore(f"reconfigure/{uuid}", s) for s in (*below, store)]
    return next((place for place in places if place.check(["0/0"])), places[-1])


def _is_gloo(pg: dist.ProcessGroup) -> bool:
    return any(pg._get_backend(device).name() == "gloo" for device in pg._device_types)
