"""Runs a job with an ElasticDataLoader, kills and restarts its groups, and checks its weights and counted
samples.
"""

from __future__ import annotations

import json
import random
import re
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import loader_streams
import torch
from causes import SILENCE_MS
from loader_model import one_process, plan
from processes import HERE, START_TIMEOUT_S, Child, Job, free_port, ours_path

from torchft.data.position import DataPosition

# The points of a step at which a rank kills itself; see loader_worker.py.
PLACES = ("begin", "units", "reduce", "commit", "stepped")
# Between two reductions. At the places before, the others may not have begun the step if the quorum stands.
BETWEEN = ("between",)
# A random moment of a step and the one after it.
MOMENT = ("moment",)
# More places, at which a rank does not kill itself: its dataset raises, a worker process of its DataLoader is
# killed, or its gradients are wrong. It then ends with an error, and its log contains the pattern given here.
ERRORS = {
    "dataset": r"ReadFailed: unit \d+ of batch \d+ of epoch \d could not be read: OSError: the disk",
    # PyTorch's message about the killed worker process, or the error when the rank reads that process's data.
    "worker": r"DataLoader worker \(pid\(?s?\)? \d+\) (is killed|exited)"
    r"|ReadFailed: unit .* could not be read: Conn",
    "corrupt": r"CorruptedGradient: step \d+, .* is not that of most groups",
}


_AGAIN = "comes again without the"


@dataclass(frozen=True)
class Part:
    """A range of a job's steps.

    Attributes:
        groups: number of groups when it begins.
        kills: number of groups that are killed in it.
        restored: whether all groups begin with a checkpoint of the previous part, in new processes.
    """

    groups: int
    kills: int = 0
    restored: bool = False


@dataclass
class Elastic:
    """Runs the parts one after another, each with the same number of steps. The seed determines which groups
    are killed in a part, and at which points.
    """

    folder: Path
    parts: list[Part]
    samples: int
    kind: str = "ddp"
    ranks: int = 1  # ranks in each group
    reproducible: bool = False
    bf16: bool = False  # whether FSDP2 computes in bfloat16, and reduces in float32
    replays: bool = False  # replay_failed_step
    heal: str = "auto"  # as of the Manager
    audit: float = 0.0  # as of the Manager
    # The kind of stream that the dataset is, if any: see loader_streams.py. It has about `samples` samples
    # then, and the groups have different numbers of worker processes.
    stream: str = ""
    device: str = "cpu"  # "late": the test accelerator, for groups that shard the model
    seed: int = 0
    places: tuple[str, ...] = PLACES
    killed: int = 0  # number of groups that were killed by an order, in all parts
    # The processes of each running group, by its number.
    living: dict[int, list[Child]] = field(default_factory=dict)
    # how often a group kept its gradients of a step
    came_again: int = 0
    in_passing: int = 0  # number of steps in which a rank had a part of the others' state
    started: int = 0  # number of groups that were started, in all parts
    new: list[int] = field(default_factory=list)  # groups that were started for this part

    def run(self) -> None:
        """Runs the job and checks its result.

        Raises:
            AssertionError: the final weights differ from those of training in one process, or a sample was
                not counted exactly once in each epoch.
        """
        if self.stream:
            self.expected, self.batches = loader_streams.one_process(self.stream, self.samples)
        else:
            self.expected = one_process(self.samples, self.reproducible, self.bf16)
            self.batches = _batches(self.samples)
        steps = len(self.batches)
        random_ = random.Random(self.seed)
        with Job() as self.job:
            _, self.lighthouse = self.job.lighthouse(
                ours_path(), min_replicas=1, join_timeout_ms=60000, heartbeat_timeout_ms=SILENCE_MS
            )
            for number, part in enumerate(self.parts):
                begin, until = steps * number // len(self.parts), steps * (number + 1) // len(self.parts)
                last = number + 1 == len(self.parts)
                self._bring(part, begin)
                # In the last part the limit is never reached: the groups end with the last epoch, and do not
                # pause.
                orders = {group: {"until": until + last} for group in self.living}
                victims = random_.sample(sorted(self.living), part.kills)
                old = self.living.keys() - set(self.new)
                if old and old.issubset(victims):
                    victims = self.new[: part.kills]  # perhaps not healed when the last old one ends
                for victim in victims:
                    orders[victim] |= {"fail_at": random_.randrange(begin + 1, until - 1)}
                    orders[victim] |= {"place": random_.choice(self.places)}
                self._train(orders, until, last)
            self.came_again = sum(child.log().count(_AGAIN) for child in self.job.children)
            self.in_passing = sum(len(child.of("in_passing")) for child in self.job.children)
        self._check()

    def _bring(self, part: Part, begin: int) -> None:
        """Starts groups until the part, which begins at step `begin`, has all of its groups."""
        restore = ""
        if part.restored:
            restore = str(self.folder / f"{self.started}.checkpoint")
            # Works only with one rank in each group: then one process has the loader's whole state. A group
            # that still heals may have paused before an earlier part, and has not trained up to this one.
            source = next(child for (child,) in self.living.values() if _paused_at(child, begin))
            source.send(save=restore)
            self.job.wait(lambda: source.of("saved"), 30, "a checkpoint")
            for group in list(self.living):
                self._kill(group)
        self.new = [group for group in range(part.groups) if group not in self.living]
        # The number of a running group may be outside this range. Then not all unused numbers are needed.
        del self.new[max(0, part.groups - len(self.living)) :]
        for group in self.new:
            self.living[group] = self._start(group, restore)
        new = [child for group in self.new for child in self.living[group]]
        self.job.wait(lambda: all(child.of("paused") for child in new), START_TIMEOUT_S, "groups are ready")

    def _start(self, group: int, restore: str) -> list[Child]:
        env = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(self.ranks)}
        env["TORCHFT_REPLAY_FAILED_STEP"] = str(int(self.replays))
        children = []
        for rank in range(self.ranks):
            options = {
                "group": group,
                "lighthouse": self.lighthouse,
                "kind": self.kind,
                "reproducible": int(self.reproducible),
                "bf16": int(self.bf16),
                "device": self.device,
                "heal": self.heal,
                "audit": self.audit,
                "stream": self.stream,
                "samples": self.samples,
                # Each group begins with different weights, so that a missing heal changes the result. If
                # groups have several ranks, those started before the first kill begin with equal weights: at
                # step 0, ranks of the same group may take over weights from different groups.
                "seed": self.started if self.killed or self.ranks == 1 else 0,
                "log": self.folder / f"{self.started}-{rank}.log",
                "weights": self.folder / f"{self.started}-{rank}.weights",
                "restore": restore,
                "num_workers": self.started % 3 if self.stream else int("worker" in self.places),
            }
            arguments = [f"--{name}={value}" for name, value in options.items()]
            script = Path(HERE) / "loader_worker.py"
            children.append(
                self.job.python(
                    f"group{group}-{rank}",
                    script,
                    *arguments,
                    path=ours_path(),
                    env={**env, "RANK": str(rank)},
                )
            )
        self.started += 1
        return children

    def _train(self, orders: dict[int, dict[str, object]], until: int, last: bool) -> None:
        victims = [group for group, order in orders.items() if "place" in order]
        for children in (children for group, children in self.living.items() if group in victims):
            for child in children:
                child.expected_to_live = False
        self._send(orders, self.new)
        if len(self.new) < len(orders):
            # The quorum that the running groups request next includes only those new groups that have
            # requested it already.
            self.job.wait(lambda: self._waiting().issuperset(self.new), 30, "new groups request a quorum")
            self._send(orders, [group for group in orders if group not in self.new])
        for group in list(victims):
            victim = self.living[group][-1]
            self.job.wait(lambda victim=victim: victim.returncode is not None, 60, f"group {group} is killed")
            failed = orders[group]["place"] in ERRORS
            assert victim.returncode == (1 if failed else -9), self.job.report()
            assert not failed or re.search(ERRORS[str(orders[group]["place"])], victim.log_tail(30)), (
                self.job.report()
            )
            self._kill(group)
            self.killed += 1
        rest = [child for children in self.living.values() for child in children]
        if last:
            self.job.wait_exit(rest, 120)
            self.ended = [child.name for child in rest]
        else:
            # Waits for one group only: a group that still heals may not reach the end of the part, because
            # its next quorum waits for the paused groups, which request none. It may reach the end of this
            # part only after the next one has begun, so the step of the pause counts.
            self.job.wait(lambda: any(_paused_at(child, until) for child in rest), 120, "the end of a part")

    def _send(self, orders: dict[int, dict[str, object]], groups: list[int]) -> None:
        for group in groups:
            for rank, child in enumerate(self.living[group]):
                # Only the last rank of a group is ordered to fail. The other ranks cannot continue without
                # it: they fail too, or wait for it until _train kills them.
                child.send(**(orders[group] if rank + 1 == self.ranks else {"until": orders[group]["until"]}))

    def _waiting(self) -> set[int]:
        """The groups that request a quorum: also an old one that has lost the last step of a part."""
        with urllib.request.urlopen(f"{self.lighthouse}/status", timeout=20) as answer:
            members = json.load(answer)["members"]
        waiting = (member["replica_id"] for member in members if member["waiting"])
        return {int(name.partition(":")[0].removeprefix("loader_")) for name in waiting}

    def _kill(self, group: int) -> None:
        for child in self.living.pop(group):
            child.kill()

    def _check(self) -> None:
        ended = [torch.load(path) for path in sorted(self.folder.glob("*.weights"))]
        assert len(ended) == len(self.ended)
        for end in ended:
            assert end["history"] == ended[0]["history"]
            for name, value in self.expected.items():
                if self.reproducible:
                    assert torch.equal(end["weights"][name], value), name
                torch.testing.assert_close(
                    end["weights"][name], value, rtol=0, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}"
                )
        trained: dict[tuple[int, int, int], Counter[int]] = {}
        for path in self.folder.glob("*.log"):
            for line in path.read_text().splitlines():
                epoch, batch, quorum, indices = json.loads(line)
                trained.setdefault((epoch, batch, quorum), Counter()).update(indices)
        # The history names the quorum in which each step was committed. Samples that were logged in another
        # quorum do not count: their attempt was not committed, or only by a group that then failed.
        for quorum, (epoch, batch, indices) in zip(ended[0]["history"], self.batches, strict=True):
            assert trained[epoch, batch, quorum] == indices, f"batch {batch} of {epoch} in quorum {quorum}"


def _batches(samples: int) -> list[loader_streams.Batch]:
    """What is in each batch of a dataset with indices: each sample once an epoch."""
    steps, position = plan(samples), DataPosition()
    batches, epochs = list[loader_streams.Batch](), [Counter[int]() for _ in range(steps.epochs)]
    while position != steps.end:
        units = steps.share(position, 0, 1).units
        batch = Counter(index for unit in units for index in unit.indices)
        batches.append((position.epoch, position.batch, batch))
        epochs[position.epoch].update(batch)
        position = steps.advance(position)
    assert all(epoch == Counter(range(samples)) for epoch in epochs)
    return batches


def _paused_at(child: Child, step: int) -> bool:
    """Whether the child's last pause was at this step."""
    pauses = child.of("paused")
    return bool(pauses) and pauses[-1]["step"] == step
