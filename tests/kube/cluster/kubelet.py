"""A kubelet without a container runtime: a pod's one container is a process, in namespaces of its own.

    kubelet.py NODE --dir DIR [--image-path PATH] [--image-workdir FOLDER] [--image-env NAME=VALUE]...
        [--capacity nvidia.com/gpu=8]...

An image is a PATH, a folder and environment variables of this machine, the same for every image's name. All
pods are in the network of this machine: each has an address of 127.18.0.0/16, at which its servers listen
that are told to listen at `[::]`, and DIR/hosts, the name server, has those names of pods that a headless
Service gives. The API shows 198.18.x.y in place of 127.18.x.y, which an EndpointSlice would refuse. When the
kubelet ends, its pods end. It needs only the standard library, util-linux and root.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import fcntl
import http.client
import json
import os
import re
import shlex
import signal
import ssl
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

STRATEGIC, MERGE = "application/strategic-merge-patch+json", "application/merge-patch+json"
ERRORS = (OSError, http.client.HTTPException, RuntimeError, ValueError)
PROBES = ("readinessProbe", "livenessProbe")
FIRST_RESTART_SEC, LAST_RESTART_SEC = 10.0, 300.0  # between two restarts of a container
ISOLATED = "setpriv --pdeathsig SIGKILL unshare --mount --uts --pid --fork --mount-proc --kill-child=SIGKILL"


def now(form: str = "%Y-%m-%dT%H:%M:%SZ") -> str:
    return datetime.now(timezone.utc).strftime(form)


def say(*text: object) -> None:
    print(now("%H:%M:%S.%f")[:-3], *text, flush=True)


class Api:
    """The API server of a kubeconfig in JSON."""

    def __init__(self, file: Path) -> None:
        config = json.loads(file.read_text())
        cluster, self._token = config["clusters"][0]["cluster"], config["users"][0]["user"]["token"]
        self._url = urllib.parse.urlparse(cluster["server"])
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self._tls = ssl.create_default_context(cadata=authority)

    def open(
        self, method: str, path: str, body: Any = None, kind: str = "application/json", timeout: float = 30
    ) -> http.client.HTTPResponse:
        link = http.client.HTTPSConnection(
            str(self._url.hostname), self._url.port, context=self._tls, timeout=timeout
        )
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": kind}
        link.request(method, path, None if body is None else json.dumps(body), headers)
        return link.getresponse()

    def ask(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        """The object; None where there is none, or it is another one. RuntimeError: it was refused."""
        reply = self.open(method, path, body, kind)
        data = json.loads(reply.read())
        if reply.status >= 300 and reply.status not in (404, 409):
            raise RuntimeError(f"{method} {path}: {reply.status} {data.get('message')}")
        return data if reply.status < 300 else None

    def retry(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        while True:
            try:
                return self.ask(method, path, body, kind)
            except ERRORS as error:
                say(error)
                time.sleep(1)


class Names:
    """DIR/hosts, which is /etc/hosts in all pods: the names of pods, the latest first."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextlib.contextmanager
    def _lines(self) -> Iterator[list[str]]:
        with open(self._path, "a+") as file:  # pods have mounted it: it is written in place
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            lines = file.read().splitlines() or ["127.0.0.1 localhost"]
            yield lines
            file.seek(0)
            file.truncate()
            file.write("\n".join(lines) + "\n")

    def add(self, address: str, names: list[str]) -> None:
        with self._lines() as lines:
            lines[:] = [line for line in lines if line.split()[0] != address]
            lines.insert(0, " ".join([address, *names]))

    def remove(self, address: str) -> None:
        with self._lines() as lines:
            lines[:] = [line for line in lines if line.split()[0] != address]


class Pod:
    """A pod of this node, in a thread of its own."""

    def __init__(self, node: Node, pod: dict[str, Any]) -> None:
        meta, self._node, self._pod, self._spec = pod["metadata"], node, pod, pod["spec"]
        (self._container,) = self._spec["containers"]
        self.name, self._uid = meta["name"], meta["uid"]
        self._space = f"/api/v1/namespaces/{meta['namespace']}"
        self._path = f"{self._space}/pods/{self.name}"
        self._dir = node.dir / "pods" / node.name / f"{self.name}-{self._uid[:8]}"
        self._host = f"18.{int(self._uid[:2], 16)}.{max(1, int(self._uid[2:4], 16))}"
        self._address = f"127.{self._host}"
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline: float | None = None  # the time of SIGKILL
        self._deleting, self._gone = "deletionTimestamp" in meta, False
        self._ready, self._restarts, self._code, self._begin = False, 0, 137, now()
        self._probes: dict[str, list[float]] = {}  # of each kind: the time of the next one, and failures
        threading.Thread(target=self._run, daemon=True).start()

    def see(self, pod: dict[str, Any]) -> None:
        """Takes a change of its object."""
        if "deletionTimestamp" in pod["metadata"]:
            self._deleting = True
            self._stop(pod["metadata"]["deletionGracePeriodSeconds"], "deleted")

    def vanish(self) -> None:
        """Ends at once: its object is deleted."""
        self._gone = True
        self._kill(signal.SIGKILL)

    def _kill(self, number: int) -> None:
        if self._process and self._process.poll() is None:
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
            inner = children.split()[0] if children else self._process.pid
            os.kill(int(inner), number)  # process 1 of the container, the child of unshare

    def _stop(self, grace: float, why: str) -> None:
        if self._deadline is None:
            say(self._node.name, self.name, f"{why}: SIGTERM, {grace} s of grace")
            self._deadline = time.time() + grace
            self._kill(signal.SIGTERM)

    def _report(self, phase: str) -> None:
        reason = "Error" if self._code else "Completed"
        ended = {"terminated": {"exitCode": self._code, "reason": reason, "finishedAt": now()}}
        container = {"name": self._container["name"], "image": "", "imageID": "", "ready": self._ready}
        container["restartCount"] = self._restarts
        container["state"] = {"running": {"startedAt": now()}} if phase == "Running" else ended
        kinds = {"Initialized": True, "PodReadyToStartContainers": True}
        kinds |= {"ContainersReady": self._ready, "Ready": self._ready}
        ip = f"198.{self._host}"
        status = {
            "phase": phase,
            "hostIP": "127.0.0.1",
            "podIP": ip,
            "podIPs": [{"ip": ip}],
            "startTime": self._begin,
            "conditions": [
                {"type": kind, "status": str(value), "lastTransitionTime": now()}
                for kind, value in kinds.items()
            ],
            "containerStatuses": [container],
        }
        patch = {"metadata": {"uid": self._uid}, "status": status}
        self._node.api.retry("PATCH", f"{self._path}/status", patch, STRATEGIC)

    def _run(self) -> None:
        always = self._spec["restartPolicy"] == "Always"
        lost = self._pod["status"].get("phase") == "Running"  # it ran under a kubelet before this one
        if not self._deleting and (always or not lost):
            self._live(always)
        self._node.names.remove(self._address)
        if not self._gone:
            self._report("Failed" if self._code else "Succeeded")
        while not self._gone and not self._deleting:
            time.sleep(0.2)
        if not self._gone:
            options = {"gracePeriodSeconds": 0, "preconditions": {"uid": self._uid}}
            self._node.api.retry("DELETE", self._path, options)

    def _live(self, always: bool) -> None:
        """Runs the container to its end, and starts it again where the pod says so."""
        start_at, delay = 0.0, FIRST_RESTART_SEC
        while not self._gone:
            if self._process is None:
                if self._deadline is not None:
                    return
                if time.time() >= start_at:
                    self._process = self._start()
                    self._report("Running")
            elif (code := self._process.poll()) is not None:
                killed = self._deadline and time.time() > self._deadline  # of which unshare makes a 1
                self._code = 137 if killed else 128 - code if code < 0 else code
                self._ready, self._process = False, None
                say(self._node.name, self.name, f"ended with status {self._code}")
                if not always:
                    return
                if not self._deleting:
                    self._deadline = None
                start_at = time.time() + (delay if self._restarts else 0.0)
                delay = min(LAST_RESTART_SEC, 2 * delay) if self._restarts else delay
                self._restarts += 1
            else:
                for kind, memory in self._probes.items():
                    self._probe(kind, self._container[kind], memory)
                if self._deadline and time.time() > self._deadline:
                    say(self._node.name, self.name, "SIGKILL after the grace period")
                    self._kill(signal.SIGKILL)
            time.sleep(0.1)

    def _probe(self, kind: str, probe: dict[str, Any], memory: list[float]) -> None:
        if time.time() < memory[0]:
            return
        unready = kind == "readinessProbe" and not self._ready
        memory[0] = time.time() + (1 if unready else probe.get("periodSeconds", 10))
        try:
            get = probe["httpGet"]
            url = f"{get.get('scheme', 'HTTP').lower()}://{self._address}:{get['port']}{get['path']}"
            trust = ssl._create_unverified_context()  # as a kubelet
            with urllib.request.urlopen(url, timeout=probe.get("timeoutSeconds", 1), context=trust):
                memory[1] = 0
        except OSError as error:
            memory[1] += 1
            say(self._node.name, self.name, f"{kind}: {error}")
        good, bad = memory[1] == 0, memory[1] >= probe.get("failureThreshold", 3)
        if kind == "livenessProbe" and bad:
            grace = self._spec["terminationGracePeriodSeconds"]
            self._stop(probe.get("terminationGracePeriodSeconds", grace), "not alive")
        elif kind == "readinessProbe" and (bad if self._ready else good):
            self._ready = good
            say(self._node.name, self.name, f"ready: {good}")
            self._report("Running")

    def _volumes(self) -> dict[str, str]:
        """The folders of its volumes, `tmpfs` for one in memory."""
        found = {}
        for volume in self._spec.get("volumes", []):
            folder = self._dir / "volumes" / volume["name"]
            folder.mkdir(parents=True, exist_ok=True)
            found[volume["name"]] = str(folder)
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                found[volume["name"]] = "tmpfs"
            elif secret := volume.get("secret"):
                held = self._node.api.retry("GET", f"{self._space}/secrets/{secret['secretName']}") or {}
                for name, value in held.get("data", {}).items():
                    (folder / name).write_bytes(base64.b64decode(value))
            elif "emptyDir" not in volume:
                del found[volume["name"]]  # the token of the service account
        return found

    def _environment(self) -> dict[str, str]:
        meta = self._pod["metadata"]
        fields = {
            "metadata.name": self.name,
            "metadata.namespace": meta["namespace"],
            "metadata.uid": self._uid,
            "spec.nodeName": self._node.name,
            "status.podIP": self._address,
            "status.hostIP": "127.0.0.1",
        }
        for kind in ("labels", "annotations"):
            fields |= {f"metadata.{kind}['{k}']": v for k, v in meta.get(kind, {}).items()}
        args = self._node.args
        env = {"HOSTNAME": self.name, "HOME": os.environ.get("HOME", "/"), "PATH": args.image_path}
        env |= dict(pair.split("=", 1) for pair in args.image_env)
        for each in self._container.get("env", []):
            value = each.get("value", "")
            if "valueFrom" in each:
                env[each["name"]] = fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
            else:
                env[each["name"]] = expanded(value, env)
        return env

    def _start(self) -> subprocess.Popen[bytes]:
        self._dir.mkdir(parents=True, exist_ok=True)
        hostname, names = self._spec.get("hostname", self.name), [self.name]
        if domain := self._spec.get("subdomain"):
            full = f"{hostname}.{domain}"
            space = self._pod["metadata"]["namespace"]
            names += [full, f"{full}.{space}", f"{full}.{space}.svc", f"{full}.{space}.svc.cluster.local"]
        self._node.names.add(self._address, [hostname, *names])
        setup = f"hostname {hostname} && mount --bind {shlex.quote(str(self._node.dir / 'hosts'))} /etc/hosts"
        volumes = self._volumes()
        # Last what hides the sources of the others.
        hides = lambda mount: str(self._dir).startswith(mount["mountPath"])  # noqa: E731
        for mount in sorted(self._container.get("volumeMounts", []), key=hides):
            if source := volumes.get(mount["name"]):
                how = "-t tmpfs none" if source == "tmpfs" else f"--bind {shlex.quote(source)}"
                setup += f" && mkdir -p {mount['mountPath']} && mount {how} {mount['mountPath']}"
        folder = self._container.get("workingDir", self._node.args.image_workdir)
        setup += f' && cd {shlex.quote(str(folder))} && exec "$@"'
        env = self._environment()
        words = [*self._container["command"], *self._container.get("args", [])]
        command = [expanded(word, env).replace("[::]", self._address) for word in words]
        self._ready = "readinessProbe" not in self._container
        begin = time.time()
        self._probes = {
            kind: [begin + self._container[kind].get("initialDelaySeconds", 0), 0]
            for kind in PROBES
            if kind in self._container
        }
        say(self._node.name, self.name, f"starts at {self._address}")
        with open(self._dir / "log", "ab") as log:
            return subprocess.Popen(
                [*ISOLATED.split(), "sh", "-c", setup, "sh", *command],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )


def expanded(text: str, env: dict[str, str]) -> str:
    """Replaces $(NAME), as Kubernetes does."""
    return re.sub(r"\$\((\w+)\)", lambda found: env.get(found[1], found[0]), text)


class Node:
    """A node, and its pods."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.name, self.dir = args, args.node, args.dir.absolute()
        self.api, self.names = Api(args.dir / "kubeconfig"), Names(self.dir / "hosts")
        self._pods: dict[str, Pod] = {}
        self._path = f"/api/v1/nodes/{args.node}"
        self._size = {"cpu": "64", "memory": "512Gi", "pods": "110"}
        self._size |= dict(pair.split("=") for pair in args.capacity)

    def serve(self) -> None:
        labels = {"kubernetes.io/hostname": self.name}
        self.api.retry("POST", "/api/v1/nodes", {"metadata": {"name": self.name, "labels": labels}})
        threading.Thread(target=self._beat, daemon=True).start()
        query = f"/api/v1/pods?fieldSelector=spec.nodeName={self.name}"
        while True:
            listed = self.api.retry("GET", query)
            for uid in set(self._pods) - {pod["metadata"]["uid"] for pod in listed["items"]}:
                self._pods.pop(uid).vanish()
            for pod in listed["items"]:
                self._see("ADDED", pod)
            since = f"{query}&watch=1&timeoutSeconds=300"
            since += f"&resourceVersion={listed['metadata']['resourceVersion']}"
            try:
                with self.api.open("GET", since, timeout=330) as events:
                    for event in map(json.loads, events):
                        self._see(event["type"], event["object"])
            except (*ERRORS, KeyError) as error:  # KeyError: an event that is an error
                say(self.name, repr(error))

    def _see(self, kind: str, pod: dict[str, Any]) -> None:
        uid = pod["metadata"]["uid"]
        if kind == "DELETED":
            if uid in self._pods:
                self._pods.pop(uid).vanish()
        elif uid in self._pods:
            self._pods[uid].see(pod)
        elif pod["status"].get("phase") in ("Pending", "Running") or "deletionTimestamp" in pod["metadata"]:
            self._pods[uid] = Pod(self, pod)

    def _beat(self) -> None:
        leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        while True:
            lease = {"holderIdentity": self.name, "leaseDurationSeconds": 40}
            body = {"spec": {**lease, "renewTime": now("%Y-%m-%dT%H:%M:%S.%fZ")}}
            if not self.api.retry("PATCH", f"{leases}/{self.name}", body, MERGE):
                self.api.retry("POST", leases, {"metadata": {"name": self.name}, **body})
            ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": now()}
            status = {"capacity": self._size, "allocatable": self._size, "conditions": [ready]}
            status["addresses"] = [{"type": "InternalIP", "address": "127.0.0.1"}]
            self.api.retry("PATCH", f"{self._path}/status", {"status": status}, STRATEGIC)
            time.sleep(10)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("node")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--image-path", default=os.environ["PATH"])
    parser.add_argument("--image-workdir", type=Path, default=Path.cwd())
    parser.add_argument("--image-env", action="append", default=[])
    parser.add_argument("--capacity", action="append", default=[])
    return parser.parse_args()


if __name__ == "__main__":
    Node(parse_args()).serve()
