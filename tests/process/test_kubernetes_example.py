"""The Kubernetes manifests, as the overlays render them: their programs know the arguments, they match each
other, and they keep what docs/kubernetes.md promises. No cluster is needed; `make test-kube` has one.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from documents import blocks, documents
from programs import check
from test_train_demo import EXAMPLES

from torchft._job import start

MANIFESTS = EXAMPLES / "kubernetes"
REPOSITORY = EXAMPLES.parent.parent
OVERLAYS = sorted(folder.name for folder in (MANIFESTS / "overlays").iterdir())
# The others copy the Job into a resource of another project.
JOBS = [overlay for overlay in OVERLAYS if overlay not in ("jobset", "trainjob")]

Manifest = dict[str, Any]


def parsed(text: str) -> list[Manifest]:
    yaml = pytest.importorskip(
        "yaml", reason="reading the manifests needs PyYAML, which comes with torch's own tools"
    )
    return list(yaml.safe_load_all(text))


@cache
def rendered(folder: str) -> list[Manifest]:
    if shutil.which("kubectl") is None:
        pytest.skip("rendering the overlays needs kubectl")
    command = ["kubectl", "kustomize", str(MANIFESTS / folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return parsed(done.stdout)


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
    command = words(container).split()
    check(words(container))
    (port,) = (each["containerPort"] for each in container["ports"])
    assert {container[probe]["httpGet"]["port"] for probe in ("readinessProbe", "livenessProbe")} == {port}
    assert names["spec"]["ports"] == service["spec"]["ports"] == [{"port": port}]
    domain = f"{names['metadata']['name']}:{port}"
    own = [
        f"http://{lighthouses['metadata']['name']}-{number}.{domain}" for number in range(spec["replicas"])
    ]
    assert spec["replicas"] == 3 and f"--cluster={','.join(own)}" in command
    assert f"--bind=[::]:{port}" in command and f"--advertise=http://pod.{domain}" in command
    assert {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}} in container["env"]
    mount, volume = container["volumeMounts"][0], spec["template"]["spec"]["volumes"][0]
    assert mount["name"] == volume["name"] and f"--state_dir={mount['mountPath']}" in command
    (job,) = of_kind("Job")
    (group,) = job["spec"]["template"]["spec"]["containers"]
    assert environment(group)["TORCHFT_LIGHTHOUSE"] == ",".join(own)


@pytest.mark.parametrize("overlay", JOBS)
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
def test_the_token_is_in_the_one_secret(overlay: str) -> None:
    for pod in pods(f"overlays/{overlay}"):
        (container,) = pod["spec"]["containers"]
        (secret,) = (volume for volume in pod["spec"]["volumes"] if "secret" in volume)
        assert secret["secret"] == {"secretName": "torchft", "optional": True, "defaultMode": 0o440}
        mount = {"name": secret["name"], "mountPath": "/etc/torchft", "readOnly": True}
        assert mount in container["volumeMounts"]
        token = environment(container).get("TORCHFT_TOKEN_FILE")
        assert token == (None if overlay == "cpu-demo" else "/etc/torchft/token")


def page(document: str, heading: str) -> list[str]:
    """The shell blocks of a section."""
    text = documents()[f"docs/{document}.md"]
    return [block.text for block in blocks(document, text) if block.heading == heading]


def with_kubectl(script: str, folder: Path, kubectl: str) -> str:
    """The output of a script with a stand-in for kubectl, in a folder."""
    program = folder / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{kubectl}\n")
    program.chmod(0o755)
    env = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    command = ["sh", "-e", "-c", script]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_secret_of_the_page_has_the_names_of_all_pods(tmp_path: Path) -> None:
    def below(folder: str) -> str:
        return os.path.relpath(MANIFESTS / folder, tmp_path)

    folder = str(tmp_path)
    (tmp_path / "kustomization.yaml").write_text(
        f"resources: [{below('overlays/multi-node')}]\ncomponents: [{below('components/tls')}]\n"
    )
    (job,), (lighthouses,) = of_kind("Job", folder), of_kind("StatefulSet", folder)
    (group,), (lighthouse,) = (one["spec"]["template"]["spec"]["containers"] for one in (job, lighthouses))
    values = environment(group)
    addresses = [urlsplit(address) for address in values["TORCHFT_LIGHTHOUSE"].split(",")]
    assert len(addresses) == 3 and {address.scheme for address in addresses} == {"https"}
    own = environment(lighthouse)
    assert own["TORCHFT_LIGHTHOUSE"] == values["TORCHFT_LIGHTHOUSE"] and own["SCHEME"] == "https"
    assert {lighthouse[f"{one}nessProbe"]["httpGet"]["scheme"] for one in ("live", "readi")} == {"HTTPS"}
    host = values["TORCHFT_HOST"].replace("$(INDEX)", "7").replace("$(NAMESPACE)", "training")
    selector = {"app": job["spec"]["template"]["metadata"]["labels"]["app"]}
    (service,) = (one for one in of_kind("Service", folder) if one["spec"]["selector"] == selector)
    subdomain = job["spec"]["template"]["spec"]["subdomain"]
    assert subdomain == service["metadata"]["name"] == host.split(".")[1]

    if shutil.which("openssl") is None:
        pytest.skip("the page's commands need openssl")
    authority, (token, all_files) = page("operating", "Security")[0], page("kubernetes", "Security")
    script = f"{authority}\n{token}\n{all_files}"
    files_exist = 'for f; do case $f in *=*) test -s "${f#*=}" || exit 1 ;; esac; done'
    asked = with_kubectl(script, tmp_path, f'echo "$@"; {files_exist}')
    keys = re.findall(r"--from-file=secrets/(\S+)", asked.splitlines()[-1])
    for container in (group, lighthouse):
        files = [value for value in environment(container).values() if value.startswith("/etc/torchft/")]
        assert sorted(files) == sorted(f"/etc/torchft/{key}" for key in keys)
    for name in (host, *(address.hostname for address in addresses)):
        check_host = ["openssl", "x509", "-in", "secrets/host.pem", "-noout", "-checkhost", str(name)]
        done = subprocess.run(check_host, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert "does match" in done.stdout, done


def refused(value: Any, schema: Manifest, at: str) -> Iterator[str]:
    """What the schema of a custom resource does not allow; unknown fields are errors."""
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    kind = schema.get("type")
    if kind in kinds and not isinstance(value, kinds[kind]):
        yield f"{at}: {value!r} is no {kind}"
    elif isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        yield from (f"{at}.{name} is missing" for name in schema.get("required", []) if name not in value)
        for name, part in value.items():
            if name in known or others:
                yield from refused(part, known.get(name, others), f"{at}.{name}")
            elif not schema.get("x-kubernetes-preserve-unknown-fields"):
                yield f"{at}.{name} is unknown"
    elif isinstance(value, list):
        for part in value:
            yield from refused(part, schema["items"], f"{at}[]")
    elif value not in schema.get("enum", [value]):
        yield f"{at}: {value!r} is none of {schema['enum']}"


CUSTOM = ("jobsets.yaml", "trainingruntimes.yaml", "trainjobs.yaml", "podmonitors.yaml", "rules.yaml")
# Modules and their folders with definitions of custom resources.
JOBSET = ("sigs.k8s.io/jobset@v0.10.1", "config/components/crd/bases")
TRAINER = ("github.com/kubeflow/trainer/v2@v2.0.0", "manifests/base/crds")
PROMETHEUS = (
    "github.com/prometheus-operator/prometheus-operator@v0.85.0",
    "example/prometheus-operator-crd",
)


@cache
def definitions(module: str, folder: str) -> list[Path]:
    go = os.environ.get("GO") or shutil.which("go")
    if go is None:
        pytest.skip("the definitions of custom resources come with Go")
    command = [go, "mod", "download", "-json", module]
    done = subprocess.run(command, cwd=REPOSITORY / "go", capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"the definitions of custom resources are not there: {done.stdout}")
    files = (Path(json.loads(done.stdout)["Dir"]) / folder).glob("*_*.yaml")
    return sorted(file for file in files if file.name.endswith(CUSTOM))


@cache
def schemas(module: str, folder: str) -> dict[str, Manifest]:
    """The schemas of custom resources, by kind."""
    kinds = {}
    for definition in (one for file in definitions(module, folder) for one in parsed(file.read_text())):
        (version,) = (one for one in definition["spec"]["versions"] if one["served"])
        kinds[definition["spec"]["names"]["kind"]] = version["schema"]["openAPIV3Schema"]
    return kinds


def test_custom_resources_fit_their_definitions() -> None:
    kinds = {kind: schema for one in (JOBSET, TRAINER, PROMETHEUS) for kind, schema in schemas(*one).items()}
    manifests = rendered("overlays/jobset") + rendered("overlays/trainjob")
    manifests += parsed((MANIFESTS / "podmonitor.yaml").read_text())
    checked = set()
    for manifest in manifests:
        kind = manifest["kind"]
        if kind in kinds:
            assert list(refused(manifest["spec"], kinds[kind]["properties"]["spec"], kind)) == []
            checked.add(kind)
    assert checked == {"JobSet", "TrainingRuntime", "TrainJob", "PodMonitor"}
    # A JobSet has the schema of a Job, by which those of the other overlays are checked.
    of_jobset = kinds["JobSet"]["properties"]["spec"]["properties"]
    jobs = of_jobset["replicatedJobs"]["items"]["properties"]
    for overlay in JOBS:
        (job,) = of_kind("Job", f"overlays/{overlay}")
        assert list(refused(job["spec"], jobs["template"]["properties"]["spec"], overlay)) == []


def test_prometheus_finds_the_port_and_the_rules_become_a_resource(tmp_path: Path) -> None:
    (monitor,) = parsed((MANIFESTS / "podmonitor.yaml").read_text())
    (lighthouses,) = of_kind("StatefulSet")
    (container,) = lighthouses["spec"]["template"]["spec"]["containers"]
    assert [one["port"] for one in monitor["spec"]["podMetricsEndpoints"]] == [container["ports"][0]["name"]]
    pod = monitor["spec"]["selector"]["matchLabels"]["statefulset.kubernetes.io/pod-name"]
    assert pod == f"{lighthouses['metadata']['name']}-0"
    (block,) = page("kubernetes", "Alerts")
    (tmp_path / "docs").symlink_to(REPOSITORY / "docs")
    applied = with_kubectl(block, tmp_path, 'case "$*" in *podmonitor.yaml) ;; *) cat ;; esac')
    (rule,) = parsed(applied)
    assert rule["kind"] == "PrometheusRule"
    assert rule["spec"] == parsed((REPOSITORY / "docs/alerts.yml").read_text())[0]
    kind = schemas(*PROMETHEUS)["PrometheusRule"]
    assert list(refused(rule["spec"], kind["properties"]["spec"], "rules")) == []


@pytest.mark.parametrize("overlay", JOBS)
def test_each_pod_is_a_group_or_a_node_of_one(overlay: str) -> None:
    (job,) = of_kind("Job", f"overlays/{overlay}")
    spec = job["spec"]["template"]["spec"]
    assert job["spec"]["completionMode"] == "Indexed"
    (group,) = spec["containers"]
    values = environment(group)
    assert "TORCHFT_RUN_ID" in values  # of the Job: the same for all of its pods, and for no later Job
    (text,) = group["args"]
    agent = "exec python -m torchft.launch.agent "
    start = f"export REPLICA_GROUP_ID=$JOB_COMPLETION_INDEX && {agent}--standalone "
    if "PET_NNODES" in values:
        number = "${REPLICA_GROUP_ID:-$((JOB_COMPLETION_INDEX / PET_NNODES))}"
        start = f"export REPLICA_GROUP_ID={number} && {agent}"
        assert values["TORCHFT_LEAVE_ON"] == ""  # if its peers left, their pods would complete
        start += "--rdzv_backend torchft --rdzv_endpoint $TORCHFT_LIGHTHOUSE --rdzv_id "
    assert text.startswith(start)
    check(text.rpartition("exec ")[2])
    grace = int(values["TORCHFT_GRACE_S"] or 0)
    assert 0 < grace < 30 < spec["terminationGracePeriodSeconds"], "torchrun kills after 30 s"


def test_the_script_of_a_pod_leaves_on_the_signal_of_its_termination() -> None:
    (job,) = of_kind("Job")
    ((text,),) = (container["args"] for container in job["spec"]["template"]["spec"]["containers"])
    (script,) = re.findall(r"[\w/]+\.py", text)
    assert "torchft.Job(" in (REPOSITORY / script).read_text()
    assert "leave_on_from_env(signal.SIGTERM)" in inspect.getsource(start.connect)


# A mount of the root that nobody can write to, with memory where the manifest has volumes, and a user
# without rights. $1: the mount points.
RESTRICTED = """
set -e
ip link set lo up
mount --make-rprivate /
for at in $(cut -d " " -f 5 /proc/self/mountinfo); do
    case $at in /proc*|/dev*|/sys*) ;; *) mount -o remount,bind,ro "$at" || true ;; esac
done
for at in $1; do mount -t tmpfs none "$at"; done
shift
exec unshare --user --map-user 10001 --map-group 10001 setpriv --no-new-privs "$@"
"""


@pytest.mark.slow  # starts the programs
@pytest.mark.hosts
@pytest.mark.timeout(240)
def test_the_programs_need_no_rights_and_write_to_their_volumes_only() -> None:
    (lighthouses,), (job,) = of_kind("StatefulSet"), of_kind("Job")
    (lighthouse,) = lighthouses["spec"]["template"]["spec"]["containers"]
    (group,) = job["spec"]["template"]["spec"]["containers"]
    volumes = [mount["mountPath"] for mount in group["volumeMounts"] + lighthouse["volumeMounts"]]
    (text,) = group["args"]
    # One lighthouse and one group, on their own; a machine has a folder /mnt, and none /state.
    alone = re.sub(r"--(cluster|advertise)=\S+", "", words(lighthouse))
    both = f"touch x; {alone} & {text}".replace("exec ", "").replace("--steps 20000", "--steps 2")
    env = {
        **os.environ,
        **environment(group),
        "JOB_COMPLETION_INDEX": "0",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "TORCHFT_HOST": "127.0.0.1",
        "TORCHFT_LIGHTHOUSE": "http://127.0.0.1:29510",
    }
    del env["TORCHFT_RUN_ID"], env["TORCHFT_NODE_NAME"]
    inside = ["sh", "-c", both.replace("=3", "=1").replace("/state", "/mnt")]
    mounts = " ".join(volumes).replace("/state", "/mnt")
    apart = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    done = subprocess.run(
        [*apart, "sh", "-c", RESTRICTED, "sh", mounts, *inside],
        cwd=REPOSITORY,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0 and "ended at step" in done.stdout, done.stdout
    assert "Read-only file system" in done.stdout  # of touch
