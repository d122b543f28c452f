"""The states of an offer, as a table, and a check that no event leads to an earlier state."""

from __future__ import annotations

import itertools

import pytest

from torchft.checkpointing._copying import Copying, Phase, Readers

# For each phase: whether a copy starts without delay, whether a reader may start a copy of device tensors, whether the
# caller may change the tensors.
PHASES = {
    Phase.UNCHANGED: (False, True, False),
    Phase.DUE: (True, True, False),
    Phase.UNNEEDED: (True, True, False),
    Phase.ABORTED: (True, False, False),
    Phase.CLOSED: (True, False, True),
}
EVENTS = {"due": Phase.DUE, "unneeded": Phase.UNNEEDED, "abort": Phase.ABORTED, "close": Phase.CLOSED}


def at(phase: Phase, readers: Readers = Readers.NONE) -> Copying:
    copying = Copying()
    copying.phase, copying.readers = phase, readers
    return copying


@pytest.mark.parametrize("phase", list(Phase))
def test_properties_of_a_phase(phase: Phase) -> None:
    copying = at(phase)
    assert (copying.hurries, copying.starts_device(), copying.closed) == PHASES[phase]


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(Phase, EVENTS)))
def test_no_event_leads_to_an_earlier_state(phase: Phase, event: str) -> None:
    copying = at(phase)
    getattr(copying, event)()
    assert copying.phase is max(phase, EVENTS[event])


@pytest.mark.parametrize(
    ("readers", "device", "host"),
    [
        (Readers.NONE, False, True),
        (Readers.SOME, False, False),  # the readers may have everything before the tensors change
        (Readers.NATIVE, True, False),  # a native reader gets device tensors from the copy
    ],
)
def test_copies_before_the_tensors_change(readers: Readers, device: bool, host: bool) -> None:
    copying = at(Phase.UNCHANGED, readers)
    assert (copying.copies_device(), copying.copies_host()) == (device, host)
    copying.due()
    assert copying.copies_device() and copying.copies_host()


@pytest.mark.parametrize(
    ("phase", "readers", "device", "host"),
    [
        *((phase, readers, False, False) for phase in (Phase.UNCHANGED, Phase.DUE) for readers in Readers),
        (Phase.UNNEEDED, Readers.NONE, True, True),
        (Phase.UNNEEDED, Readers.SOME, True, True),
        (Phase.UNNEEDED, Readers.NATIVE, False, True),  # a native reader gets device tensors from the copy only
        *((phase, readers, True, True) for phase in (Phase.ABORTED, Phase.CLOSED) for readers in Readers),
    ],
)
def test_when_a_copy_ends_early(phase: Phase, readers: Readers, device: bool, host: bool) -> None:
    copying = at(phase, readers)
    assert (copying.skips(on_device=True), copying.skips(on_device=False)) == (device, host)


def test_a_stream_reader_does_not_replace_a_native_reader() -> None:
    copying = Copying()
    copying.read(Readers.NATIVE)
    copying.read(Readers.SOME)
    assert copying.readers is Readers.NATIVE
