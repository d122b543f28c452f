"""FTLib with a scripted consensus and communication library, and with custom ones in threads."""

from __future__ import annotations

import inspect
import io
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Optional

import pytest
import torch
from torch import nn

from tests.unit.ftlib.plugins import Room, RoomConsensus, StoreFramework, shared_store
from torchft.checkpointing._serialization import _streaming_save
from torchft.ftlib import (
    Consensus,
    ConsensusStatus,
    Framework,
    FTAllReduceStatus,
    FTLib,
    Identity,
    Member,
    RebuildFailed,
    View,
    allreduce_hook,
)
from torchft.ftlib.consensus import Listener
from torchft.ftlib.framework import ProcessGroupFramework
from torchft.process_group import ProcessGroupDummy, ProcessGroupGloo

SUCCESS, FAIL, ABORT, NO_NEED = (FTAllReduceStatus[name] for name in ("SUCCESS", "FAIL", "ABORT", "NO_NEED"))


class Scripted(Consensus):
    """A consensus that gives the test's answers, and counts the questions."""

    def __init__(self, size: int = 2, active: bool = False) -> None:
        self.identity = Identity("m0", 1)
        self.active = active
        self.size = size
        self.lists = 0
        self.confirms = 0
        self.answer = ConsensusStatus.SUCCESS
        self.error: Optional[Exception] = None

    def attach(self, listener: Listener) -> None:
        self.listener = listener

    def get_member_list(self) -> View:
        if self.error is not None:
            raise self.error
        self.lists += 1
        return View(self.lists, tuple(Member(Identity(f"m{i}", 1), f"host{i}:1") for i in range(self.size)))

    def confirm(self) -> ConsensusStatus:
        assert self.active, "a passive consensus was asked"
        self.confirms += 1
        return self.answer

    def close(self) -> None: ...


class Moved(Framework):
    """Doubles the values that it averages, and calls a function in between."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.meanwhile: Callable[[], object] = lambda: None
        self.connects = True

    def rebuild(self, rank: int, size: int, address: str) -> bool:
        self.calls.append((rank, size, address.partition("/")[0]))
        return self.connects

    def allreduce_average(self, tensors: list[torch.Tensor]) -> None:
        self.calls.append("average")
        self.meanwhile()
        for tensor in tensors:
            tensor.mul_(2)

    def allgather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor]

    def broadcast(self, tensor: torch.Tensor, root: int) -> None: ...

    def abort(self) -> None:
        self.calls.append("abort")


def fail() -> None:
    raise RuntimeError("connection closed")


def made(consensus: Consensus) -> tuple[FTLib, Moved]:
    framework = Moved()
    return FTLib.init(consensus, framework), framework


@pytest.mark.parametrize("active", [False, True])
def test_a_first_average_rebuilds_and_asks_for_the_values_again(active: bool) -> None:
    ftlib, framework = made(Scripted(active=active))
    tensor = torch.ones(1)
    assert not ftlib.initialized()
    assert ftlib.allreduce_average([tensor]) is ABORT
    assert framework.calls == ["abort", (0, 2, "host0:1")]
    assert ftlib.initialized() and not ftlib.skip_allreduce() and tensor == 1
    assert ftlib.allreduce_average([tensor]) is SUCCESS
    assert tensor == 2


@pytest.mark.parametrize("active", [False, True])
def test_alone_there_is_nothing_to_average(active: bool) -> None:
    consensus = Scripted(size=1, active=active)
    consensus.answer = ConsensusStatus.SKIP_ALLREDUCE
    ftlib, framework = made(consensus)
    assert ftlib.allreduce_average([torch.ones(1)]) is ABORT
    for _ in range(3):
        assert ftlib.skip_allreduce()
        assert ftlib.allreduce_average([torch.ones(1)]) is NO_NEED
    assert "average" not in framework.calls


def test_a_passive_consensus_is_never_asked() -> None:
    consensus = Scripted()
    ftlib, _ = made(consensus)
    ftlib.allreduce_average([])
    for _ in range(3):
        assert ftlib.initialized() and not ftlib.skip_allreduce()
        assert ftlib.confirm() is ConsensusStatus.SUCCESS
        assert ftlib.allreduce_average([]) is SUCCESS
    assert (consensus.lists, consensus.confirms) == (1, 0)


def test_an_active_consensus_is_asked_once_between_two_collectives() -> None:
    consensus = Scripted(active=True)
    ftlib, _ = made(consensus)
    ftlib.allreduce_average([])
    assert ftlib.initialized() and consensus.confirms == 0  # the list itself was the confirmation
    for count in range(3):
        assert ftlib.allreduce_average([]) is SUCCESS
        for _ in range(3):
            assert ftlib.initialized() and not ftlib.skip_allreduce()
        assert consensus.confirms == count + 1


def test_an_active_consensus_that_fails_means_another_list() -> None:
    consensus = Scripted(active=True)
    ftlib, _ = made(consensus)
    ftlib.allreduce_average([])
    ftlib.allreduce_average([])
    consensus.answer = ConsensusStatus.FAIL
    assert not ftlib.initialized()
    assert ftlib.allreduce_average([]) is ABORT
    assert consensus.lists == 2


def test_a_join_between_collectives() -> None:
    consensus = Scripted()
    ftlib, _ = made(consensus)
    ftlib.allreduce_average([])
    consensus.listener.new_member_join()
    assert not ftlib.initialized()
    assert ftlib.allreduce_average([]) is ABORT
    assert consensus.lists == 2


def test_a_join_during_a_collective_takes_effect_after_it() -> None:
    consensus = Scripted()
    ftlib, framework = made(consensus)
    ftlib.allreduce_average([])
    seen = []

    def join() -> None:
        assert ftlib._collective.locked()
        consensus.listener.new_member_join()
        seen.append(ftlib.initialized())

    framework.meanwhile = join
    assert ftlib.allreduce_average([]) is SUCCESS
    assert seen == [True] and not ftlib.initialized() and not ftlib._collective.locked()


def test_a_failed_member_ends_the_collective() -> None:
    consensus = Scripted()
    ftlib, framework = made(consensus)
    ftlib.allreduce_average([])
    consensus.listener.member_failed(7, "of another view")
    assert ftlib.initialized()
    framework.calls.clear()
    consensus.listener.member_failed(1, "m1 failed")
    assert framework.calls == ["abort"] and not ftlib.initialized()


def test_a_framework_that_cannot_abort_does_not_end_the_thread_of_the_consensus(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without the thread of the consensus a member would never learn that it counts as failed."""
    consensus = Scripted()
    ftlib, framework = made(consensus)
    ftlib.allreduce_average([])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(framework, "abort", fail)
        consensus.listener.member_failed(1, "m1 failed")
    assert not ftlib.initialized()
    assert "view 1: the communicator could not be aborted: connection closed" in caplog.text


def test_a_member_fails_before_the_view_with_it_has_arrived() -> None:
    """The report is not repeated, and another thread delivers the view."""
    consensus = Scripted()
    ftlib, framework = made(consensus)
    get_member_list = consensus.get_member_list

    def failed_at_once() -> View:
        view = get_member_list()
        consensus.listener.member_failed(view.number, "m1 failed")
        return view

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consensus, "get_member_list", failed_at_once)
        assert ftlib.allreduce_average([]) is FAIL
    assert str(ftlib.error) == "view 1 does not hold any more: m1 failed" and not ftlib.initialized()
    assert framework.calls == ["abort"], "it would wait for the failed member"
    assert ftlib.allreduce_average([]) is ABORT and consensus.lists == 2


def test_a_failed_collective_is_a_status() -> None:
    ftlib, framework = made(Scripted())
    ftlib.allreduce_average([])
    framework.meanwhile = fail
    assert ftlib.allreduce_average([]) is FAIL
    assert not ftlib.initialized() and str(ftlib.error) == "connection closed"


def test_a_rebuild_that_returns_false_or_raises_has_failed() -> None:
    consensus = Scripted()
    ftlib, framework = made(consensus)
    framework.connects = False
    assert ftlib.allreduce_average([]) is FAIL
    assert "could not connect 2 members" in str(ftlib.error)
    with pytest.raises(RebuildFailed, match="could not connect"):
        ftlib.execute(pytest.fail, "the function was called")
    consensus.error = TimeoutError("no other member")
    assert ftlib.allreduce_average([]) is FAIL
    assert ftlib.error is consensus.error and not ftlib.initialized()


def test_execute_rebuilds_and_passes_on_the_functions_result_or_error() -> None:
    ftlib, framework = made(Scripted())
    assert ftlib.execute(lambda a, b: a + b, 1, b=2) == 3
    assert framework.calls == ["abort", (0, 2, "host0:1")]
    with pytest.raises(RuntimeError, match="connection closed"):
        ftlib.execute(fail)
    assert not ftlib.initialized()
    assert ftlib.execute(ftlib._collective.locked)  # after another rebuild
    with pytest.raises(KeyboardInterrupt):
        ftlib.execute(_interrupt)
    assert not ftlib.initialized() and not ftlib._collective.locked()


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_execute_alone_calls_the_function_without_a_collective() -> None:
    ftlib, _ = made(Scripted(size=1))
    assert not ftlib.execute(ftlib._collective.locked)
    with pytest.raises(RuntimeError, match="connection closed"):
        ftlib.execute(fail)


def test_steps_are_those_that_were_averaged() -> None:
    ftlib, framework = made(Scripted())
    model = nn.Linear(1, 1)
    assert [ftlib.wait_gradients_ready(model), ftlib.step] == [ABORT, 0]
    assert model.weight.grad is not None and model.weight.grad == 0
    assert [ftlib.wait_gradients_ready(model), ftlib.step] == [SUCCESS, 1]
    framework.meanwhile = fail
    assert [ftlib.wait_gradients_ready(model), ftlib.step] == [FAIL, 1]


class Ahead(Moved):
    """Rank 1 has made step 5 in view 3, and sends its state."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.written = io.BytesIO()
        _streaming_save(state, self.written)

    def allgather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor, torch.tensor([3, 5])]

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        assert root == 1
        sent = torch.frombuffer(bytearray(self.written.getvalue()), dtype=torch.uint8)
        tensor.copy_(torch.tensor([sent.numel()]) if tensor.dtype == torch.int64 else sent)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # PyTorch's reader of a state
def test_a_state_that_was_loaded_in_part_is_neither_used_nor_given() -> None:
    consensus = Scripted()
    framework = Ahead({"first": torch.ones(1), "last": torch.ones(1)})
    state = {"first": torch.zeros(1), "last": torch.zeros(1)}
    refused = True

    def load(received: dict[str, torch.Tensor]) -> None:
        state["first"] = received["first"]
        if refused:
            raise OSError("a file is missing")
        state["last"] = received["last"]

    ftlib = FTLib.init(consensus, framework, state_dict=lambda: state, load_state_dict=load)
    assert ftlib.allreduce_average([]) is FAIL and "a file is missing" in str(ftlib.error)
    consensus.size = 1  # the source has left
    assert ftlib.allreduce_average([]) is FAIL and "has a complete state" in str(ftlib.error)
    consensus.size, refused = 2, False
    assert ftlib.allreduce_average([]) is ABORT and ftlib.step == 5
    assert [state["first"].item(), state["last"].item()] == [1, 1]
    consensus.size = 1
    consensus.listener.new_member_join()
    assert ftlib.allreduce_average([]) is ABORT


class Breaks(nn.Module):
    """A model with two buckets of gradients. If told to, it raises in the backward pass between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(512, 512, bias=False) for _ in range(2))

    def forward(self, inputs: torch.Tensor, breaks: bool) -> torch.Tensor:
        middle = self.first(inputs)
        if breaks:
            middle.register_hook(lambda _: fail())
        return self.last(middle)


def backward(ftlib: FTLib, model: nn.Module, breaks: bool = False) -> None:
    """Makes a new DistributedDataParallel, as PyTorch requires after a backward pass that raised."""
    ddp = nn.parallel.DistributedDataParallel(
        model, process_group=ProcessGroupDummy(0, 1), find_unused_parameters=True
    )
    ddp.register_comm_hook(ftlib, allreduce_hook)
    loss = ddp(torch.ones(1, 512), breaks).sum()
    if breaks:
        with pytest.raises(RuntimeError, match="connection closed"):
            loss.backward()
    else:
        loss.backward()


@pytest.mark.parametrize(
    ("then", "expected"),
    [
        (lambda ftlib, model: ftlib.wait_gradients_ready(model), FAIL),
        (lambda ftlib, model: ftlib.allreduce_average([]), ABORT),
        (lambda ftlib, model: ftlib.execute(lambda: ABORT), ABORT),
        (lambda ftlib, model: (backward(ftlib, model), ftlib.wait_gradients_ready(model))[-1], ABORT),
    ],
    ids=["wait", "average", "execute", "backward"],
)
def test_a_backward_pass_that_raises_is_a_failed_collective(
    then: Callable[[FTLib, nn.Module], FTAllReduceStatus], expected: FTAllReduceStatus
) -> None:
    """The first bucket of the pass was averaged already: the next call must neither wait for the pass nor add
    to it.
    """
    ftlib, framework = made(Scripted())
    ftlib.allreduce_average([])
    model = Breaks()
    backward(ftlib, model, breaks=True)
    assert framework.calls.count("average") == 1 and ftlib._collective.locked()
    ended: Future[FTAllReduceStatus] = Future()
    threading.Thread(target=lambda: ended.set_result(then(ftlib, model)), daemon=True).start()
    assert ended.result(60) is expected
    assert "ended before its last bucket of gradients" in str(ftlib.error) and not ftlib._collective.locked()
    if expected is FAIL:
        assert not ftlib.initialized() and ftlib.allreduce_average([]) is ABORT
    framework.calls.clear()
    backward(ftlib, model)
    assert [ftlib.wait_gradients_ready(model), ftlib.step] == [SUCCESS, 1]
    assert framework.calls == ["average"] * 2


def test_an_average_between_a_backward_pass_and_its_wait() -> None:
    ftlib, framework = made(Scripted())
    ftlib.allreduce_average([])
    model = Breaks()
    backward(ftlib, model)
    assert ftlib.allreduce_average([]) is SUCCESS
    assert [ftlib.wait_gradients_ready(model), ftlib.step] == [SUCCESS, 1]
    framework.meanwhile = fail
    backward(ftlib, model)
    assert ftlib.allreduce_average([]) is ABORT
    assert [ftlib.wait_gradients_ready(model), ftlib.step] == [FAIL, 1]


def test_bad_settings() -> None:
    with pytest.raises(
        ValueError,
        match=r"consensus='raft' is not allowed; allowed: 'gossip', 'lighthouse', 'shared_storage'",
    ):
        FTLib.init("raft", Moved())
    with pytest.raises(
        ValueError, match=r"framework=.* is not allowed; allowed: a Framework, a process group"
    ):
        FTLib.init(Scripted(), object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="state_dict and load_state_dict belong together"):
        FTLib.init(Scripted(), Moved(), state_dict=dict)
    with pytest.raises(TypeError, match="directory: a consensus of your own has its settings"):
        FTLib.init(Scripted(), Moved(), directory="/")


def test_own_consensus_and_own_communication() -> None:
    """Two members train. A third one joins, takes over their weights, and leaves; then one leaves for
    good.
    """
    room, store = Room(least=2), shared_store()
    entered, left = threading.Event(), threading.Event()

    def member(name: str, until: Callable[[FTLib], bool]) -> list[list[float]]:
        torch.manual_seed(len(room.present))
        model = nn.Linear(3, 1)
        ftlib = FTLib.init(
            RoomConsensus(room, name),
            StoreFramework(store),
            state_dict=model.state_dict,
            load_state_dict=model.load_state_dict,
        )
        while not until(ftlib):
            model.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            if ftlib.wait_gradients_ready(model) in (SUCCESS, NO_NEED):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 0.1 * parameter.grad  # type: ignore[operator]
        ftlib.close()
        return [p.flatten().tolist() for p in model.parameters()] + [[float(ftlib.step)]]

    def stays(ftlib: FTLib) -> bool:
        if ftlib.step == 3:
            entered.set()
        return left.is_set() and ftlib.step >= 12 and len(room.views[-1].members) == 1

    def visits(ftlib: FTLib) -> bool:
        if ftlib.step >= 8:
            left.set()
        return ftlib.step >= 8

    def leaves(ftlib: FTLib) -> bool:
        return left.is_set() and ftlib.step >= 10

    with ThreadPoolExecutor(3) as threads:
        first, second = threads.submit(member, "a", stays), threads.submit(member, "b", leaves)
        assert entered.wait(60)
        third = threads.submit(member, "c", visits)
        assert third.result(60)[-1][0] >= 8
        assert second.result(60)[-1][0] >= 10
        assert first.result(60)[-1][0] >= 12
    assert max(len(view.members) for view in room.views) == 3
    assert len(room.views[-1].members) == 1


def test_a_group_of_torchft_is_a_framework() -> None:
    ftlib = FTLib.init(Scripted(), ProcessGroupGloo())
    assert isinstance(ftlib._framework, ProcessGroupFramework) and ftlib._framework.device == torch.device(
        "cpu"
    )


def test_a_member_joins_at_each_line_of_a_rebuild() -> None:
    """All three end with equal weights each time: a rebuild that was too early for the join is followed by
    another.
    """
    source = inspect.getsource(FTLib._rebuild)
    for line in range(1, source[: source.index("except")].count("\n") - 1):
        assert len(set(_weights_of_three(line))) == 1, f"line {line}"


def _weights_of_three(line: int) -> list[float]:
    room, store = Room(least=2), shared_store()
    ended = threading.Barrier(3)

    def member(name: str, at_line: Callable[[], None]) -> float:
        weight = torch.tensor([float(len(name) + ord(name))])
        ftlib = FTLib.init(
            RoomConsensus(room, name),
            StoreFramework(store),
            state_dict=lambda: {"weight": weight},
            load_state_dict=lambda state: weight.copy_(state["weight"]),
        )
        lines = 0

        def trace(frame: FrameType, event: str, _: object) -> object:
            nonlocal lines
            if frame.f_code is FTLib._rebuild.__code__ and event == "line":
                lines += 1
                if lines == line:
                    at_line()
            return trace if frame.f_code is FTLib._rebuild.__code__ else None

        sys.settrace(trace)
        model = nn.Linear(1, 1, bias=False)
        try:
            while not (ftlib.step >= 5 and ftlib.size == 3):
                model.weight.grad = torch.full((1, 1), float(ftlib.rank))
                if ftlib.wait_gradients_ready(model) is SUCCESS:
                    weight -= model.weight.grad[0]
        finally:
            sys.settrace(None)
            ended.wait(60)
            ftlib.close()
        return weight.item()

    with ThreadPoolExecutor(3) as threads:
        third: list[Future[float]] = []

        def join() -> None:
            third.append(threads.submit(member, "c", lambda: None))
            with room.changed:  # until it has requested a view
                room.changed.wait_for(lambda: any(one.name == "c" for one in room.present), 0.2)

        first = threads.submit(member, "a", join)
        second = threads.submit(member, "b", lambda: None)
        return [first.result(60), second.result(60), third[0].result(60)]
