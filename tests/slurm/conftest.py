"""One cluster of Slurm for all tests of this folder, and a folder for each job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jobs import Job
from machines import Cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm"), nodes=4) as cluster:
        yield cluster


@pytest.fixture
def new_job(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[[], Job]]:
    """Makes jobs in the folder of the test, which end with it."""
    jobs: list[Job] = []

    def make() -> Job:
        jobs.append(Job(cluster, tmp_path))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


@pytest.fixture
def job(new_job: Callable[[], Job]) -> Job:
    return new_job()
