"""A cluster of Slurm on this machine: a controller, and nodes that can fail.

The controller and each node have a network, a host name, a process table and a `/dev/shm` of their own. The
bridge between them is in the network of the controller. The end of a machine's first process removes its
other processes, its network and its mounts, and the kernel ends it with the tests, also if these are killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from torchft.launch.process_tree import end_with_parent

PROGRAMS = ("ip", "munged", "nsenter", "sbatch", "slurmctld", "slurmd", "unshare")
CPUS = 8  # of a node, as Slurm counts them
_START_S = 60.0
_COMMAND_S = 60.0
_NETWORK = "198.18.0"  # 198.18.0.0/15 is reserved for measurements

# SlurmdTimeout: how long a node may be silent before it counts as failed; 300 s by default.
_CONF = """
ClusterName=torchft
SlurmctldHost=controller({network}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SlurmdParameters=config_overrides
SlurmdTimeout=15
ReturnToService=2
MinJobAge=3600
GresTypes=gpu
NodeName=node[1-{nodes}] CPUs={cpus} RealMemory=1024 Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES DefMemPerCPU=1 MaxTime=60 State=UP
"""
# The first process of a host, which also collects the processes that lose their parent.
_INIT = "sleep infinity & wait"


def missing() -> str | None:
    """Why no cluster can run here; None if one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    if absent := [program for program in PROGRAMS if shutil.which(program, path=path) is None]:
        return f"not installed: {', '.join(absent)}; Debian's slurm-wlm, munge, iproute2 and util-linux"
    try:
        subprocess.run(
            ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "true"],
            check=True,
            capture_output=True,
        )
    except subprocess.CalledProcessError as e:
        return f"no namespaces: {e.stderr.decode().strip()}"
    return None


def wait_for(what: str, ready: Callable[[], object], seconds: float = 120.0) -> float:
    """Waits until something is true, and returns the seconds that it took, or fails."""
    began = time.monotonic()
    while not ready():
        assert time.monotonic() - began < seconds, f"timed out: {seconds:g} s passed before {what}"
        time.sleep(0.1)
    return time.monotonic() - began


class Machine:
    """A host: namespaces that end with this object's process.

    Args:
        name: its host name.
        address: its address, on the network of the controller.
        controller: the machine whose bridge it is connected to; None: it is the controller.
    """

    def __init__(self, name: str, address: str, folder: Path, controller: Machine | None = None) -> None:
        self.name, self.address, self._controller = name, address, controller
        mounts = (
            "mount -t tmpfs tmpfs /dev/shm",
            *(f"mount --bind {folder}/{file} /etc/{file}" for file in ("hosts", "nsswitch.conf")),
        )
        setup = " && ".join((f"hostname {name}", "ip link set lo up", *mounts, _INIT))
        namespaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._process = subprocess.Popen(
            ["unshare", *namespaces, "bash", "-c", setup], preexec_fn=end_with_parent
        )
        self._init = 0
        wait_for(f"{name} has a process", self._began, _START_S)

    def _began(self) -> bool:
        assert self._process.poll() is None, f"{self.name} ended with status {self._process.returncode}"
        for status in Path("/proc").glob("[0-9]*/stat"):
            try:
                pid, _, rest = status.read_text().partition(" ")
            except OSError:  # it has ended
                continue
            if int(rest.rpartition(")")[2].split()[1]) == self._process.pid:
                self._init = int(pid)
        return bool(self._init) and self.run("cat", "/proc/1/comm", check=False) == "bash\n"

    def enter(self, *namespaces: str) -> list[str]:
        """The prefix of a command that is to run in some of its namespaces."""
        return ["nsenter", f"--target={self._init}", *(f"--{name}" for name in namespaces)]

    def command(self, *args: str, cwd: Path = Path("/")) -> list[str]:
        """A command on this host, as one of this machine."""
        return [*self.enter("net", "uts", "mount", "pid"), "env", "-C", str(cwd), *args]

    def run(self, *args: str, check: bool = True, cwd: Path = Path("/"), **env: str) -> str:
        """Runs a command on this host. AssertionError: it failed."""
        done = subprocess.run(
            self.command(*args, cwd=cwd), env={**os.environ, **env}, capture_output=True, text=True,
            timeout=_COMMAND_S,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{self.name}: {' '.join(args)}: {done.stderr}"
        return done.stdout

    def connect(self) -> None:
        """Connects its network to the bridge of the controller."""
        assert self._controller is not None
        link = ["ip", "link", "add", self.name, "type", "veth", "peer", "name", "eth0"]
        net = self._controller.enter("net")
        for command in (
            [*net, *link, "netns", str(self._init)],
            [*net, "ip", "link", "set", self.name, "master", "bridge", "up"],
            [*self.enter("net"), "ip", "address", "add", f"{self.address}/24", "dev", "eth0"],
            [*self.enter("net"), "ip", "link", "set", "eth0", "up"],
        ):
            subprocess.run(command, check=True, capture_output=True, timeout=_COMMAND_S)

    def start(self, *args: str) -> None:
        """Starts a daemon, which ends with this host."""
        nothing = subprocess.DEVNULL  # it has a log of its own
        command = self.command("setsid", "--fork", *args)
        subprocess.run(command, check=True, stdin=nothing, stdout=nothing, stderr=nothing, timeout=_COMMAND_S)

    def pids(self, pattern: str) -> list[int]:
        """The processes of this host whose command line matches, as this host numbers them."""
        return [int(pid) for pid in self.run("pgrep", "--full", pattern, check=False).split()]

    def kill(self, pattern: str) -> None:
        """Kills processes of this host by SIGKILL."""
        pids = self.pids(pattern)
        assert pids, f"no process of {self.name} matches {pattern}"
        self.run("kill", "-KILL", *map(str, pids))

    def close(self) -> None:
        """Ends all of its processes, and removes its network."""
        self._process.send_signal(
            signal.SIGKILL
        )  # --kill-child: its first process is killed, and so all others
        self._process.wait()


class Cluster:
    """Slurm on nodes of 8 CPUs and 2 GPUs, which are only counted. Leaving the `with` block ends all of it.

    Args:
        folder: for its files; all nodes see it.
        nodes: how many nodes it has: node1, node2, …
    """

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        self.nodes: dict[str, Machine] = {}
        self._names = [f"node{number + 1}" for number in range(nodes)]
        addresses = {"controller": f"{_NETWORK}.1"}
        addresses |= {name: f"{_NETWORK}.{number + 2}" for number, name in enumerate(self._names)}
        self._addresses = addresses
        hosts = "".join(f"{address} {name}\n" for name, address in addresses.items())
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        databases = ("passwd", "group", "shadow", "hosts", "services", "protocols")
        (folder / "nsswitch.conf").write_text("".join(f"{name}: files\n" for name in databases))
        self.conf = folder / "slurm.conf"
        self.conf.write_text(_CONF.format(network=_NETWORK, folder=folder, nodes=nodes, cpus=CPUS))
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
        (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o600)

    def __enter__(self) -> Cluster:
        os.environ["PATH"] += ":/usr/sbin:/sbin"
        self.controller = Machine("controller", self._addresses["controller"], self.folder)
        try:
            self._start()
        except BaseException:
            self.controller.close()
            raise
        return self

    def _start(self) -> None:
        for command in (
            ("ip", "link", "add", "bridge", "type", "bridge"),
            ("ip", "address", "add", f"{self.controller.address}/24", "dev", "bridge"),
            ("ip", "link", "set", "bridge", "up"),
        ):
            self.controller.run(*command)
        files = {
            "key-file": "key",
            "socket": "socket",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        options = [f"--{option}={self.folder}/munge.{name}" for option, name in files.items()]
        self.controller.start("munged", "--force", "--foreground", *options)
        wait_for("munged serves", (self.folder / "munge.socket").exists, _START_S)
        self.controller.start("slurmctld", "-D", "-f", str(self.conf))
        for name in self._names:
            self.boot(name)
        for name in self._names:
            self.wait_for_node(name)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.controller.close()
        for node in self.nodes.values():
            node.close()

    def boot(self, name: str) -> Machine:
        """Starts a node, which may have failed before."""
        node = self.nodes[name] = Machine(name, self._addresses[name], self.folder, self.controller)
        node.connect()
        node.start("slurmd", "-D", "-N", name, "-f", str(self.conf))
        return node

    def fail(self, name: str) -> None:
        """Ends a node as a power failure does."""
        self.nodes[name].close()

    def wait_for_node(self, name: str) -> None:
        wait_for(
            f"{name} is idle", lambda: self.slurm("sinfo", "-hn", name, "-o", "%T").strip() == "idle", 90.0
        )

    def slurm(self, *args: str, cwd: Path = Path("/"), **env: str) -> str:
        """Runs one of Slurm's commands on the controller. AssertionError: it failed."""
        return self.controller.run(*args, cwd=cwd, SLURM_CONF=str(self.conf), **env)

    def jobs(self, *options: str) -> dict[str, Sequence[str]]:
        """State, nodes and reason of all jobs, by id: an element of an array is `JOB_INDEX`."""
        shown = self.slurm(
            "squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%N|%r", *options
        )
        return {line.split("|")[0]: line.split("|")[1:] for line in shown.splitlines()}
