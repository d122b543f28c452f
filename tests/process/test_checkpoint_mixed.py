"""Checkpoints between our package and upstream, in both directions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import HERE, START_TIMEOUT_S, Job, ours_path
from upstream import REQUIREMENTS, upstream_path

ANSWER_TIMEOUT_S = 60


class Peer:
    """A process that runs checkpoint_peer.py with the torchft in `path`."""

    def __init__(self, job: Job, path: Path) -> None:
        self._job = job
        script = HERE / "checkpoint_peer.py"
        self._child = job.python("peer", script, path=path, env={"TORCHFT_HOST": "localhost"})
        job.wait(lambda: self._child.of("imported"), START_TIMEOUT_S, "torchft is imported")
        assert Path(self._child.of("imported")[0]["torchft"]) == path / "torchft"

    def ask(self, do: str, **args: Any) -> dict[str, Any]:
        before = len(self._child.of("answer"))
        self._child.send(do=do, **args)
        self._job.wait(lambda: len(self._child.of("answer")) > before, ANSWER_TIMEOUT_S, f"an answer to {do}")
        return self._child.of("answer")[-1]["answer"]


@pytest.fixture(scope="module")
def ours() -> Iterator[Peer]:
    with Job() as job:
        yield Peer(job, ours_path())


@pytest.fixture(scope="module", params=sorted(REQUIREMENTS))
def upstream(request: pytest.FixtureRequest) -> Iterator[Peer]:
    with Job() as job:
        yield Peer(job, upstream_path(request.param))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("num_chunks", [0, 1, 3])
@pytest.mark.parametrize("ours_serves", [True, False])
def test_a_state_is_transferred_between_the_packages(
    ours: Peer, upstream: Peer, ours_serves: bool, num_chunks: int
) -> None:
    source, target = (ours, upstream) if ours_serves else (upstream, ours)
    metadata = source.ask("serve", num_chunks=num_chunks, step=7)["metadata"]
    assert target.ask("fetch", num_chunks=num_chunks, step=7, metadata=metadata) == {"received": True}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("ours_serves", [True, False])
def test_a_wrong_step_is_an_error_in_both_packages(ours: Peer, upstream: Peer, ours_serves: bool) -> None:
    source, target = (ours, upstream) if ours_serves else (upstream, ours)
    metadata = source.ask("serve", num_chunks=0, step=7)["metadata"]
    error = target.ask("fetch", num_chunks=0, step=8, metadata=metadata)["error"]
    assert "400" in error and "7" in error and "8" in error
