"""The control plane of all tests here, with four nodes, and a training on it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from plane import ROOT, Plane
from training import Training

NODES = ("node-a", "node-b", "node-c", "node-d")


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    image = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}
    with Plane(tmp_path_factory.mktemp("kube"), NODES, image, ROOT, env, {"nvidia.com/gpu": 8}) as plane:
        enforce = "pod-security.kubernetes.io/enforce=restricted"
        plane.kubectl("label", "namespace", "default", enforce)
        yield plane


@pytest.fixture
def train(plane: Plane) -> Iterator[Callable[..., Training]]:
    """Starts a training, which ends with the test; all nodes are there again then."""
    started: list[Training] = []

    def start(*args: Any, **kwargs: Any) -> Training:
        started.append(Training(plane, *args, **kwargs))
        return started[0]

    try:
        yield start
    finally:
        plane.mend()
        for training in started:
            training.delete()
