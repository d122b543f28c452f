"""One group of a job runs upstream and the other ours, with the lighthouse of either package."""

from __future__ import annotations

import pytest
from mixed import run_mixed_job
from processes import Job, ours_path
from upstream import REQUIREMENTS, upstream_path

# The other pairs are slow.
FAST = {("stable", "upstream")}
PAIRS = [
    (generation, lighthouse) for generation in sorted(REQUIREMENTS) for lighthouse in ("ours", "upstream")
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("generation", "lighthouse"),
    [pytest.param(*pair, marks=[] if pair in FAST else [pytest.mark.slow]) for pair in PAIRS],
)
def test_upstream_and_ours_share_a_job(generation: str, lighthouse: str) -> None:
    ours, upstream = ours_path(), upstream_path(generation)
    with Job() as job:
        run_mixed_job(job, (upstream, ours), ours if lighthouse == "ours" else upstream)


# In make test: test_the_main_part_has_all_names_and_is_sent_once, ..._is_found_by_the_name_of_any_generation.
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("generation", sorted(REQUIREMENTS))
def test_a_state_that_is_set_after_the_manager_was_made_heals_in_both_directions(generation: str) -> None:
    with Job() as job:
        run_mixed_job(job, (upstream_path(generation), ours_path()), ours_path(), ("--set-fns",))


# In make test: test_one_group_has_it_and_the_other_has_not, in tests/integration/test_heal_along.py.
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_with_heals_in_passing_an_upstream_group_transfers_its_state_at_once() -> None:
    with Job() as job:
        run_mixed_job(job, (upstream_path("nightly"), ours_path()), ours_path(), ("--heal-along",))
        counts = [child.log_tail(1000).count("the state is transferred at once") for child in job.children]
    assert sum(counts) > 0, "our group says so when it heals"


@pytest.mark.slow  # test_upstream_and_ours_share_a_job has the same job without FSDP2
@pytest.mark.timeout(300)
def test_an_upstream_group_shards_its_model_too() -> None:
    with Job() as job:
        run_mixed_job(job, (upstream_path("nightly"), ours_path()), ours_path(), ("--sharded",))
