"""Consensus through a directory that all members share: a record for each member, and numbered views.

There is no server. A thread renews this member's record, reads the others' records, and reports changes to
FTLib. A record expires when its content has not changed for ``expiry``, measured by the observer's own
monotonic clock, which stands still while the observer's host is suspended. A member that cannot renew its own
record for six tenths of that time considers itself failed, so that it has stopped before the others continue
without it. It measures this time by a clock that goes on while its host is suspended, as the others' clocks
do.

If the file server is down, file operations hang. So all of them run on threads that are never joined, and
waits for them have a deadline.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Optional, TypeVar

from torchft._checks import check_positive
from torchft._forked import Maker
from torchft._security import DEFAULT_JOB, JOB_ENV
from torchft.ftlib.consensus import Consensus, Listener
from torchft.ftlib.storage_rules import Create, News, Record, Take, Wait, Want, decide, living, news
from torchft.ftlib.views import Identity, Member, View, checked_name
from torchft.process_group._attempt import in_time
from torchft.process_group.reconfigure import host_store

T = TypeVar("T")

_logger = logging.getLogger(__name__)

_POLL_SEC = 0.02  # interval while a view is waited for
_KEPT_VIEWS = 8
_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # CLOCK_BOOTTIME is Linux's
_KEPT_EXPIRIES = 10  # multiples of ``expiry`` until the record of a killed member is removed


class SharedStorage(Consensus):
    """
    Args:
        directory: directory shared by all members; each job (TORCHFT_JOB_ID) uses a subdirectory. The file
            system must support hard links and atomic renames.
        name: name of this member, unique in the job; default: a random one. A restarted process with the name
            of a failed one replaces it without waiting for ``expiry``.
        min_members: the smallest allowed number of members.
        expiry: time after which a member counts as failed if its record has not changed. Members renew their
            records every tenth of that time.
        timeout: limit for `get_member_list`, and for the first access to the directory.

    Raises:
        ValueError: the directory cannot be written, or a setting is out of range.
        RuntimeError: the directory does not answer in time.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        name: Optional[str] = None,
        min_members: int = 1,
        expiry: timedelta = timedelta(seconds=5),
        timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        if min_members < 1:
            raise ValueError(f"min_members={min_members} is not allowed; allowed: 1 and more")
        check_positive("expiry", expiry)
        self._maker = Maker(type(self).__name__)
        name = checked_name(name)
        self._files = Files(Path(directory) / (os.environ.get(JOB_ENV) or DEFAULT_JOB))
        self._min_members = min_members
        self._expiry = expiry.total_seconds()
        self._timeout = timeout
        # held during each call to the directory, and by callers that change the fields below
        self._idle = threading.Lock()
        try:
            before = self._call(self._until(), partial(self._files.check, name))
        except TimeoutError as e:
            raise RuntimeError(str(e)) from None
        # Larger than all earlier incarnations, even if the clock of an earlier host is ahead.
        self.identity = Identity(name, max(time.time_ns(), before + 1))
        self._store, address = host_store(timeout)
        self._record = Record(address)
        self._beat = 0
        self._seen: dict[Identity, tuple[bytes, float]] = {}
        self._view: Optional[View] = None
        self._renewed = _boottime()
        self._listener: Optional[Listener] = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="torchft_ftlib_storage", daemon=True)

    def attach(self, listener: Listener) -> None:
        self._listener = listener

    def get_member_list(self) -> View:
        deadline = self._until()
        self._view = None
        latest = self._call(deadline, self._files.latest)
        self._call(deadline, partial(self._write, wants=(latest.number if latest else 0) + 1))
        if not self._thread.is_alive() and not self._closed.is_set():
            self._thread.start()
        while True:
            latest, alive = self._call(deadline, self._look)
            if self.identity not in alive:
                raise RuntimeError(
                    f"{self.identity} is no member any more: a later incarnation has replaced it"
                )
            action = decide(self.identity, alive, latest, self._min_members)
            if isinstance(action, Take):
                self._view = action.view
                return action.view
            if isinstance(action, Want):
                self._call(deadline, partial(self._write, wants=action.number))
            elif isinstance(action, Create):
                self._call(deadline, partial(self._create, action.view))
            elif self._closed.wait(_POLL_SEC):
                raise RuntimeError("the consensus is closed")
            if time.monotonic() > deadline:
                names = [i.name for i in action.members] if isinstance(action, Wait) else []
                few = f"{len(alive)} of {self._min_members} members"
                why = f"waits for {', '.join(names)}" if names else few
                limit = self._timeout.total_seconds()
                raise TimeoutError(
                    f"list of members in {self._files.directory}: timed out after {limit:g} s: {why}"
                )

    def clean_ip(self) -> None:
        """Removes this member's record, so that the others need not wait until it expires."""
        with contextlib.suppress(TimeoutError):  # the record will expire instead
            self._call(time.monotonic() + self._expiry, partial(self._files.remove, self.identity))

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self.clean_ip()

    def _until(self) -> float:
        return time.monotonic() + self._timeout.total_seconds()

    def _call(self, deadline: float, function: Callable[[], T]) -> T:
        """Calls a function that uses the directory. One call at a time: otherwise a hanging write could
        complete after a later one and overwrite it.

        Raises:
            TimeoutError: the directory does not answer before the deadline, or hangs in another call.
            RuntimeError: this is a forked child of the member's process.
        """
        self._maker.check()
        began = time.monotonic()

        def call() -> T:
            if not self._idle.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            try:
                return function()
            finally:
                self._idle.release()

        try:
            return in_time(call, timedelta(seconds=max(0.0, deadline - began)))
        except TimeoutError:
            raise TimeoutError(
                f"timed out: directory={str(self._files.directory)!r} has not answered within "
                f"{time.monotonic() - began:.1f} s; check the server of its file system"
            ) from None

    def _write(self, **changed: Any) -> None:
        """Writes this member's record, with a number that changes each time."""
        if self._closed.is_set():
            raise RuntimeError("the consensus is closed")
        began, self._beat = _boottime(), self._beat + 1
        self._record = self._record._replace(**changed)
        self._files.write(self.identity, {**self._record._asdict(), "beat": self._beat})
        self._renewed = began

    def _create(self, view: View) -> None:
        """Creates the view, and removes the records of members that failed long ago."""
        self._files.create(view)
        long_ago = time.monotonic() - _KEPT_EXPIRIES * self._expiry
        for identity, (_, since) in self._seen.items():
            if since < long_ago:
                self._files.remove(identity)

    def _look(self) -> tuple[Optional[View], dict[Identity, Record]]:
        """Returns the latest view, and the records of live members."""
        # The view is read first, so that the records are at least as new.
        latest = self._files.latest()
        found = self._files.records()
        now = time.monotonic()
        for identity, content in found.items():
            if self._seen.get(identity, (b"", 0.0))[0] != content:
                self._seen[identity] = content, now
        for identity in self._seen.keys() - found.keys():
            del self._seen[identity]
        fresh = [i for i, (_, since) in self._seen.items() if now - since < self._expiry]
        alive = {i: _record(json.loads(found[i])) for i in fresh}
        return latest, living({**alive, self.identity: self._record})

    def _watch(self) -> None:
        every = self._expiry / 10
        troubled = False
        while not self._closed.wait(every):
            view = self._view
            # The others continue without this member after ``expiry``: it must have stopped by then, even if
            # the directory hangs.
            deadline = time.monotonic() + max(self._renewed + 5 * every - _boottime(), every)
            try:
                self._call(deadline, self._write)
                seen = self._call(deadline, partial(self._news, view))
                troubled = False
            except Exception as e:
                late = _boottime() - self._renewed
                if not troubled and not self._closed.is_set():
                    _logger.warning(
                        "%s: could not renew the record or read the others': %s", self.identity.name, e
                    )
                troubled = True
                seen = News(
                    (),
                    f"its own record could not be renewed for {late:.1f} s: {e}" if late > every * 5 else "",
                )
            if view is not None and self._listener is not None and view is self._view:
                if seen.ended:
                    self._listener.member_failed(view.number, seen.ended)
                elif seen.joining:
                    self._listener.new_member_join()

    def _news(self, view: Optional[View]) -> News:
        if view is None:
            return News(())
        latest, alive = self._look()
        return news(self.identity, alive, view, latest.number if latest else 0)


class Files:
    """A job's files: ``member.NAME.INCARNATION``, written by rename, and ``view.NUMBER``, created once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def check(self, name: str) -> int:
        """Checks that files can be made here, else ValueError. ``name``'s latest incarnation, or 0."""
        probe = self.directory / f"probe.{uuid.uuid4().hex}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"x" * 4096)
            os.link(probe, f"{probe}.link")
        except OSError as e:
            raise ValueError(
                f"directory={str(self.directory)!r} is not allowed: {e.strerror or e}; allowed: a directory "
                "with free space, in which this process may make files and hard links"
            ) from e
        finally:
            for path in (probe, Path(f"{probe}.link")):
                with contextlib.suppress(OSError):
                    path.unlink()
        return max((life.incarnation for life in self.records() if life.name == name), default=0)

    def write(self, identity: Identity, record: Mapping[str, Any]) -> None:
        self._put(self._path(identity), record)

    def remove(self, identity: Identity) -> None:
        with contextlib.suppress(OSError):
            self._path(identity).unlink()

    def records(self) -> dict[Identity, bytes]:
        found = {}
        for path in self.directory.glob("member.*.*"):
            _, name, incarnation = path.name.split(".", 2)
            with contextlib.suppress(FileNotFoundError, ValueError):
                found[Identity(name, int(incarnation))] = path.read_bytes()
        return found

    def latest(self) -> Optional[View]:
        """Returns the view with the largest number; ValueError if its file was not written by torchft."""
        paths = sorted(self.directory.glob("view.*"))
        if not paths:
            return None
        try:
            record = json.loads(paths[-1].read_bytes())
            members = tuple(
                Member(Identity(str(n), int(i)), str(address)) for (n, i), address in record["members"]
            )
            return View(int(record["number"]), members)
        except (KeyError, TypeError, ValueError) as e:
            raise ValueError(
                f"{paths[-1]} is no view of FTLib: {e}; remove it, or use another directory"
            ) from e

    def create(self, view: View) -> bool:
        """Creates the view. Returns False if its number exists."""
        path = self.directory / f"view.{view.number:016d}"
        draft = self.directory / f"draft.{uuid.uuid4().hex}"
        try:
            draft.write_text(json.dumps({"number": view.number, "members": view.members}))
            os.link(draft, path)
        except FileExistsError:
            return False
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()
        for old in sorted(self.directory.glob("view.*"))[:-_KEPT_VIEWS]:
            with contextlib.suppress(OSError):
                old.unlink()
        return True

    def _path(self, identity: Identity) -> Path:
        return self.directory / f"member.{identity.name}.{identity.incarnation}"

    def _put(self, path: Path, content: Mapping[str, Any]) -> None:
        draft = self.directory / f"draft.{uuid.uuid4().hex}"
        try:
            draft.write_text(json.dumps(content))
            os.replace(draft, path)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise


def _record(record: Mapping[str, Any]) -> Record:
    return Record(str(record["address"]), int(record["wants"]))


def _boottime() -> float:
    """Seconds of a clock that goes on while the host is suspended."""
    return time.clock_gettime(_BOOTTIME)
