"""LocalSGD and DiLoCo with our package, with upstream's, and with both in one job: all numbers are equal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import HERE, START_TIMEOUT_S, Child, Job, ours_path
from upstream import upstream_path

CASE_TIMEOUT_S = 60


def start(job: Job, paths: tuple[Path, Path]) -> list[Child]:
    _, lighthouse = job.lighthouse(ours_path(), min_replicas=2, heartbeat_timeout_ms=1000)
    script = HERE / "local_sgd_group.py"
    return [
        job.python(f"group{i}", script, f"--group={i}", f"--lighthouse={lighthouse}", path=path)
        for i, path in enumerate(paths)
    ]


@pytest.mark.slow  # tests/integration/test_local_sgd.py has the papers' numbers
@pytest.mark.timeout(400)
def test_every_number_equals_that_of_the_upstream_package() -> None:
    ours, upstream = ours_path(), upstream_path("nightly")
    with Job() as job:
        jobs = {pair: start(job, pair) for pair in ((ours, ours), (upstream, upstream), (ours, upstream))}
        everybody = [child for children in jobs.values() for child in children]
        job.wait(
            lambda: all(child.of("imported") for child in everybody),
            START_TIMEOUT_S,
            "all have imported torchft",
        )
        for pair, children in jobs.items():
            assert [child.of("imported")[0]["torchft"] for child in children] == [
                str(p / "torchft") for p in pair
            ]
        names = ["LocalSGD", "DiLoCo", "fragments", "streaming"]
        for child in everybody:
            child.expected_to_live = False
        job.wait(
            lambda: all(len(child.of("case")) == len(names) or child.returncode for child in everybody),
            CASE_TIMEOUT_S * len(names),
            "all cases are done",
        )
        assert not any(child.returncode for child in everybody), job.report()
        for i, name in enumerate(names):
            expected = [child.of("case")[i]["trajectory"] for child in jobs[upstream, upstream]]
            # In the inner steps each group is alone.
            assert len(expected[0]) >= 24 and expected[0] != expected[1]
            for pair, children in jobs.items():
                found = [child.of("case")[i]["trajectory"] for child in children]
                assert [child.of("case")[i]["name"] for child in children] == [name] * 2
                for group in range(2):
                    differs = [
                        s
                        for s, (a, b) in enumerate(zip(found[group], expected[group], strict=True))
                        if a != b
                    ]
                    where = (
                        json.dumps([found[group][differs[0]][:3], expected[group][differs[0]][:3]])
                        if differs
                        else ""
                    )
                    assert not differs, f"{name}, {pair}, group {group}: steps {differs[:5]} differ: {where}"
