"""Groups of two pods meet through the lighthouses, with the token and the certificate of the page."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from plane import Plane
from test_kubernetes_example import page
from training import GROUPS, Training, now

# test_rendezvous.py has the rendezvous, test_kubernetes_example.py the names of the certificate.
pytestmark = [pytest.mark.kube, pytest.mark.slow, pytest.mark.timeout(1500)]


def test_a_pod_of_a_group_is_replaced(plane: Plane, train: Callable[..., Training], tmp_path: Path) -> None:
    authority, (_, secret) = page("operating", "Security")[0], page("kubernetes", "Security")
    script = f"{authority}\n{secret}".replace("training", "default")
    command = ["sh", "-e", "-c", script]
    made = subprocess.run(command, cwd=tmp_path, env=plane.env, capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stderr
    try:
        job = train(2, "100000", components=("tls",), overlay="multi-node")
        job.trains(2, 0.0)
        first = job.pod(1)["metadata"]["name"]
        plane.kubectl("delete", "pod", first, "--wait=false")
        job.until("new pod", lambda: job.pod(1)["metadata"]["name"] != first)
        job.trains(2, now())
        assert job.lost_steps() == []
        assert len(plane.pods(GROUPS)) >= 4
    finally:
        plane.kubectl("delete", "secret", "torchft")
