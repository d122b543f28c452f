"""An isolated group of ours with upstream's plain and isolated groups as peers."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import START_TIMEOUT_S, Job, ours_path
from torch.distributed import TCPStore
from upstream import upstream_path

PEER = Path(__file__).resolve().parent / "mixed_peer.py"
KINDS = ["ProcessGroupBabyGloo", "ProcessGroupGloo", "ProcessGroupBabyGloo"]
# Upstream starts an interpreter for each set of peers.
ANSWER_S = 60


@pytest.mark.slow  # test_mixed_jobs has both packages in a job, test_isolated.py isolated groups
@pytest.mark.timeout(300)
def test_an_isolated_group_beside_the_upstream_plain_and_isolated_ones() -> None:
    ours, upstream = ours_path(), upstream_path("nightly")
    paths = [ours, upstream, upstream]
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with Job() as job:
        ranks = [job.python(kind, PEER, kind, path=path) for kind, path in zip(KINDS, paths)]
        job.wait(lambda: all(rank.of("made") for rank in ranks), START_TIMEOUT_S, "all have their group")
        assert [Path(rank.of("made")[0]["torchft"]) for rank in ranks] == [path / "torchft" for path in paths]

        # Ours first and last: the order determines which ranks wait for which.
        for quorum, order in enumerate([(0, 1, 2), (2, 1, 0)]):
            peers = [ranks[i] for i in order]
            where = f"localhost:{store.port}/mixed/{quorum}"
            for place, peer in enumerate(peers):
                peer.send(where=where, rank=place, n=len(peers), quorum=quorum)
            job.wait(
                lambda peers=peers, n=quorum: all(any(e["quorum"] == n for e in p.of("done")) for p in peers),
                ANSWER_S,
                f"quorum {quorum} of {[KINDS[i] for i in order]} is done",
            )
            answers = [peer.of("done")[-1] for peer in peers]
            n = len(peers)
            assert all(answer["sum"] == sum(range(1, n + 1)) for answer in answers)
            assert all(answer["gathered"] == list(range(n)) for answer in answers)
            assert all(answer["sent"] == n - 1 for answer in answers)
        for rank in ranks:
            rank.send(where=None)
        job.wait_exit(ranks, ANSWER_S)
