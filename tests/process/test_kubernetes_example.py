"""The Kubernetes manifests, as the overlays render them: their programs know the arguments, they match each
other, and they keep what docs/kubernetes.md promises. No cluster is needed; `make test-kube` has one.
"""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from programs import check
from test_train_demo import EXAMPLES

from torchft._job import start

MANIFESTS = EXAMPLES / "kubernetes"
REPOSITORY = EXAMPLES.parent.parent
OVERLAYS = sorted(folder.name for folder in (MANIFESTS / "overlays").iterdir())

Manifest = dict[str, Any]


@cache
def rendered(folder: str) -> list[Manifest]:
    yaml = pytest.importorskip(
        "yaml", reason="reading the manifests needs PyYAML, which comes with torch's own tools"
    )
    if shutil.which("kubectl") is None:
        pytest.skip("rendering the overlays needs kubectl")
    command = ["kubectl", "kustomize", str(MANIFESTS / folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def of_kind(kind: str, folder: str = "base") -> list[Manifest]:
    return [manifest for manifest in rendered(folder) if manifest["kind"] == kind]


def pods(folder: str) -> Iterator[Manifest]:
    """The templates of pods, however deep in a manifest."""

    def within(value: Any) -> Iterator[Manifest]:
        if isinstance(value, dict) and isinstance(value.get("spec"), dict) and "containers" in value["spec"]:
            yield value
        for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from within(part)

    yield from within(rendered(folder))


def environment(container: Manifest) -> dict[str, str]:
    return {variable["name"]: variable.get("value", "") for variable in container["env"]}


def words(container: Manifest) -> str:
    """The command of a container, with its variables as Kubernetes replaces them."""
    values = {**environment(container), "POD": "pod"}
    return re.sub(
        r"\$\((\w+)\)", lambda name: values[name[1]], " ".join(container["command"] + container["args"])
    )


def test_three_lighthouses_know_each_other_by_the_names_of_their_pods() -> None:
    service, names = of_kind("Service")
    (budget,), (lighthouses,) = of_kind("PodDisruptionBudget"), of_kind("StatefulSet")
    spec = lighthouses["spec"]
    labels = spec["selector"]["matchLabels"]
    assert names["spec"]["selector"] == service["spec"]["selector"] == labels
    assert labels.items() <= spec["template"]["metadata"]["labels"].items()
    assert budget["spec"]["selector"]["matchLabels"] == labels and budget["spec"]["maxUnavailable"] == 1
    assert names["spec"]["clusterIP"] == "None" and names["spec"]["publishNotReadyAddresses"]
    assert spec["serviceName"] == names["metadata"]["name"] and spec["podManagementPolicy"] == "Parallel"
    (container,) = spec["template"]["spec"]["containers"]
    command = container["args"]
    check(words(container))
    (port,) = (each["containerPort"] for each in container["ports"])
    assert {container[probe]["httpGet"]["port"] for probe in ("readinessProbe", "livenessProbe")} == {port}
    assert names["spec"]["ports"] == service["spec"]["ports"] == [{"port": port}]
    domain = f"{names['metadata']['name']}:{port}"
    own = [
        f"http://{lighthouses['metadata']['name']}-{number}.{domain}" for number in range(spec["replicas"])
    ]
    assert spec["replicas"] == 3 and f"--cluster={','.join(own)}" in command
    assert f"--bind=[::]:{port}" in command and f"--advertise=http://$(POD).{domain}" in command
    assert {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}} in container["env"]
    (mount,), (volume,) = container["volumeMounts"], spec["template"]["spec"]["volumes"]
    assert mount["name"] == volume["name"] and f"--state_dir={mount['mountPath']}" in command
    (job,) = of_kind("Job")
    (group,) = job["spec"]["template"]["spec"]["containers"]
    assert environment(group)["TORCHFT_LIGHTHOUSE"] == ",".join(own)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_numbers_of_an_overlay_fit(overlay: str) -> None:
    (lighthouses,), (job,) = (of_kind(kind, f"overlays/{overlay}") for kind in ("StatefulSet", "Job"))
    (lighthouse,) = lighthouses["spec"]["template"]["spec"]["containers"]
    (group,) = job["spec"]["template"]["spec"]["containers"]
    values = environment(group)
    assert "NUM_REPLICA_GROUPS" not in values  # a template cannot be changed, and the number of groups can
    nodes = int(values.get("PET_NNODES", 1))
    groups = job["spec"]["completions"] // nodes
    assert groups / 2 < int(environment(lighthouse)["MIN_REPLICAS"]) < groups  # one may fail
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == groups * nodes
    # A rank for each device.
    devices = group["resources"]["limits"].get("nvidia.com/gpu")
    assert values["PET_NPROC_PER_NODE"] == ("gpu" if devices else "1")
    assert lighthouse["image"] == group["image"] != "IMAGE"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_restricted_and_bounded(overlay: str) -> None:
    (policy,) = of_kind("NetworkPolicy", f"overlays/{overlay}")
    templates = list(pods(f"overlays/{overlay}"))
    assert len(templates) == 2
    for pod in templates:
        spec = pod["spec"]
        selector = policy["spec"]["podSelector"]["matchLabels"]
        assert selector.items() <= pod["metadata"]["labels"].items()
        assert {"podSelector": {"matchLabels": selector}} in policy["spec"]["ingress"][0]["from"]
        context = spec["securityContext"]
        assert context["runAsNonRoot"] and context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert f"USER {context['fsGroup']}" in (REPOSITORY / "Dockerfile").read_text().splitlines()
        assert spec["automountServiceAccountToken"] is False
        for volume in spec.get("volumes", []):
            assert "sizeLimit" in volume.get("emptyDir", {"sizeLimit": ""}), volume
        (container,) = spec["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
        resources = container["resources"]
        assert set(resources["requests"]) == {"cpu", "memory"} and "memory" in resources["limits"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_pod_is_a_group_or_a_node_of_one(overlay: str) -> None:
    (job,) = of_kind("Job", f"overlays/{overlay}")
    spec = job["spec"]["template"]["spec"]
    assert job["spec"]["completionMode"] == "Indexed"
    (group,) = spec["containers"]
    values = environment(group)
    assert "TORCHFT_RUN_ID" in values  # of the Job: the same for all of its pods, and for no later Job
    (text,) = group["args"]
    agent = "exec python -m torchft.launch.agent "
    start = f"REPLICA_GROUP_ID=$JOB_COMPLETION_INDEX {agent}--standalone "
    if "PET_NNODES" in values:
        number = "export REPLICA_GROUP_ID=$((JOB_COMPLETION_INDEX / PET_NNODES)); "
        start = number + agent + "--rdzv_backend torchft --rdzv_endpoint $TORCHFT_LIGHTHOUSE --rdzv_id "
    assert text.startswith(start)
    check(text.rpartition("exec ")[2])
    grace = int(values["TORCHFT_GRACE_S"] or 0)
    assert 0 < grace < 30 < spec["terminationGracePeriodSeconds"], "torchrun kills after 30 s"


def test_the_script_of_a_pod_leaves_on_the_signal_of_its_termination() -> None:
    (job,) = of_kind("Job")
    ((text,),) = (container["args"] for container in job["spec"]["template"]["spec"]["containers"])
    (script,) = re.findall(r"[\w/]+\.py", text)
    assert "torchft.Job(" in (REPOSITORY / script).read_text()
    assert "leave_on(signal.SIGTERM)" in inspect.getsource(start.connect)
