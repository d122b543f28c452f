"""The Kubernetes manifests: their programs know the arguments, and they match each other. No cluster is
needed.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from programs import check
from test_train_demo import EXAMPLES

from torchft._job import start

MANIFESTS = EXAMPLES / "kubernetes" / "base"
REPOSITORY = EXAMPLES.parent.parent


def manifests(path: Path) -> list[dict[str, Any]]:
    yaml = pytest.importorskip(
        "yaml", reason="reading the manifests needs PyYAML, which comes with torch's own tools"
    )
    return list(yaml.safe_load_all(path.read_text()))


def test_three_lighthouses_know_each_other_by_the_names_of_their_pods() -> None:
    names, service, budget, pods = manifests(MANIFESTS / "lighthouses.yaml")
    spec = pods["spec"]
    labels = spec["template"]["metadata"]["labels"]
    for selector in (spec["selector"]["matchLabels"], names["spec"]["selector"], service["spec"]["selector"]):
        assert selector == labels
    assert budget["spec"]["selector"]["matchLabels"] == labels and budget["spec"]["maxUnavailable"] == 1
    assert names["spec"]["clusterIP"] == "None" and names["spec"]["publishNotReadyAddresses"]
    assert spec["serviceName"] == names["metadata"]["name"] and spec["podManagementPolicy"] == "Parallel"
    (container,) = spec["template"]["spec"]["containers"]
    command = [*container["command"], *container["args"]]
    check(" ".join(command))
    (port,) = (each["containerPort"] for each in container["ports"])
    assert {container[probe]["httpGet"]["port"] for probe in ("readinessProbe", "livenessProbe")} == {port}
    assert names["spec"]["ports"] == service["spec"]["ports"] == [{"port": port}]
    domain = f"{names['metadata']['name']}:{port}"
    own = [f"http://{pods['metadata']['name']}-{number}.{domain}" for number in range(spec["replicas"])]
    assert spec["replicas"] == 3 and f"--cluster={','.join(own)}" in command
    assert f"--bind=[::]:{port}" in command and f"--advertise=http://$(POD).{domain}" in command
    assert [(one["name"], one["valueFrom"]["fieldRef"]["fieldPath"]) for one in container["env"]] == [
        ("POD", "metadata.name")
    ]
    (mount,), (claim,) = container["volumeMounts"], spec["volumeClaimTemplates"]
    assert mount["name"] == claim["metadata"]["name"] and f"--state_dir={mount['mountPath']}" in command
    # Otherwise the lighthouse could not write there.
    user = f"USER {spec['template']['spec']['securityContext']['fsGroup']}"
    assert user in (REPOSITORY / "Dockerfile").read_text().splitlines()

    (job,) = manifests(MANIFESTS / "groups.yaml")
    (group,) = job["spec"]["template"]["spec"]["containers"]
    values = {variable["name"]: variable.get("value") for variable in group["env"]}
    assert values["TORCHFT_LIGHTHOUSE"] == ",".join(own)


def test_each_pod_is_a_group_with_its_own_number() -> None:
    (job,) = manifests(MANIFESTS / "groups.yaml")
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    (group,) = spec["template"]["spec"]["containers"]
    values = {variable["name"]: variable.get("value") for variable in group["env"]}
    assert values["NUM_REPLICA_GROUPS"] == str(spec["completions"])
    assert "TORCHFT_RUN_ID" in values  # of the Job: the same for all of its pods, and for no later Job
    (text,) = group["args"]
    assert text.startswith("REPLICA_GROUP_ID=$JOB_COMPLETION_INDEX exec torchrun ")
    check(text.replace("exec ", ""))
    grace = int(values["TORCHFT_GRACE_S"] or 0)
    assert 0 < grace < 30 < spec["template"]["spec"]["terminationGracePeriodSeconds"], (
        "torchrun kills after 30 s"
    )
    ranks = re.search(r"--nproc_per_node (\d+)", text)
    assert ranks and int(ranks[1]) == group["resources"]["limits"]["nvidia.com/gpu"]


def test_the_script_of_a_pod_leaves_on_the_signal_of_its_termination() -> None:
    (job,) = manifests(MANIFESTS / "groups.yaml")
    ((text,),) = (container["args"] for container in job["spec"]["template"]["spec"]["containers"])
    (script,) = re.findall(r"[\w/]+\.py", text)
    assert "torchft.Job(" in (REPOSITORY / script).read_text()
    assert "leave_on(signal.SIGTERM)" in inspect.getsource(start.connect)
