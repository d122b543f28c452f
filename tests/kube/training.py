"""A training on the control plane, from an overlay, and what its pods tell."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import yaml
from plane import ROOT, Plane, address, wait_for

from torchft._lighthouse_http import HttpLighthouse, Unanswered

EXAMPLES = ROOT / "python" / "examples" / "kubernetes"
GROUPS, LIGHTHOUSES = "job-name=torchft-groups", "app=torchft-lighthouses"
INDEX = "batch.kubernetes.io/job-completion-index"
START_SEC = 600.0  # until pods train, which import PyTorch side by side on a busy machine
HEAL_SEC = 600.0


class Training:
    """Lighthouses and groups that run tests/kube/group_script.py.

    Args:
        plane: where.
        groups: their number.
        script: its arguments.
        least: MIN_REPLICAS of the lighthouses.
        components: of Kustomize, beside the overlay.
        overlay: its pods get as little as those of `cpu-demo`, and a rank each.
    """

    def __init__(
        self,
        plane: Plane,
        groups: int,
        script: str,
        least: int = 1,
        components: tuple[str, ...] = (),
        overlay: str = "cpu-demo",
    ) -> None:
        self.plane, self._began = plane, now()
        folder = plane.folder / "overlay"
        folder.mkdir(exist_ok=True)
        up = f"{'../' * len(folder.parts[1:])}{EXAMPLES.relative_to('/')}"
        kustomization: dict[str, Any] = {"resources": [f"{up}/overlays/{overlay}"]}
        kustomization["components"] = [f"{up}/components/{name}" for name in components]
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        objects = list(yaml.safe_load_all(plane.kubectl("kustomize", str(folder))))
        for each in objects:
            if each["kind"] == "Job":
                (container,) = each["spec"]["template"]["spec"]["containers"]
                values = {variable["name"]: variable for variable in container["env"]}
                pods = groups * int(values.get("PET_NNODES", {"value": 1})["value"])
                each["spec"] |= {"completions": pods, "parallelism": pods}
                values["PET_NPROC_PER_NODE"]["value"] = "1"
                container["resources"] = {"requests": {"cpu": "250m", "memory": "1Gi"}}
                text = container["args"][0]
                container["args"] = [re.sub(r"train_ddp.py.*", f"tests/kube/group_script.py {script}", text)]
            elif each["kind"] == "StatefulSet":
                (container,) = each["spec"]["template"]["spec"]["containers"]
                for variable in container["env"]:
                    if variable["name"] == "MIN_REPLICAS":
                        variable["value"] = str(least)
        # A PodMonitor has no definition here.
        objects = [
            each for each in objects if each["apiVersion"].partition("/")[0] != "monitoring.coreos.com"
        ]
        plane.kubectl("apply", "-f", "-", given=yaml.safe_dump_all(objects))

    def delete(self) -> None:
        """Deletes all, also pods that no node ends."""
        plane = self.plane
        for kind in ("job", "statefulset"):
            plane.kubectl("delete", kind, "--all", "--cascade=background", "--wait=false")
        for pod in plane.pods():
            gone = ["--force", "--grace-period=0", "--wait=false", "--ignore-not-found"]
            plane.kubectl("delete", "pod", pod["metadata"]["name"], *gone)
        wait_for("end of all pods", lambda: not plane.pods(), 120)

    def job(self) -> dict[str, Any]:
        return self.plane.get("job", "torchft-groups")

    def condition(self) -> str:
        """Complete or Failed and why; empty while it runs."""
        found = [c for c in self.job()["status"].get("conditions", []) if c["status"] == "True"]
        return next(
            (f"{c['type']} {c.get('reason', '')}" for c in found if c["type"] in ("Complete", "Failed")), ""
        )

    def pod(self, index: int) -> dict[str, Any]:
        """The latest pod of a group."""
        pods = self.plane.pods(f"{GROUPS},{INDEX}={index}")
        return max(pods, key=lambda pod: pod["metadata"]["creationTimestamp"])

    def lighthouses(self) -> list[dict[str, Any]]:
        return sorted(self.plane.pods(LIGHTHOUSES), key=lambda pod: pod["metadata"]["name"])

    def status(self) -> dict[str, Any]:
        """The status of the leading lighthouse; empty if none answers."""
        return self._ask("/status") or {}

    def leader(self) -> dict[str, Any]:
        """The pod of the lighthouse that leads."""

        def found() -> dict[str, Any] | None:
            name = (self._ask("/cluster") or {"leader": ""})["leader"].partition("//")[2].partition(".")[0]
            return next((pod for pod in self.lighthouses() if pod["metadata"]["name"] == name), None)

        return self.until("leader of the lighthouses", found)

    def _ask(self, path: str) -> Any:
        addresses = [
            f"http://{address(pod)}:29510" for pod in self.lighthouses() if pod["status"].get("podIP")
        ]
        try:
            return HttpLighthouse(",".join(addresses), timeout=3).get(path) if addresses else None
        except Unanswered:
            return None

    def commits(self, index: int | None = None) -> list[dict[str, Any]]:
        """The commits of a group, or of all, in all lives, in order of time; also how it ended."""
        found = []
        pattern = f"pods/*/torchft-groups-{'*' if index is None else index}-*/log"
        for log in self.plane.folder.glob(pattern):
            for line in log.read_text(errors="replace").splitlines():
                if line.startswith("{") and line.endswith("}"):
                    found.append({**json.loads(line), "pod": log.parent.name})
        found = [commit for commit in found if commit["time"] > self._began]  # of this training
        return sorted(found, key=lambda commit: commit["time"])

    def trains(self, groups: int, after: float, seconds: float = START_SEC) -> float:
        """Waits until a step with this number of groups was committed after a time. Returns when."""

        def found() -> float | None:
            times = [c["time"] for c in self.commits() if c.get("groups") == groups and c["time"] > after]
            return min(times, default=None)

        return self.until(f"step of {groups} groups", found, seconds)

    def until(self, what: str, holds: Callable[[], Any], seconds: float = HEAL_SEC) -> Any:
        return wait_for(what, holds, seconds, self.shown)

    def shown(self) -> str:
        """The state of the pods and lighthouses, for the text of an error."""
        pods = self.plane.kubectl("get", "nodes,jobs,pods", "-o", "wide")
        ends = [f"{p.parent.name}: ...{p.read_text(errors='replace')[-1500:]}" for p in self._logs()]
        return "\n".join([pods, str(self.status()), *ends])

    def _logs(self) -> list[Any]:
        return sorted(self.plane.folder.glob("pods/*/*/log"), key=lambda log: log.stat().st_mtime)[-6:]

    def longest_pause(self, begin: float, end: float) -> float:
        """The longest time without a commit of any group, in seconds."""
        times = [begin, *(c["time"] for c in self.commits() if begin < c["time"] < end and "step" in c), end]
        return max(after - before for before, after in pairwise(times))

    def lost_steps(self) -> list[int]:
        """The steps that were committed again after a later one was."""
        highest, again = 0, []
        for commit in self.commits():
            if "step" in commit:
                if commit["step"] < highest - 1:
                    again.append(commit["step"])
                highest = max(highest, commit["step"])
        return again


def now() -> float:
    return time.time()
