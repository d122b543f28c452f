"""Groups and lighthouses on a real control plane: nodes are lost, drained and hang, groups are added and
removed, come back late, and stop. `make test-kube` builds the control plane, and prints what it measures.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable

import pytest
from plane import ROOT, Plane, wait_for
from training import GROUPS, HEAL_SEC, INDEX, LIGHTHOUSES, START_SEC, Training, now

from tests.promises import within

# Slow: minutes each; test_kubernetes_example.py compares the manifests with each other.
pytestmark = [pytest.mark.kube, pytest.mark.slow(minutes=5), pytest.mark.timeout(1500)]

FAILURES = "batch.kubernetes.io/job-index-failure-count"
LOST_SEC = 400.0  # until a node that is lost is noticed, and its pods have been replaced
Train = Callable[..., Training]


def node_of(pod: dict) -> str:
    return pod["spec"]["nodeName"]


def test_the_node_of_the_leader_is_lost(plane: Plane, train: Train) -> None:
    job = train(3, "100000")
    job.trains(3, 0.0)
    leader = job.leader()
    node = node_of(leader)
    groups = [index for index in range(3) if node_of(job.pod(index)) == node]
    if not groups:  # so that the lighthouses have something to decide
        move(job, 0, [other for other in plane.nodes if other != node])
        groups = [0]
    elif len(groups) == 3:  # so that one trains on
        move(job, groups.pop(), [node])
    job.trains(3, now())
    lost = now()
    plane.lose(node)
    job.trains(3 - len(groups), lost)
    pause = job.longest_pause(lost - 1, now())
    print(f"the leader's node is lost, with groups {groups}: the longest time without a commit {pause:.2f} s")
    assert job.lost_steps() == []
    assert pause < within(3.0)
    healed = job.trains(3, now(), LOST_SEC)
    print(f"all three groups train again {healed - lost:.1f} s after the loss")

    name = leader["metadata"]["name"]
    plane.kubectl("delete", "node", node)
    deleted = now()
    job.until("new lighthouse on another node", lambda: votes(job, name), LOST_SEC)
    print(
        f"a lighthouse with an empty directory has a vote {now() - deleted:.1f} s after `kubectl delete node`"
    )


def test_the_leader_is_lost_while_a_group_is_killed(plane: Plane, train: Train) -> None:
    """No node of a group is lost: 5 s without a sign of life are not part of the pause."""
    job = train(3, "100000")
    job.trains(3, 0.0)
    node = node_of(job.leader())
    for index in range(3):
        if node_of(job.pod(index)) == node:
            move(job, index, [node])
    job.trains(3, now())
    assert node_of(job.leader()) == node
    lost = now()
    plane.lose(node)
    plane.kill_pod(job.pod(0)["metadata"]["name"])
    job.trains(2, lost)
    pause = job.longest_pause(lost - 1, now())
    print(f"the leader is lost, a group killed: the longest time without a commit {pause:.2f} s")
    assert pause < within(3.0)
    job.trains(3, now())
    assert job.lost_steps() == []


def move(job: Training, index: int, away_from: list[str]) -> None:
    """Lets a group run on another node than these."""
    job.plane.kubectl("cordon", *away_from)
    job.plane.kubectl("delete", "pod", job.pod(index)["metadata"]["name"], "--wait=false")
    job.until("group on another node", lambda: node_of_running(job, index) not in ["", *away_from])
    job.plane.kubectl("uncordon", *away_from)


def node_of_running(job: Training, index: int) -> str:
    pod = job.pod(index)
    alive = "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] == "Running"
    return node_of(pod) if alive else ""


def votes(job: Training, name: str) -> bool:
    """Whether all three lighthouses are ready, and this one has a pod that is not being deleted."""
    pods = job.lighthouses()
    alive = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"] and ready(pod)]
    return len(alive) == 3 and name in [pod["metadata"]["name"] for pod in alive]


def ready(pod: dict) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))


def test_a_node_hangs_and_wakes(plane: Plane, train: Train) -> None:
    job = train(3, "100000")
    job.trains(3, 0.0)
    node = node_of(job.pod(2))
    away = sum(node_of(job.pod(index)) == node for index in range(3))
    first = job.pod(2)["metadata"]["name"]
    hung = now()
    plane.hang(node)
    if away < 3:
        print(f"the others commit {job.trains(3 - away, hung) - hung:.1f} s after a node hangs")
    job.until("new pod", lambda: job.pod(2)["metadata"]["name"] != first, LOST_SEC)
    print(f"its group is replaced {job.trains(3, now(), LOST_SEC) - hung:.1f} s after")
    plane.wake(node)
    job.until("node", lambda: plane.ready(node))
    gone = lambda: first not in [pod["metadata"]["name"] for pod in plane.pods(GROUPS)]  # noqa: E731
    job.until("end of the old pod", gone)
    job.trains(3, now())
    assert job.lost_steps() == []


def test_a_lighthouse_hangs(plane: Plane, train: Train) -> None:
    job = train(2, "100000")
    job.trains(2, 0.0)
    leader = job.leader()["metadata"]["name"]
    hung = now()
    plane.hang_pod(leader)

    def again() -> bool:
        pod = next(pod for pod in job.lighthouses() if pod["metadata"]["name"] == leader)
        return pod["status"]["containerStatuses"][0]["restartCount"] == 1 and ready(pod)

    job.until("restart of the lighthouse", again)
    print(f"a lighthouse that hangs is back after {now() - hung:.1f} s")
    job.trains(2, now())
    assert job.longest_pause(hung, now()) < within(3.0)
    assert job.lost_steps() == []


def test_a_node_is_drained(plane: Plane, train: Train) -> None:
    job = train(3, "100000")
    job.trains(3, 0.0)
    set_failures(plane, 7)  # as after seven failures: the next pod would come after 600 s, and the drain wait
    set_failures(plane, 0)  # as docs/kubernetes.md says
    node, leader = node_of(job.pod(1)), node_of(job.leader())
    for each in dict.fromkeys([node, leader]):
        before = now()
        plane.kubectl("drain", each, "--ignore-daemonsets", "--delete-emptydir-data", timeout=400)
        print(f"kubectl drain of {each} takes {now() - before:.1f} s")
        healed = job.trains(3, now())
        print(f"all groups train {healed - before:.1f} s after its begin")
        plane.kubectl("uncordon", each)
        job.until(
            "three lighthouses", lambda: all(votes(job, pod["metadata"]["name"]) for pod in job.lighthouses())
        )
    assert job.lost_steps() == []


def set_failures(plane: Plane, count: int) -> None:
    plane.kubectl("annotate", "--overwrite", "pods", "-l", GROUPS, f"{FAILURES}={count}")


def test_groups_are_scaled_to_2_4_and_3(plane: Plane, train: Train) -> None:
    job = train(2, "100000")
    job.trains(2, 0.0)
    for groups in (4, 3):
        before = now()
        command = [
            sys.executable,
            "-m",
            "torchft.cli",
            "scale",
            str(groups),
            "--kubernetes",
            "torchft-groups",
        ]
        done = subprocess.run(command, env=plane.env, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        print(f"{groups} groups train {job.trains(groups, before) - before:.1f} s after `torchft scale`")
    indexes = {pod["metadata"]["annotations"][INDEX] for pod in running(plane)}
    job.until("three pods", lambda: len(running(plane)) == 3)
    assert indexes >= {"0", "1", "2"} and job.lost_steps() == []


def running(plane: Plane) -> list[dict]:
    return [pod for pod in plane.pods(GROUPS) if "deletionTimestamp" not in pod["metadata"]]


def test_a_group_that_comes_back_late_ends_with_success(plane: Plane, train: Train) -> None:
    steps = 400
    job = train(3, str(steps))
    job.trains(3, 0.0)
    job.until("step near the end", lambda: job.commits()[-1].get("step", 0) > steps - 20)
    first = job.pod(2)["metadata"]["name"]
    plane.kubectl("delete", "pod", first, "--wait=false")
    job.until("end of the job", job.condition)
    assert job.condition().startswith("Complete"), job.shown()
    late = job.pod(2)["metadata"]["name"]
    assert late != first
    assert [commit for commit in job.commits(2) if commit["pod"].startswith(late)] == []
    assert [commit.get("ended") for commit in job.commits()].count(steps) == 2
    assert plane.pods(LIGHTHOUSES)


def test_the_job_fails_when_the_training_stops(plane: Plane, train: Train) -> None:
    job = train(2, "100000 30", components=("fail-job",))
    job.until("end of the job", job.condition)
    assert job.condition() == "Failed PodFailurePolicy"
    codes = [
        pod["status"]["containerStatuses"][0]["state"].get("terminated", {}).get("exitCode")
        for pod in plane.pods(GROUPS)
    ]
    assert 65 in codes


def test_pods_of_a_stopped_training_end_at_their_start(plane: Plane, train: Train) -> None:
    """Without the component, which waits for the deletion of lost nodes."""
    job = train(2, "100000 30")

    def ended() -> list[int]:
        states = [
            pod["status"].get("containerStatuses", [{}])[0].get("state", {}) for pod in plane.pods(GROUPS)
        ]
        return [state["terminated"]["exitCode"] for state in states if "terminated" in state]

    job.until("two lives of each group", lambda: len(ended()) >= 4)
    assert set(ended()) == {65}
    last = max(commit["time"] for commit in job.commits())
    job.until("a third life", lambda: len(ended()) >= 6)
    assert max(commit["time"] for commit in job.commits()) == last


def test_the_page_leads_to_a_healed_group(plane: Plane) -> None:
    """The first commands of docs/kubernetes.md, as they are, but those that need a node's server."""
    begin, namespace = now(), ["--namespace", "training"]
    (block, *_) = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "kubernetes.md").read_text(), re.DOTALL)
    commands = [
        command for command in block.splitlines() if not re.match("kubectl (logs|port-forward)", command)
    ]
    assert len(commands) == 3

    def training(but: str = "") -> list[dict]:
        """The pods that have made steps in three groups."""
        pods = plane.get("pods", *namespace, "-l", GROUPS).get("items", [])
        pods = [pod for pod in pods if pod["metadata"]["name"] != but]
        return [pod for pod in pods if "nodeName" in pod["spec"] and " groups 3" in plane.log(pod)]

    def shown() -> str:
        return plane.kubectl("get", "pods", *namespace, "-o", "wide") + str(list(map(plane.log, training())))

    try:
        for command in commands:
            plane.kubectl(*shlex.split(command)[1:])
        wait_for("three groups", lambda: len(training()) == 3, START_SEC, shown)
        print(f"three groups train {now() - begin:.1f} s after the first command of the page")
        killed, first = now(), training()[0]["metadata"]["name"]
        plane.kubectl("delete", "pod", *namespace, first, "--wait=false")
        wait_for("healed group", lambda: len(training(but=first)) == 3, HEAL_SEC, shown)
        print(
            f"a deleted group has healed {now() - killed:.1f} s later, {now() - begin:.1f} s after the first"
        )
    finally:
        plane.kubectl("delete", "job,statefulset", "--all", *namespace, "--wait=false")
        plane.kubectl("delete", "pods", "--all", *namespace, "--force", "--grace-period=0", "--wait=false")
        plane.kubectl("delete", "namespace", "training", "--wait=false")
