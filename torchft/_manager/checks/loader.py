"""The Manager's part for an :class:`~torchft.data.ElasticDataLoader`: checks that all groups train on the
same batch.

The loader weights each loss by its samples, so gradients are added, and not divided by the number of groups.
That is correct only if each sample of the batch is in the sum once. In the first step of a quorum and of
other speeds, and in each step in which a group heals, the groups therefore reduce 24 additional bytes: the
number of samples that each of them contributes, and a digest of the settings and the position of its loader.
A group that finds a wrong sum votes against the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional, Protocol

import torch

from torchft.data.agreement import Verdict, entry, judge, step_to_announce

if TYPE_CHECKING:
    from torchft._manager.checks.layout import Layout
    from torchft._manager.quorum.plan import Planner
    from torchft._manager.settings import Settings
    from torchft._manager.step.step import Step
    from torchft._manager.step.work import _ManagedWork
    from torchft.data.position import DataPosition

# Prefix of the lines that groups with a loader announce; see layout.py.
NAME = "ElasticDataLoader"


class LocalSteps(Protocol):
    """LocalSGD or DiLoCo, as a loader sees it."""

    keeps_own_weights: bool

    @property
    def entered(self) -> bool: ...

    def synchronize(self) -> None: ...


class Loader(Protocol):
    """The methods of an ``ElasticDataLoader`` that the Manager calls; the loader documents them."""

    @property
    def position(self) -> DataPosition: ...
    @property
    def settings(self) -> list[str]: ...
    @property
    def digest(self) -> str: ...
    @property
    def is_stream(self) -> bool: ...
    @property
    def at_end(self) -> bool: ...
    def units_added(self) -> bool: ...
    def send_samples(self) -> int: ...
    def check_samples(self, counted: int, participants: int) -> None: ...
    def samples_averaged(self, counted: int) -> None: ...
    def steps_by_itself(self, local_steps: LocalSteps) -> None: ...
    def inner_step_ended(self) -> None: ...
    def verify(self) -> None: ...


class BatchDiffers(RuntimeError):
    """The groups of a quorum train on different batches, or not on all of a batch: the step is not committed.

    If their batches differ, the first group that is up to date counts as right, and groups that differ from
    it heal.
    """


class Data:
    """The Manager's part for the loader of a rank: compares the batches on which the groups of a quorum
    train, in its first step and while a group heals. It checks nothing until a loader is attached.

    With LocalSGD and DiLoCo it compares in each of their averages: the number of samples in it, and whether
    groups were at the same position when they sent it. A group heals before that, and may take inner steps
    until the average arrives.

    Args:
        layout: announces the settings that must be equal in all groups.
        planner: its ``heal_first`` is set when a loader, LocalSGD or DiLoCo is attached.
        init_sync: the Manager's argument of that name.

    Attributes:
        averages_weights: whether a step averages the weights of groups that train alone between two steps.
        adds_gradients: whether gradients are weighted by samples, so that their sum over the groups is not
            divided.
        has_loader: whether a loader is attached, so that batches are compared.
    """

    averages_weights = adds_gradients = has_loader = False

    def __init__(self, layout: Layout, planner: Planner, settings: Settings, init_sync: bool) -> None:
        self._layout = layout
        self._planner = planner
        self._reproducible, self._audits = settings.reproducible_reduction, settings.audit > 0
        self._init_sync = init_sync
        self._loader: Optional[Loader] = None
        self._local_steps: Optional[LocalSteps] = None
        self._verdict = Verdict.ALIKE  # of the last comparison, for this group
        self._whole: Optional[Step] = None  # the last step in which the gradients hold all units of this rank
        # quorum and speeds of the last step in which the comparison was begun
        self._checked: Optional[tuple[int, tuple[int, ...]]] = None
        self._compared: Optional[Step] = None  # the last step in which it was begun
        self._digest = ""  # that was sent then
        self._sums: Optional[tuple[torch.Tensor, _ManagedWork]] = None  # that were not evaluated

    # Before the first step

    def attach(self, loader: Loader, begun: bool) -> None:
        """Attaches the loader of this rank. All groups of the job must have one: it weights losses by
        samples.

        Args:
            begun: whether the first step has begun.

        Raises:
            ValueError: a setting excludes a loader, or it is attached too late.
        """
        if self._loader is not None:
            raise ValueError(f"this Manager has an {NAME} already: one loader serves all epochs of a job")
        if begun:
            raise ValueError(f"the first step has begun: make the {NAME} before, in all groups")
        if self._layout.lines is not None and self._local_steps is None:
            raise ValueError(f"tensors to average are registered already; with an {NAME} gradients are added")
        self._loader = loader
        self._choose_check()
        self._layout.add(NAME, [*loader.settings, f"reproducible_reduction={self._reproducible}"])

    def attach_local_steps(self, local_steps: LocalSteps) -> None:
        """For LocalSGD and DiLoCo: groups train alone between steps of the Manager, which average weights."""
        self._local_steps = local_steps
        self._choose_check()

    def _choose_check(self) -> None:
        """Chooses the comparison: of gradients or of weights. Loader and LocalSGD attach in either order."""
        self._planner.heal_first = self._init_sync
        self.averages_weights, self.has_loader = self._local_steps is not None, self._loader is not None
        self.adds_gradients = self.has_loader and not self.averages_weights
        if self._loader is not None and self._local_steps is not None:
            self._loader.steps_by_itself(self._local_steps)

    @property
    def own_weights(self) -> bool:
        """Whether each group has weights of its own between two averages (LocalSGD, DiLoCo)."""
        return self.averages_weights or (self._layout.lines is not None and not self.adds_gradients)

    def why_no_copies(self) -> Optional[str]:
        """Why a copy of this group's state is not one of the job; None: it is."""
        reason = "with LocalSGD and DiLoCo each group has weights of its own between two averages"
        return reason if self.own_weights else None

    @property
    def at_end(self) -> bool:
        """Whether this group has no more data."""
        return self._loader is not None and self._loader.at_end

    @property
    def cuts_by_speed(self) -> bool:
        """Whether batches are cut by the speeds of the groups. Those of a stream are not: in a new cut
        sources change owners, and a new owner may have to read its source from the begin of the epoch.
        """
        return self.adds_gradients and self._loader is not None and not self._loader.is_stream

    # What is refused

    def check_layout(self, what: str) -> None:
        """Raises a ValueError if these tensors cannot be averaged."""
        if self._reproducible:
            raise ValueError(
                f"{what}: reproducible_reduction=True is for groups that reduce in each step; choose "
                "reproducible_reduction=False"
            )
        if self.adds_gradients:
            raise ValueError(
                f"{what}: with an {NAME} gradients are added; averages are for LocalSGD and DiLoCo"
            )

    def check_step(self) -> None:
        """Raises a ValueError if no step can begin."""
        if (self._reproducible or self._audits) and self._loader is None:
            setting = "reproducible_reduction=True" if self._reproducible else "audit"
            raise ValueError(f"{setting} needs an {NAME}: make one before the first step")

    def check_sum(self, tensor: torch.Tensor) -> None:
        """Raises a ValueError if a tensor cannot be reduced within a step."""
        if self._reproducible and (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(
                f"reproducible_reduction=True: a sum of {tensor.dtype} has other bits with other groups. "
                "Gradients are reduced by unit.accumulate(model); give it all models, and reduce what is "
                "for logs after the step"
            )

    # In a step

    def usable(self, step: Step) -> bool:
        """Whether the loader can use this step for a batch: the step is not decided, and nothing has been
        reduced in it. False without a loader, and with LocalSGD and DiLoCo.
        """
        return self.adds_gradients and step.undecided and not len(step.collectives)

    def holds_units(self, step: Step) -> bool:
        """Whether a tensor that is about to be reduced may hold gradients of units. False without a loader,
        with LocalSGD and DiLoCo, and before the first unit. UnitsSkipped: this rank has left out some units.
        """
        return step.undecided and self._is_whole(step)

    def _is_whole(self, step: Step) -> bool:
        # In every step, because peers compare sample counts in the first step of a quorum only. Where weights
        # are averaged, their sample count covers all inner steps, so each missing unit is noticed.
        loader = self._loader if self.adds_gradients else None
        if loader is not None and self._whole is not step and loader.units_added():
            self._whole = step
        return self._whole is step

    def inner_step_ended(self) -> None:
        """Counts a step of this group's optimizer between two averages of LocalSGD or DiLoCo."""
        if self._loader is not None:
            self._loader.inner_step_ended()

    def compares(self, step: Step) -> bool:
        """Whether the groups still have to be compared in this step. A group that heals may load its position
        in any step of a quorum.
        """
        plan = step.plan
        if self._loader is None or plan is None or self._compared is step:
            return False
        if self.averages_weights:
            return True
        if self._loader.is_stream:  # before the first unit nothing can be counted
            return self._whole is step or self._loader.at_end
        return self._checked != (plan.quorum_id, plan.speeds) or plan.num_up_to_date < plan.replica_world_size

    def words(self, step: Step, device: torch.device) -> Optional[torch.Tensor]:
        """The tensor that all groups add up to compare their batches, before the first tensor of a quorum is
        reduced; zeros are sent in its place if this group does not participate. None if they are not compared
        now.
        """
        self._is_whole(step)
        if not self.compares(step):
            return None
        assert step.plan is not None and self._loader is not None
        self._checked, self._compared = (step.plan.quorum_id, step.plan.speeds), step
        self._digest = self._loader.digest
        return torch.tensor(
            entry(self._loader.send_samples(), self._digest), dtype=torch.int64, device=device
        )

    def sent(self, words: torch.Tensor, work: Optional[_ManagedWork]) -> None:
        """Notes the reduction of these words; None: it could not begin, and so the step has failed."""
        self._sums = (words, work) if work is not None else None

    def compares_without_reduction(self, step: Step) -> bool:
        """Whether the groups have to be compared before the vote: in a step of a stream, in which nothing was
        reduced if a group is alone.
        """
        stream = self._loader is not None and self._loader.is_stream
        return stream and step.undecided and step.error is None

    def verify(self, step: Step) -> None:
        """Compares the sums, after the collectives of the step have ended and a heal has been loaded.

        Raises:
            BatchDiffers: the step must not be committed.
            Exception: the loader itself refuses the step.
        """
        if self._loader is None:
            return
        self._compare(step, self._loader)
        if step.error is None:
            try:
                self._loader.verify()
            except Exception:
                step.collectives.abort()  # other groups may wait for a tensor that this rank did not reduce
                raise

    def _compare(self, step: Step, loader: Loader) -> None:
        sums, self._sums = self._sums, None
        self._verdict = Verdict.ALIKE
        # The comparison is evaluated after an error, too. A group at the end of its data reduces nothing
        # more, and aborts the collectives of the others. Only the comparison shows them that the positions
        # differ, and which group has to heal. A healing group with an error may not have loaded the job's
        # position, so it is not judged.
        if sums is None or not sums[1].wait() or (step.healing and step.error is not None):
            if loader.is_stream and step.error is None:
                raise BatchDiffers(
                    "the samples of the step were not counted, so the end of the epoch is unknown"
                )
            return
        counted = sums[0].tolist()
        leads = step.plan is not None and step.plan.leads
        # After a heal in this step the position is that of the job.
        digest = self._digest if self.averages_weights else loader.digest
        self._verdict = judge(
            counted, digest, participants=step.participants, leads=leads, heals=step.healing
        )
        if self._verdict is Verdict.INCOMPLETE:
            raise BatchDiffers(
                f"the sum lacks some of the {step.participants} groups that take part: one that could not "
                "heal before the step adds nothing"
            )
        if self._verdict is not Verdict.ALIKE:
            here = loader.position
            raise BatchDiffers(
                f"the {step.participants} groups that take part do not train on the same batch: this one is "
                f"at batch {here.batch} of epoch {here.epoch}, with {', '.join(loader.settings)}"
            )
        if self.averages_weights:
            loader.samples_averaged(counted[0])
        else:
            loader.check_samples(counted[0], step.participants)

    def step_to_announce(self, step: int) -> int:
        """The step that this group announces for the next quorum, after it has lost ``step``. A group with
        the wrong position announces a smaller one, so that it heals.
        """
        return step_to_announce(step, self._verdict)
