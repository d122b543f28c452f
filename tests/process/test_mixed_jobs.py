"""One group of a job runs the published package and the other ours, on either one's lighthouse."""

from __future__ import annotations

import pytest
from mixed import run_mixed_job
from processes import Job, ours_path
from published import REQUIREMENTS, published_path


@pytest.mark.timeout(300)
@pytest.mark.parametrize("lighthouse", ["ours", "published"])
@pytest.mark.parametrize("generation", sorted(REQUIREMENTS))
def test_published_and_ours_share_a_job(generation: str, lighthouse: str) -> None:
    ours, published = ours_path(), published_path(generation)
    with Job() as job:
        run_mixed_job(job, (published, ours), ours if lighthouse == "ours" else published)
