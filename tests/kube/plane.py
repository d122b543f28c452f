"""A Kubernetes control plane on 127.0.0.1, without containers: etcd, the API server, the controllers and the
scheduler are real, of `make test-kube`; tests/kube/cluster/kubelet.py plays the nodes.

Real are admission, Jobs, StatefulSets, budgets, eviction, drain, taints and the scheduler with extended
resources. Not there: images, limits, users, NetworkPolicies, kube-proxy (a Service's own name leads nowhere;
the names of pods that a headless Service gives do), ConfigMaps, volumes but emptyDir and Secrets, init
containers, `kubectl logs` and `exec`: a container's output is in DIR/pods/NODE/POD-UID/log.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]
KUBELET = Path(__file__).with_name("cluster") / "kubelet.py"
BINARIES = Path(os.environ.get("KUBE_BINARIES") or ROOT / "build" / "kube").resolve()
START_SEC = 300.0  # a busy machine takes a minute
LOOK_SEC = 0.25
T = TypeVar("T")


class PlaneError(AssertionError):
    """The control plane did not do what was waited for; the text says what it shows."""


def missing() -> str | None:
    """Why no control plane can run here; None if one can."""
    if not (BINARIES / "kube-apiserver").exists():
        return f"no kube-apiserver in {BINARIES}: `make test-kube` builds it"
    return None if os.geteuid() == 0 else "its nodes need root, for namespaces"


def wait_for(what: str, holds: Callable[[], T], seconds: float, shown: Callable[[], str] = str) -> T:
    """Waits until a function returns something true. PlaneError: it did not in this time."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        if time.monotonic() > deadline:
            raise PlaneError(f"timed out: no {what} within {seconds:g} s\n{shown()}")
        time.sleep(LOOK_SEC)
    return found


class Plane:
    """A control plane and its nodes, which end with it.

    Args:
        folder: for its state, its logs and those of pods.
        nodes: their names.
        path: PATH of all containers.
        workdir: their working directory.
        env: their environment variables.
        capacity: of each node, beside processors and memory: `{"nvidia.com/gpu": 8}`.
    """

    def __init__(
        self,
        folder: Path,
        nodes: Sequence[str],
        path: str,
        workdir: Path,
        env: dict[str, str] | None = None,
        capacity: dict[str, int] | None = None,
    ) -> None:
        self.folder = folder
        self.nodes = list(nodes)
        self._image = ["--image-path", path, "--image-workdir", str(workdir)]
        for name, value in (env or {}).items():
            self._image += ["--image-env", f"{name}={value}"]
        for name, count in (capacity or {}).items():
            self._image += ["--capacity", f"{name}={count}"]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._config = folder / "kubeconfig"
        self.env = {**os.environ, "PATH": f"{BINARIES}:{os.environ['PATH']}", "KUBECONFIG": str(self._config)}

    def __enter__(self) -> Plane:
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in reversed(self._processes):
            self._end(name, signal.SIGKILL if name in self.nodes else signal.SIGTERM)
        self._processes.clear()

    def _start(self) -> None:
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        etcd, peers, api = free_ports(3)
        url = f"http://127.0.0.1:{etcd}"
        options = {"data-dir": self.folder / "etcd", "listen-client-urls": url, "advertise-client-urls": url}
        options["listen-peer-urls"] = f"http://127.0.0.1:{peers}"
        self._run("etcd", options, "--unsafe-no-fsync")
        token, key = secrets.token_hex(16), self.folder / "sa.key"
        (self.folder / "tokens").write_text(f"{token},admin,admin,system:masters\n")
        subprocess.run(
            ["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True, timeout=60
        )
        options = {
            "etcd-servers": url,
            "bind-address": "127.0.0.1",
            "secure-port": api,
            "cert-dir": self.folder / "certs",
            "token-auth-file": self.folder / "tokens",
            "authorization-mode": "Node,RBAC",
            "anonymous-auth": "false",
            "service-account-issuer": "https://kube.invalid",
            "service-account-key-file": key,
            "service-account-signing-key-file": key,
            "service-cluster-ip-range": "192.0.2.0/24",
            # no Service of its own, whose address could not be one of loopback
            "advertise-address": "198.51.100.1",
            "endpoint-reconciler-type": "none",
        }
        self._run("kube-apiserver", options)
        certificate = self.folder / "certs" / "apiserver.crt"
        self._until(
            "certificate of the API server", lambda: certificate.exists() and certificate.stat().st_size
        )
        authority = base64.b64encode(certificate.read_bytes()).decode()
        server = f"https://127.0.0.1:{api}"
        cluster = {"name": "c", "cluster": {"server": server, "certificate-authority-data": authority}}
        config: dict[str, Any] = {"apiVersion": "v1", "kind": "Config", "current-context": "c"}
        config["clusters"] = [cluster]
        config["users"] = [{"name": "u", "user": {"token": token}}]
        config["contexts"] = [{"name": "c", "context": {"cluster": "c", "user": "u"}}]
        self._config.write_text(json.dumps(config))
        self._until("API server", lambda: self._answers("get", "--raw", "/readyz"))
        common = {"kubeconfig": self._config, "leader-elect": "false", "secure-port": 0}
        signing = {"service-account-private-key-file": key, "root-ca-file": certificate}
        self._run("kube-controller-manager", {**common, **signing})
        self._run("kube-scheduler", common)
        for node in self.nodes:
            self.start_node(node)
        self._until("service account", lambda: self._answers("get", "serviceaccount", "default"))
        for node in self.nodes:
            self._until(f"node {node}", lambda node=node: self.ready(node))

    def _until(self, what: str, holds: Callable[[], Any]) -> None:
        def alive() -> Any:
            for name, process in self._processes.items():
                if process.poll() is not None:
                    end = (self.folder / "logs" / name).read_text(errors="replace")[-2000:]
                    raise PlaneError(f"{name} ended with status {process.returncode}: {end}")
            return holds()

        wait_for(what, alive, START_SEC)

    def _run(self, program: str, options: dict[str, Any], *more: str) -> None:
        self._begin(program, [program, *(f"--{name}={value}" for name, value in options.items()), *more])

    def _begin(self, name: str, command: list[str]) -> None:
        with open(self.folder / "logs" / name, "ab") as log:
            given: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self._processes[name] = subprocess.Popen(command, env=self.env, start_new_session=True, **given)

    def _end(self, name: str, number: int) -> None:
        process = self._processes[name]
        self._signal(process.pid, signal.SIGCONT)
        process.send_signal(number)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)

    def _answers(self, *arguments: str) -> bool:
        done = subprocess.run(["kubectl", *arguments], env=self.env, capture_output=True, timeout=60)
        return done.returncode == 0

    def start_node(self, node: str) -> None:
        """Starts a node, or starts it again after it was lost."""
        command = [sys.executable, str(KUBELET), node, "--dir", str(self.folder), *self._image]
        self._begin(node, command)

    def lose(self, node: str) -> None:
        """A node loses its power: its pods' processes end, and no status is sent."""
        self._end(node, signal.SIGKILL)

    def mend(self) -> None:
        """All nodes are there again, ready, and take pods."""
        for node in self.nodes:
            if self._processes[node].poll() is not None:
                self.start_node(node)
            self.wake(node)
        for node in self.nodes:
            self._until(f"node {node}", lambda node=node: self.ready(node))
        self.kubectl("uncordon", *self.nodes)

    def hang(self, node: str) -> None:
        """A node hangs: connections stay open, nothing answers, until `wake`."""
        self._signal(self._processes[node].pid, signal.SIGSTOP)

    def wake(self, node: str) -> None:
        self._signal(self._processes[node].pid, signal.SIGCONT)

    def kill_pod(self, name: str) -> None:
        """SIGKILL for the processes of a pod."""
        self._signal(self._container(name), signal.SIGKILL)

    def hang_pod(self, name: str) -> None:
        """The processes of a pod hang; its node does not."""
        self._signal(self._container(name), signal.SIGSTOP)

    def _container(self, name: str) -> int:
        """The process 1 of a pod's container, by its host name."""
        for process in self._processes.values():
            for pid in tree(process.pid)[1:]:
                with contextlib.suppress(OSError):
                    own = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    comm = Path(f"/proc/{pid}/comm").read_text().strip()
                    if f"HOSTNAME={name}".encode() in own and comm not in ("setpriv", "unshare"):
                        return pid
        raise PlaneError(f"no process of pod {name} runs")

    def _signal(self, pid: int, number: int) -> None:
        for each in tree(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, number)

    def ready(self, node: str) -> bool:
        shown = self.get("node", node)
        conditions = shown.get("status", {}).get("conditions", [])
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def kubectl(self, *arguments: str, given: str = "", timeout: float = 120) -> str:
        """Runs kubectl. PlaneError: it failed."""
        done = subprocess.run(
            ["kubectl", *arguments],
            env=self.env,
            cwd=ROOT,
            input=given,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if done.returncode:
            raise PlaneError(f"kubectl {' '.join(arguments)}: {done.stderr or done.stdout}")
        return done.stdout

    def get(self, *arguments: str) -> dict[str, Any]:
        """Objects as JSON; an empty dict: there is none."""
        return json.loads(self.kubectl("get", "--ignore-not-found", "-o", "json", *arguments) or "{}")

    def pods(self, selector: str = "") -> list[dict[str, Any]]:
        return self.get("pods", "-l", selector).get("items", [])

    def log(self, pod: dict[str, Any]) -> str:
        """The output of a pod's container so far."""
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        file = self.folder / "pods" / pod["spec"]["nodeName"] / f"{name}-{uid[:8]}" / "log"
        return file.read_text(errors="replace") if file.exists() else ""


def address(pod: dict[str, Any]) -> str:
    """Where a pod's servers listen on this machine."""
    return "127" + pod["status"]["podIP"].removeprefix("198")


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += tree(int(child))
    return found


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]
