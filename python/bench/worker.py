"""One rank of a replica group, with the torchft that is on PYTHONPATH, or with plain PyTorch. See
`common.py`.

Commands arrive on stdin. The answer to each is an event of the same name, with measured times in
milliseconds.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "process"))

import started
import torch
import torch.distributed as dist
from events import Commands, emit
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
GROUP = int(os.environ["REPLICA_GROUP_ID"])
TIMEOUT = timedelta(seconds=30)

IMPORTED = time.monotonic()


class Noise(Dataset[torch.Tensor]):
    """Random samples of 768 numbers, each computed in some microseconds."""

    def __len__(self) -> int:
        return 200_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(768, generator=torch.Generator().manual_seed(index))


class NoiseStream(IterableDataset[torch.Tensor]):
    """The same samples as a stream of 16 shards. By itself it is cut by worker process, as PyTorch asks."""

    num_shards = 16

    def __init__(self, shards: list[int]) -> None:
        self.shards = shards

    def shard(self, num_shards: int, index: int) -> NoiseStream:
        return NoiseStream(self.shards[index::num_shards])

    def __iter__(self) -> Iterator[torch.Tensor]:
        info, noise = get_worker_info(), Noise()
        shards = self.shards if info is None else self.shards[info.id :: info.num_workers]
        for shard in shards:
            yield from (noise[index] for index in range(shard, len(noise), self.num_shards))


def _resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _taken() -> float:
    """Return for how many seconds the host of this virtual machine has run others on its processors, on
    average.
    """
    with open("/proc/stat") as file:
        ticks = int(file.readline().split()[8])
    return ticks / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)


def _products(factor: torch.Tensor, ms: float) -> int:
    """Return how many matrix products take `ms` milliseconds at this moment."""
    if factor.is_cuda:
        torch.mm(factor.T, factor)  # loads the kernel
        torch.cuda.synchronize()
    begin = time.monotonic()
    for _ in range(100):
        torch.mm(factor.T, factor)
    if factor.is_cuda:
        torch.cuda.synchronize()
    return round(100 * ms / 1000 / (time.monotonic() - begin))


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Worker:
    def __init__(self) -> None:
        self.commands = Commands()
        self.group_store: dist.TCPStore | None = None
        self.manager: Any = None
        self.tensor = torch.ones(10_000)
        self.state: list[torch.Tensor] = []
        self.loaded_at = 0.0
        self.told = False  # whether the parent has sent stop

    def serve(self) -> None:
        emit("imported")
        while True:
            command = self.commands.next()
            do = command.pop("do")
            answer = getattr(self, f"do_{do}")(**command)
            emit(do, **(answer or {}))

    # Setup

    def do_state(self, mb: int) -> None:
        """Make the state that heals: `mb` tensors of 1 MB, with different values in each group."""
        torch.manual_seed(GROUP)
        self.state = []  # frees the previous state first, because two large ones do not fit into memory
        first = torch.randn(250_000)
        self.state = [first + i for i in range(mb)]

    def do_adam(
        self, mb: int, trained: bool, fused: bool = False, device: str = "cpu", sharded: bool = False
    ) -> dict[str, Any]:
        """Make the state of a model with Adam, `mb` MB in all, if `sharded` by FSDP2 over the group's ranks.
        Without `trained`, Adam has no state yet.
        """
        from torchft import Manager, ProcessGroupGloo  # noqa: F401  as in a script, imported before the model is made

        torch.manual_seed(GROUP)
        width = 2048 if mb >= 500 else 512
        layers = [nn.Linear(width, width) for _ in range(mb * 1_000_000 // (3 * 4 * width * width))]
        self.model = nn.Sequential(*layers).to(device)
        if sharded:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            dist.init_process_group("gloo", store=self._store(), rank=RANK, world_size=WORLD_SIZE)
            fully_shard(self.model, mesh=init_device_mesh(device, (WORLD_SIZE,)))
        self.optimizer = adam = optim.Adam(self.model.parameters(), lr=1e-3, fused=fused)
        if trained:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            adam.step()
            adam.zero_grad()
        self.state = []
        self._save = lambda: {"model": self.model.state_dict(), "adam": adam.state_dict()}
        self._load = self._load_adam
        return {"bytes": 3 * sum(p.nbytes for p in self.model.parameters())}

    def _load_adam(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["adam"])
        self.loaded_at = time.monotonic()

    def do_manager(self, lighthouse: str, kind: str = "gloo", **settings: Any) -> None:
        from torchft import Manager, ProcessGroupGloo
        from torchft.process_group import ProcessGroupBabyGloo, ProcessGroupBabyNCCL, ProcessGroupNCCL

        groups: dict[str, Any] = {
            "gloo": ProcessGroupGloo,
            "isolated": ProcessGroupBabyGloo,
            "nccl": ProcessGroupNCCL,
            "isolated nccl": ProcessGroupBabyNCCL,
        }
        if "nccl" in kind:
            self.tensor = self.tensor.cuda()
        self._store()
        self.manager = Manager(
            pg=groups[kind](timeout=TIMEOUT),
            load_state_dict=self._load,
            state_dict=self._save,
            min_replica_size=1,
            lighthouse_addr=lighthouse,
            replica_id=f"bench_{GROUP}",
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,
            connect_timeout=TIMEOUT,
            **settings,
        )

    def _store(self) -> dist.TCPStore:
        """Return the group's store, which rank 0 hosts for all its incarnations, as torchrun's agent does."""
        if self.group_store is None:
            port = int(os.environ["MASTER_PORT"])
            self.group_store = dist.TCPStore("localhost", port, is_master=RANK == 0, wait_for_workers=False)
        return self.group_store

    def do_peers(self) -> None:
        """Make a plain Gloo group with the same rank of the other replica group."""
        port = int(os.environ["PEERS_PORT"])
        self.peers_store = store = dist.TCPStore(
            "localhost", port, is_master=GROUP == 0 and RANK == 0, wait_for_workers=False
        )
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(f"rank{RANK}", store), rank=GROUP, world_size=2, timeout=TIMEOUT
        )

    def do_leave(self) -> None:
        self.manager.shutdown()

    # gpu_job.py

    def do_world(self, backend: str) -> None:
        """Make this group's own world, as FSDP has one, and use it once."""
        import torchft.process_group  # noqa: F401  as in a script, imported before the world is made

        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=RANK, world_size=WORLD_SIZE, timeout=TIMEOUT)
        tensor = self.tensor.cuda() if backend == "nccl" else self.tensor
        dist.all_reduce(tensor)

    def do_quantized(self, count: int, floats: int, device: str) -> dict[str, Any]:
        """Run `count` steps with a quantized allreduce. Return the memory that PyTorch's allocator then has,
        in MB.
        """
        tensor, failed = torch.ones(floats, device=device), 0
        for _ in range(count):
            self.manager.start_quorum()
            self.manager.allreduce(tensor, should_quantize=True).wait()
            failed += not self.manager.should_commit()
        return {
            "reserved_mb": torch.cuda.memory_reserved() / 1e6 if tensor.is_cuda else 0.0,
            "failed": failed,
        }

    # step.py

    def do_tensor(self, floats: int) -> None:
        """Reduce `floats` floats in each of the following steps."""
        self.tensor = torch.ones(floats)

    def do_compared(self) -> None:
        """Compare the model of `do_adam` with the other group's, if TORCHFT_COMPARE_COMMITS says so."""
        from torchft import Optimizer

        Optimizer(self.manager, self.optimizer)
        self.manager.register_replicated(self.model.named_parameters)

    def do_sweep(self) -> dict[str, Any]:
        """Return the number of commits in which all of the state is compared once."""
        return {"commits": self.manager._replicas.commits}

    def do_steps(self, count: int) -> dict[str, Any]:
        """Run `count` steps of a torchft job that computes nothing."""
        parts: dict[str, list[float]] = {"step": [], "start_quorum": [], "allreduce": [], "should_commit": []}
        failed = 0
        cpu = time.process_time()
        for _ in range(count):
            t0 = time.perf_counter()
            self.manager.start_quorum()
            t1 = time.perf_counter()
            self.manager.allreduce(self.tensor).wait()
            t2 = time.perf_counter()
            failed += not self.manager.should_commit()
            t3 = time.perf_counter()
            for name, seconds in zip(parts, (t3 - t0, t1 - t0, t2 - t1, t3 - t2)):
                parts[name].append(1000 * seconds)
        cpu = 1000 * (time.process_time() - cpu) / count  # of all threads of this process
        return {**parts, "cpu": cpu, "failed": failed, "participants": self.manager.num_participants()}

    def do_plain_steps(self, count: int) -> dict[str, Any]:
        """Run `count` allreduces of plain PyTorch."""
        times = []
        cpu = time.process_time()
        for _ in range(count):
            t0 = time.perf_counter()
            dist.all_reduce(self.tensor)
            times.append(1000 * (time.perf_counter() - t0))
        return {"step": times, "cpu": 1000 * (time.process_time() - cpu) / count}

    # throughput.py

    def do_model(self, plain: bool, settings: dict[str, Any]) -> dict[str, Any]:
        """Wrap a model of 4.7 million parameters in plain or in torchft's DistributedDataParallel."""
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
        torch.manual_seed(0)
        model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(768, 768), nn.ReLU())])
        sgd = optim.SGD(model.parameters(), lr=1e-3)
        if plain:
            self.model = nn.parallel.DistributedDataParallel(model, **settings)
            self.optimizer = sgd
        else:
            from torchft import DistributedDataParallel, Optimizer

            self.model = DistributedDataParallel(self.manager, model, **settings)
            self.optimizer = Optimizer(self.manager, sgd)
        return {"parameters": sum(p.numel() for p in model.parameters())}

    def do_train(self, count: int, batch: int) -> dict[str, Any]:
        """Train `count` steps, and measure each including its optimizer step."""
        x = torch.randn(batch, 768)
        first = self.manager.current_step() if self.manager else 0
        times = []
        for _ in range(count):
            t0 = time.perf_counter()
            self.optimizer.zero_grad()
            self.model(x).square().mean().backward()
            self.optimizer.step()
            times.append(1000 * (time.perf_counter() - t0))
        failed = count - (self.manager.current_step() - first) if self.manager else 0
        return {"step": times, "failed": failed}

    # loader.py

    def do_data(self, elastic: bool, batch: int, stream: bool = False) -> None:
        """Read `batch` samples per step, with two worker processes."""
        # Not with fork: a thread of this process holds the lock of stdin while it reads, and a child would
        # wait for it.
        settings: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "spawn"}
        self.elastic = elastic
        if elastic:
            from torchft.data import ElasticDataLoader

            sizes: dict[str, Any] = {"global_batch_size": 2 * batch, "micro_batch_size": batch}
            shards = list(range(NoiseStream.num_shards))
            dataset: Any = NoiseStream(shards) if stream else Noise()
            sizes["shuffle"] = not stream
            self.data = iter(ElasticDataLoader(self.manager, dataset, **sizes, **settings))
        elif stream:
            own = list(range(GROUP, NoiseStream.num_shards, 2))
            self.data = iter(DataLoader(NoiseStream(own), batch, **settings))
        else:
            sampler = DistributedSampler(Noise(), num_replicas=2, rank=GROUP)
            self.data = iter(DataLoader(Noise(), batch, sampler=sampler, **settings))

    def do_train_data(self, count: int) -> dict[str, Any]:
        """Train `count` steps on the samples of `do_data`."""
        first, times = self.manager.current_step(), []
        for _ in range(count):
            t0 = time.perf_counter()
            if self.elastic:
                step = next(self.data)
                self.optimizer.zero_grad()
                for unit in step:
                    with unit.accumulate(self.model):
                        (self.model(unit.data).square().mean() * unit.weight).backward()
            else:
                self.optimizer.zero_grad()
                self.model(next(self.data)).square().mean().backward()
            self.optimizer.step()
            times.append(1000 * (time.perf_counter() - t0))
        return {"step": times, "failed": count - (self.manager.current_step() - first)}

    # again.py, slow_group.py

    def do_units(
        self,
        sharded: bool,
        steps: int,
        units: int,
        unit_ms: float,
        fail_at: int,
        phase: str,
        width: int = 768,
    ) -> dict[str, Any]:
        """Train `steps` steps, whose `units` units all groups divide. A unit takes `unit_ms`, as if a GPU
        computed it, and two layers of `width`. End in a phase of step `fail_at`, from 0; -1: never.

        Return the time from commit to commit, and the units that this group computed in each step.
        """
        from torch.distributed.fsdp import fully_shard

        from torchft import DistributedDataParallel, Optimizer
        from torchft.data import ElasticDataLoader
        from torchft.device_mesh import ft_init_device_mesh

        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        if sharded:
            self.do_world("gloo")
            mesh = ft_init_device_mesh(
                device_type="cpu",
                mesh_shape=(1, WORLD_SIZE),
                mesh_dim_names=("replicate", "shard"),
                replicate_dim=0,
                manager=self.manager,
            )
            for layer in (model[0], model[2], model):
                fully_shard(layer, mesh=mesh)
        wrapped = model if sharded else DistributedDataParallel(self.manager, model)
        optimizer = Optimizer(self.manager, optim.SGD(model.parameters(), lr=1e-3))
        loader = ElasticDataLoader(self.manager, Noise(), global_batch_size=units, micro_batch_size=1)
        times: list[float] = []
        computed: list[list[int]] = [[]]

        def end_in(name: str) -> None:
            if name == phase and len(times) == fail_at:
                os.kill(os.getpid(), signal.SIGKILL)

        def ends(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: (call(*args, **kwargs), end_in(name))[0]

        self.manager.allreduce = ends("reduction", self.manager.allreduce)
        self.manager.should_commit = ends("vote", self.manager.should_commit)
        began = time.perf_counter()
        while len(times) < steps:
            step = next(loader)
            optimizer.zero_grad()
            computed[-1].append(len(step))
            for unit in step:
                time.sleep(unit_ms / 2000)
                end_in("last unit" if unit.last else "unit before")
                time.sleep(unit_ms / 2000)
                with unit.accumulate(wrapped):
                    (wrapped(unit.data[:, :width]).square().mean() * unit.weight).backward()
            optimizer.step()
            if step.committed:
                times.append(1000 * (time.perf_counter() - began))
                computed.append([])
                began = time.perf_counter()
        return {"step": times, "units": computed[:-1]}

    def do_ordered_steps(self, count: int, compute_ms: float, asked_first: bool) -> dict[str, Any]:
        """Run `count` steps that wait for their quorum either before they compute, or in the allreduce."""
        first, times = self.manager.current_step(), []
        for _ in range(count):
            t0 = time.perf_counter()
            self.manager.start_quorum()
            if asked_first:
                self.manager._round.answer()  # as ElasticDataLoader does
            if compute_ms:
                time.sleep(compute_ms / 1000)  # as a GPU computes
            self.manager.allreduce(self.tensor).wait()
            self.manager.should_commit()
            times.append(1000 * (time.perf_counter() - t0))
        return {"step": times, "failed": count - (self.manager.current_step() - first)}

    # heal_stall.py, recovery.py

    def do_survive(self, compute_ms: float) -> dict[str, Any]:
        """Run steps until the parent sends stop. Return when each step began and ended, in time.monotonic(),
        which all processes share.
        """
        emit("surviving")
        steps, numbers = [], []
        together = 0
        while self.commands.poll() is None:
            steps.append(self._step(compute_ms))
            numbers.append(self.manager.current_step())
            _, _, committed, participants = steps[-1]
            if committed and participants != together:
                together = participants
                emit("committed", participants=participants)
        seconds = getattr(self.manager, "recovery_seconds", dict)  # upstream does not have it
        return {"steps": steps, "numbers": numbers, "recovery": seconds()}

    def do_join(self, lighthouse: str, settle: int, compute_ms: float) -> dict[str, Any]:
        """Join a running job as a new group, heal, and run `settle` steps with it."""
        began = time.monotonic()
        self.do_manager(lighthouse)
        made = time.monotonic()
        together: list[float] = []
        first = 0.0
        while len(together) < settle:
            _, end, committed, participants = self._step(compute_ms)
            first = first or end * committed
            if committed and participants == 2:
                together.append(end)
        # The last two steps are left out, because there the survivor already waits for this group, which
        # ends.
        return {
            "began": began,
            "made": made,
            "healed": self.loaded_at,
            "committed": first,
            "settled": together[-3],
            "recovery": getattr(self.manager, "recovery_seconds", dict)(),
        }

    # heal_along.py

    def do_train_along(
        self,
        lighthouse: str,
        kind: str,
        along: Optional[bool],
        rate: int,
        compute_ms: float,
        busy: bool,
        settle: int,
    ) -> dict[str, Any]:
        """Train the model of `do_adam` until the parent sends stop or `settle` steps with two groups are
        done.

        Upstream has no setting for `along`, which is None, and no limit of the rate. `peak_mb` in the answer
        is how much memory was added to that of the model: of the device if the model is there, or else of the
        host. `steps` are begin, end, and how many seconds the host took from the processors meanwhile.
        """
        from torchft import Optimizer
        from torchft.checkpointing import HTTPTransport

        limit: dict[str, Any] = {"bandwidth_limit": rate * 1_000_000} if rate else {}
        settings: dict[str, Any] = {"checkpoint_transport": HTTPTransport(TIMEOUT, 0, **limit)}
        if along is not None:
            settings["heal_along"] = along
        self.do_manager(lighthouse, kind, **settings)
        optimizer = Optimizer(self.manager, self.optimizer)
        parameters = list(self.model.parameters())
        # A device's allocator keeps freed memory. PyTorch's for the host returns it to the kernel: steps that
        # get new pages take up to 0.4 s longer.
        kept = [[torch.zeros_like(parameter) for parameter in parameters] for _ in range(2)]
        on_device = parameters[0].is_cuda
        factor = torch.ones(4096 if on_device else 512, 512, device=parameters[0].device)
        products = _products(factor, compute_ms) if busy else 0
        if on_device:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 1e6 if on_device else _resident_mb()
        steps: list[tuple[float, float, float]] = []
        joined, together = 0.0, 0
        emit("training")
        while together < settle if settle else not self._told_to_stop():
            begin, taken = time.monotonic(), _taken()
            optimizer.zero_grad()
            for parameter, gradient in zip(parameters, kept[len(steps) % 2], strict=True):
                parameter.grad = gradient.fill_(1e-3)
            if busy:
                for _ in range(products):
                    torch.mm(factor.T, factor)
            elif compute_ms:
                time.sleep(compute_ms / 1000)  # as a GPU computes
            for work in [self.manager.allreduce(_local(parameter.grad)) for parameter in parameters]:
                work.wait()
            optimizer.step()
            steps.append((begin, time.monotonic(), _taken() - taken))
            if self.manager.is_participating() and self.manager.num_participants() == 2:
                joined = joined or steps[-1][0]
                together += 1
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
        peak = torch.cuda.max_memory_allocated() / 1e6 if on_device else host
        return {"steps": steps, "joined": joined, "peak_mb": peak - before}

    def _told_to_stop(self) -> bool:
        """Whether the parent has sent stop; all ranks of a sharded group stop at the same step."""
        stop = self.told = self.told or self.commands.poll() is not None
        if not dist.is_initialized():
            return stop
        told = torch.tensor([int(stop)])
        dist.all_reduce(told, dist.ReduceOp.MIN)
        return bool(told.item())

    # restart.py

    def do_restart(self, lighthouse: str, compute_ms: float) -> dict[str, Any]:
        """Join a running job, heal and commit. Return when each phase ended, and the duration of the heal's
        phases.
        """
        began = time.monotonic()
        import torchft  # noqa: F401
        from torchft import Manager, ProcessGroupGloo  # noqa: F401

        imported = time.monotonic()
        self.do_manager(lighthouse)
        made = time.monotonic()
        while not self._step(compute_ms)[2]:
            pass
        seconds = getattr(self.manager, "recovery_seconds", dict)  # upstream does not have it
        return {
            "process start": started.AT,
            "import torch": IMPORTED,
            "began": began,
            "import torchft": imported,
            "connect": made,
            "committed": time.monotonic(),
            "recovery": seconds(),
        }

    def _step(self, compute_ms: float) -> tuple[float, float, bool, int]:
        begin = time.monotonic()
        self.manager.start_quorum()
        if compute_ms:
            time.sleep(compute_ms / 1000)  # as a GPU computes: the processor is free meanwhile
        self.manager.allreduce(self.tensor).wait()
        committed = self.manager.should_commit()
        return begin, time.monotonic(), committed, self.manager.num_participants()

    def _save(self) -> dict[str, Any]:
        return {"state": self.state}

    def _load(self, state: dict[str, Any]) -> None:
        for mine, theirs in zip(self.state, state["state"], strict=True):
            mine.copy_(theirs)
        self.loaded_at = time.monotonic()


if __name__ == "__main__":  # upstream's isolated groups start a process that imports this file
    Worker().serve()
