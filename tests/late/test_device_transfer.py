"""Transfers over the native core with tensors on the test device at both ends."""

from __future__ import annotations

import gc
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

from tests.bounded import often
from tests.late.observed import Observed, numbers, until
from tests.unit.checkpointing.checkpoint_states import assert_same, into, training_state
from tests.unit.checkpointing.faulty_proxy import Fault, random_faults
from tests.unit.checkpointing.test_faults import Wire
from torchft._torchft import _load
from torchft.checkpointing import HTTPTransport
from torchft.checkpointing.client import sources, transfer
from torchft.checkpointing.memory import staging
from torchft.checkpointing.native import core
from torchft.checkpointing.native.staged_receive import StagedReceive
from torchft.checkpointing.source import checkpoint, offer
from torchft.checkpointing.source.offer import Offer
from torchft.checkpointing.transport import CheckpointError

TIMEOUT = timedelta(seconds=60)
BLOCK = 512 << 10  # bytes of a stage in these tests: two network blocks
MB = 1 << 20


@pytest.fixture(autouse=True)
def small_blocks(device: type[Observed], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the size of a stage, and lets targets ask additional sources without a delay."""
    monkeypatch.setattr(staging, "BLOCK", BLOCK)
    monkeypatch.setattr(sources, "_HELP_AFTER", 0.0)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., HTTPTransport[Any]]]:
    made: list[HTTPTransport[Any]] = []

    def make_one(**kwargs: Any) -> HTTPTransport[Any]:
        made.append(HTTPTransport(TIMEOUT, 0, **kwargs))
        return made[-1]

    yield make_one
    for transport in made:
        transport.shutdown()


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The objects that were received in the upstream format."""
    seen: list[str] = []
    original = checkpoint.Checkpoint.stream
    monkeypatch.setattr(
        checkpoint.Checkpoint, "stream", lambda self, key: seen.append(key) or original(self, key)
    )
    return seen


def on_device(seed: int = 0) -> dict[str, Any]:
    return {
        "large": torch.roll(numbers(5 * BLOCK // 2 + 7), seed),
        "exact": numbers(BLOCK).view(torch.float16),
        "small": [torch.full((i,), i + seed, device="late") for i in range(40)],
        "empty": torch.empty(0, 3, device="late"),
        "step": seed,
    }


def size_of(state: dict[str, Any]) -> int:
    tensors = [state["large"], state["exact"], *state["small"]]
    return sum(t.numel() * t.element_size() for t in tensors)


def on_the_device(t: torch.Tensor) -> torch.Tensor:
    return t.detach().to("late") if type(t) is torch.Tensor and t.layout is torch.strided else t


# Both directions through stages


def test_a_heal_from_device_to_device(
    make: Any, device: type[Observed], upstream: list[str], caplog: Any
) -> None:
    caplog.set_level("INFO")
    state, source, target = on_device(), make(), make()
    for step in (1, 2):
        source.send_checkpoint([1], step, state, TIMEOUT)
        assert_same(target.recv_checkpoint(0, source.metadata(), step, TIMEOUT), state)
        source.disallow_checkpoint()
    assert not upstream and len(re.findall(r"digest [0-9a-f]{32}", caplog.text)) == 2
    # exactly the state's bytes were staged, at both ends and in both transfers
    assert sum(each.nbytes for each in device.made) == 4 * size_of(state)


def test_all_kinds_of_leaves(make: Any) -> None:
    source = make()
    state = pytree.tree_map_only(torch.Tensor, on_the_device, training_state())
    source.send_checkpoint([1], 1, state, TIMEOUT)
    assert_same(make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT), state)


def test_a_state_that_is_partly_on_the_device(make: Any, device: type[Observed]) -> None:
    """The large tensors are on the device. The small ones between them are received in place, without the
    device.
    """
    large = 100_000
    sizes = [10, 3 * BLOCK // 2, 0, 700, BLOCK, 99_999, large + 1, 5]
    state = {
        f"t{i}": torch.roll(numbers(size), i).to("late" if size > large else "cpu")
        for i, size in enumerate(sizes)
    }
    source = make()
    source.send_checkpoint([1], 1, state, TIMEOUT)
    assert_same(make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT), state)
    assert [each.nbytes for each in device.made] == 2 * [sum(size for size in sizes if size > large)]


@pytest.mark.parametrize("checksum", [True, False])
def test_in_place(make: Any, device: type[Observed], upstream: list[str], checksum: bool) -> None:
    own, state, source = on_device(1), on_device(2), make()
    # a tensor with other strides is received into other memory, and copied
    own["exact"] = own["exact"].reshape(2, -1).T.reshape(-1, 2)
    state["exact"] = state["exact"].reshape(-1, 2)
    source.send_checkpoint([1], 1, state, TIMEOUT)
    got = make(checksum=checksum).recv_checkpoint(0, source.metadata(), 1, TIMEOUT, target=into(own))
    assert_same(got, state)
    assert got["large"] is own["large"] and got["exact"] is own["exact"] and not upstream
    assert all(mine is theirs for mine, theirs in zip(got["small"], own["small"]))


def test_the_network_fetches_while_the_source_copies(make: Any, device: type[Observed]) -> None:
    """A stage is on the target's device before the source has staged the rest."""
    device.late = None
    state, source, target = {"w": numbers(8 * BLOCK)}, make(), make()
    source.send_checkpoint([1], 1, state, TIMEOUT)
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(target.recv_checkpoint, 0, source.metadata(), 1, TIMEOUT)
        until(lambda: len(device.made) == 2)
        at_source, at_target = device.made
        at_target.gate.release(1000)
        for staged in range(1, 9):
            at_source.gate.release()
            until(lambda staged=staged: at_target.ended >= staged)
            assert at_source.ended == staged and got.done() <= (staged == 8)
            assert at_source.most_under_way <= 2 and at_target.most_under_way <= 2
        assert_same(got.result(60), state)


def test_the_source_is_not_copied_before_a_request(make: Any, device: type[Observed]) -> None:
    source, additional, state = make(), make(), {"w": numbers(4 * BLOCK)}
    source.send_checkpoint([1], 1, state, TIMEOUT)
    additional.help_checkpoint(1, state)
    assert [each.nbytes for each in device.made] == [0, 0]
    assert_same(make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT, additional_sources=[]), state)
    assert [each.nbytes for each in device.made] == [4 * BLOCK, 0, 4 * BLOCK]


def test_the_source_continues_to_train(make: Any, device: type[Observed]) -> None:
    """Every step changes all tensors. A reader gets the state of the step that it requested."""
    source, state = (
        make(),
        {f"w{i}": torch.full((BLOCK,), 0, dtype=torch.uint8, device="late") for i in range(4)},
    )
    done, steps, reads = threading.Event(), [0], []
    source.send_checkpoint([1], 0, state, TIMEOUT)

    def heal_on() -> None:
        target = make()
        while not done.is_set():
            step = steps[0]
            try:
                got = target.recv_checkpoint(0, source.metadata(), step, TIMEOUT)
            except CheckpointError:
                continue  # the source is at a later step
            assert all(bool((t == step % 256).all()) for t in got.values())
            reads.append(step)

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(heal_on) for _ in range(2)]
        deadline = time.monotonic() + 60
        while (
            len(set(reads)) < 5
            and time.monotonic() < deadline
            and not any(reader.done() for reader in readers)
        ):
            time.sleep(0.03)
            source.disallow_checkpoint()
            for tensor in state.values():
                tensor.fill_((steps[0] + 1) % 256)
            source.send_checkpoint([1], steps[0] + 1, state, TIMEOUT)
            steps[0] += 1
        done.set()
        for reader in readers:
            reader.result(60)
    assert len(set(reads)) >= 5


# Faults


@pytest.fixture
def wire(make: Any) -> Iterator[Callable[..., Wire]]:
    made: list[Wire] = []

    def make_one(source: HTTPTransport[Any], http: Any = (), data: Any = ()) -> Wire:
        made.append(Wire(source, list(http), list(data)))
        return made[-1]

    yield make_one
    for one in made:
        one.close()


def test_a_flipped_bit_never_reaches_the_device(
    make: Any, wire: Any, device: type[Observed], monkeypatch: Any
) -> None:
    own, state, source = (
        {"w": torch.zeros(10 * BLOCK, dtype=torch.uint8, device="late")},
        {"w": numbers(10 * BLOCK)},
        make(),
    )
    wrong: list[int] = []
    expected = state["w"].cpu()

    def check(target: torch.Tensor, block: torch.Tensor) -> None:
        at = target.data_ptr() - own["w"].data_ptr()
        if 0 <= at < own["w"].numel() and not torch.equal(block, expected[at : at + block.numel()]):
            wrong.append(at)

    monkeypatch.setattr(device, "check", staticmethod(check))
    source.send_checkpoint([1], 1, state, TIMEOUT)
    through = wire(source, data=[Fault("flip", MB + 13, True, bit=3)])
    got = make().recv_checkpoint(0, through.metadata, 1, TIMEOUT, target=into(own))
    assert got["w"] is own["w"] and torch.equal(own["w"], state["w"])
    assert len(through.data.done) == 1 and not wrong


@pytest.mark.parametrize("kind", ["drop", "reset", "truncate"])
def test_a_transfer_continues_after_a_lost_connection(
    make: Any, wire: Any, kind: str, monkeypatch: Any
) -> None:
    made: list[StagedReceive] = []
    monkeypatch.setattr(
        transfer, "StagedReceive", lambda *args: made.append(StagedReceive(*args)) or made[-1]
    )
    source, state = make(), {"w": numbers(30 * BLOCK)}
    source.send_checkpoint([1], 1, state, TIMEOUT)
    through = wire(source, data=[Fault(kind, 2 * MB, True), Fault(kind, MB, True)])
    assert_same(make().recv_checkpoint(0, through.metadata, 1, TIMEOUT), state)
    assert through.data.done and len(made) == 1


def test_the_control_connection_is_lost(make: Any, monkeypatch: Any) -> None:
    """The transfer continues with a new ticket, and with the data in the stages."""
    made: list[StagedReceive] = []
    monkeypatch.setattr(
        transfer, "StagedReceive", lambda *args: made.append(StagedReceive(*args)) or made[-1]
    )
    source, state, cut = make(), {"w": numbers(30 * BLOCK)}, threading.Event()
    handler = source._server.RequestHandlerClass
    await_end = handler._await_end

    def cut_once(self: Any, grant: Any) -> None:
        if cut.is_set():
            await_end(self, grant)
            return
        cut.set()
        until(lambda: grant.served > BLOCK)  # as if the connection had ended

    monkeypatch.setattr(handler, "_await_end", cut_once)
    source.send_checkpoint([1], 1, state, TIMEOUT)
    assert_same(make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT), state)
    assert cut.is_set() and len(made) == 1


@pytest.mark.slow  # tests/unit/checkpointing/native/test_core.py
def test_another_source_takes_over(make: Any, monkeypatch: Any) -> None:
    """The assigned source fails half-way; the other one has the same bytes."""
    grants: list[core.Grant] = []
    grant = core.NativeOffer.grant
    monkeypatch.setattr(core.NativeOffer, "grant", lambda self: grants.append(grant(self)) or grants[-1])
    state = {"w": numbers(32 * BLOCK)}
    # slow enough for the additional source to join
    assigned, additional = make(bandwidth_limit=MB), make(bandwidth_limit=16 * MB)
    assigned.send_checkpoint([1], 1, {"w": state["w"].clone()}, TIMEOUT)
    additional.help_checkpoint(1, {"w": state["w"].clone()})
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(
            make().recv_checkpoint,
            0,
            assigned.metadata(),
            1,
            TIMEOUT,
            additional_sources=[additional.metadata],
        )
        until(lambda: len(grants) == 2 and all(one.served > 0 for one in grants))
        assigned._native.close()
        assert_same(got.result(60), state)


@pytest.mark.slow
def test_an_additional_source_takes_its_memory_back_while_it_is_copied(
    make: Any, device: type[Observed]
) -> None:
    source, additional = make(bandwidth_limit=3 * MB), make()  # slow enough for the additional source to join
    state = {"w": numbers(16 * BLOCK)}
    source.send_checkpoint([1], 1, {"w": state["w"].clone()}, TIMEOUT)
    device.late = 0.05
    weights = state["w"].clone()
    additional.help_checkpoint(1, {"w": weights})
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(
            make().recv_checkpoint, 0, source.metadata(), 1, TIMEOUT, additional_sources=[additional.metadata]
        )
        until(lambda: device.made[1].ended > 0)
        additional.disallow_checkpoint()
        ended = device.made[1].ended
        weights.fill_(0)
        assert_same(got.result(60), state)
    assert device.made[1].ended == ended


def test_when_the_state_cannot_be_staged(
    make: Any, upstream: list[str], caplog: Any, monkeypatch: Any
) -> None:
    """The target gets the reason, retries, and receives the upstream format, which needs no extra memory."""
    caplog.set_level("INFO")
    started = threading.Event()

    def fail() -> Any:
        assert started.wait(60)
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(offer, "HostMemory", fail)
    want = Offer.want
    monkeypatch.setattr(Offer, "want", lambda self: want(self) or started.set())
    state, source = {"w": numbers(3 * BLOCK)}, make()
    source.send_checkpoint([1], 1, state, TIMEOUT)
    assert_same(make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT), state)
    assert upstream == ["full"]
    assert "could not copy its state from the device: not enough memory; trying again" in caplog.text


def test_a_device_that_fails_at_the_target(make: Any, device: type[Observed], monkeypatch: Any) -> None:
    source, state = make(), {"w": numbers(9 * BLOCK)}
    source.send_checkpoint([1], 1, state, TIMEOUT)
    start = Observed.start

    def fail(self: Observed, target: torch.Tensor, block: torch.Tensor) -> Any:
        if self is device.made[0]:
            return start(self, target, block)
        raise RuntimeError("CUDA error: unspecified launch failure")

    with monkeypatch.context() as patch:
        patch.setattr(Observed, "start", fail)
        with pytest.raises(CheckpointError, match=r"step 1 .*could not be copied to the device: CUDA error"):
            make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
    assert not core._registered
    assert_same(make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT), state)  # the source still works


def test_no_memory_for_the_stages(make: Any, device: type[Observed], monkeypatch: Any) -> None:
    source = make()
    source.send_checkpoint([1], 1, {"w": numbers(4 * BLOCK)}, TIMEOUT)

    def fail(self: Observed, nbytes: int) -> torch.Tensor:
        raise RuntimeError("cudaHostAlloc: out of memory")

    monkeypatch.setattr(Observed, "block", fail)
    with pytest.raises(CheckpointError, match=r"no memory for blocks of \d+ bytes: cudaHostAlloc"):
        make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT)


@pytest.mark.parametrize(
    ("where", "error"),
    [
        pytest.param("cuda:0", "tensors on cuda:0, this process has no", marks=pytest.mark.no_device),
        ("mps", "has tensors on mps, this process has no device of that kind"),
    ],
)
def test_a_missing_device(make: Any, monkeypatch: Any, where: str, error: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pack = checkpoint.pack_structure
    monkeypatch.setattr(
        checkpoint,
        "pack_structure",
        lambda regions, tree: pack([region._replace(device=where) for region in regions], tree),
    )
    source = make()
    source.send_checkpoint([1], 1, {"w": numbers(5)}, TIMEOUT)
    with pytest.raises(CheckpointError, match=error):
        make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
    # An existing local tensor determines its own device.
    own = {"w": torch.zeros(5, dtype=torch.uint8, device="late")}
    got = make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT, target=into(own))
    assert got["w"] is own["w"] and torch.equal(own["w"], numbers(5))


@pytest.mark.timeout(600)
def test_random_transfers(make: Any, device: type[Observed], upstream: list[str]) -> None:
    device.late = 0.0
    seed = random.randrange(2**32)
    source, additional = make(), make()
    for number in range(often(100)):
        rng = random.Random(seed + number)
        sizes = [rng.choice([0, 1, 100, 5000, 70_000, 600_000]) for _ in range(rng.randrange(1, 12))]
        state = {
            f"t{i}": torch.randint(-128, 128, (size,), dtype=torch.int8).to("late")
            for i, size in enumerate(sizes)
        }
        own = {name: torch.zeros_like(t) for name, t in state.items()}
        helping = {name: t.clone() for name, t in state.items()}
        next(iter(helping.values())).fill_(5)  # the assigned source has other values there
        data = random_faults(rng, ["drop", "reset", "truncate", "delay", "flip"], max(1, sum(sizes) // 2), 6)
        source.send_checkpoint([1], number, state, TIMEOUT)
        additional.help_checkpoint(number, helping)
        through = Wire(source, random_faults(rng, ["drop", "reset", "delay"], 2000, 2), data)
        target: HTTPTransport[Any] = HTTPTransport(TIMEOUT, 0)
        additional_sources = [additional.metadata] if number % 3 else []
        try:
            got = target.recv_checkpoint(
                0,
                through.metadata,
                number,
                TIMEOUT,
                additional_sources=additional_sources,
                target=into(own) if number % 2 else None,
            )
            assert_same(got, state)
        except BaseException:
            print(f"seed {seed}, transfer {number}")
            raise
        finally:
            through.close()
            target.shutdown()
            source.disallow_checkpoint()
            additional.disallow_checkpoint()
    assert not upstream


def test_no_memory_and_threads_are_left(make: Any, device: type[Observed]) -> None:
    go = _load()
    gc.collect()
    before = go.pyapi_Handles()
    source, target = make(), make()
    for step in range(3):
        source.send_checkpoint([1], step, {"w": numbers(3 * BLOCK)}, TIMEOUT)
        target.recv_checkpoint(0, source.metadata(), step, TIMEOUT)
        source.disallow_checkpoint()
    for transport in (source, target):
        transport.shutdown()
    gc.collect()
    until(lambda: go.pyapi_Handles() <= before)
    assert not core._registered
