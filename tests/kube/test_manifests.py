"""The API server accepts each overlay and component: no unknown field, no warning, PodSecurity's level
restricted, and the definitions of JobSet, Kubeflow Trainer and the Prometheus Operator.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from plane import ROOT, Plane, PlaneError
from test_kubernetes_example import JOBS, JOBSET, MANIFESTS, OVERLAYS, PROMETHEUS, TRAINER, definitions, page

# test_kubernetes_example.py has the same schemas, without the server's rules beside them.
pytestmark = [pytest.mark.kube, pytest.mark.slow, pytest.mark.timeout(600)]

STRICT = ("--namespace=restricted", "--dry-run=server", "--validate=strict", "--warnings-as-errors")
Accepts = Callable[..., list[str]]


@pytest.fixture(scope="module")
def accepts(plane: Plane) -> Accepts:
    """Applies files, or what is given, and returns the names of the objects. PlaneError: one is refused."""
    plane.kubectl("create", "namespace", "restricted")
    for mode in ("enforce", "warn"):
        plane.kubectl("label", "namespace", "restricted", f"pod-security.kubernetes.io/{mode}=restricted")
    for file in (file for one in (JOBSET, TRAINER, PROMETHEUS) for file in definitions(*one)):
        plane.kubectl("create", "-f", str(file))  # `apply` would note all in an annotation, which is too long
    plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")

    def accepts(*which: str, given: str = "") -> list[str]:
        return plane.kubectl("apply", *which, *STRICT, "--output=name", given=given).split()

    return accepts


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay(accepts: Accepts, overlay: str) -> None:
    names = accepts("-k", str(MANIFESTS / "overlays" / overlay))
    job = {"jobset": "jobset.jobset.x-k8s.io/torchft", "trainjob": "trainjob.trainer.kubeflow.org/torchft"}
    assert {job.get(overlay, "job.batch/torchft-groups"), "statefulset.apps/torchft-lighthouse"} <= set(names)
    assert "networkpolicy.networking.k8s.io/torchft" in names


@pytest.mark.parametrize("overlay", JOBS)
def test_an_overlay_with_all_components(accepts: Accepts, overlay: str, tmp_path: Path) -> None:
    components = {"tls", "fail-job"} | ({"token"} if overlay == "cpu-demo" else set())
    below = [os.path.relpath(MANIFESTS / "components" / name, tmp_path) for name in sorted(components)]
    (tmp_path / "kustomization.yaml").write_text(
        f"resources: [{os.path.relpath(MANIFESTS / 'overlays' / overlay, tmp_path)}]\ncomponents: {below}\n"
    )
    assert "service/torchft-groups" in accepts("-k", str(tmp_path))


def test_a_pod_with_rights_is_refused(accepts: Accepts, plane: Plane) -> None:
    text = plane.kubectl("kustomize", str(MANIFESTS / "overlays" / "cpu-demo"))
    assert text.count("runAsNonRoot: true") == 2
    with pytest.raises(PlaneError, match="would violate PodSecurity"):
        accepts("-f", "-", given=text.replace("runAsNonRoot: true", "runAsNonRoot: false"))
    account = "automountServiceAccountToken: false"
    with pytest.raises(PlaneError, match="unknown field"):
        accepts("-f", "-", given=text.replace(account, f"{account}\n      unknown: 1"))


def test_the_monitor_and_the_rules(accepts: Accepts, plane: Plane) -> None:
    assert accepts("-f", str(MANIFESTS / "podmonitor.yaml")) == ["podmonitor.monitoring.coreos.com/torchft"]
    plane.kubectl("create", "namespace", "training")
    (block,) = page("kubernetes", "Alerts")
    script = ["sh", "-e", "-c", block]
    done = subprocess.run(script, cwd=ROOT, env=plane.env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert plane.get("prometheusrule", "torchft", "--namespace=training")["spec"]["groups"]
