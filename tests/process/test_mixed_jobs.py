"""One group of a job runs the published package and the other ours, on either one's lighthouse."""

from __future__ import annotations

import pytest
from mixed import run_mixed_job
from processes import Job, ours_path
from published import REQUIREMENTS, published_path

# Each generation and each lighthouse once; the other pairs are slow.
FAST = {("nightly", "ours"), ("stable", "published")}
PAIRS = [(generation, lighthouse) for generation in sorted(REQUIREMENTS) for lighthouse in ("ours", "published")]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("generation", "lighthouse"),
    [pytest.param(*pair, marks=[] if pair in FAST else [pytest.mark.slow]) for pair in PAIRS],
)
def test_published_and_ours_share_a_job(generation: str, lighthouse: str) -> None:
    ours, published = ours_path(), published_path(generation)
    with Job() as job:
        run_mixed_job(job, (published, ours), ours if lighthouse == "ours" else published)
