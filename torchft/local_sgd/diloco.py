"""DiLoCo and its streamed form: the schedule by which the fragments of a model are synchronized."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real
from typing import TYPE_CHECKING, List, NamedTuple, Optional

import torch
from torch import nn, optim

from torchft.local_sgd.buckets import bucket_bytes
from torchft.local_sgd.fragment import Fragment
from torchft.local_sgd.inner_steps import InnerSteps, whole

if TYPE_CHECKING:
    from torchft.manager import Manager


class FragmentDue(NamedTuple):
    """The actions after an inner step."""

    start: bool
    finish: bool


def due(local_step: int, period: int, delay: int, in_flight: bool) -> FragmentDue:
    """Decides whether a synchronization starts now, and whether one ends.

    The counts are compared by "at least", not "equal": a synchronization that could not start, because there
    was no quorum, starts after a later step.

    Args:
        local_step: inner steps since the last synchronization ended.
        period: inner steps from the end of one synchronization to the end of the next.
        delay: inner steps from the start of a synchronization to its end.
        in_flight: whether a synchronization has started and not ended.
    """
    start = not in_flight and local_step >= period - delay
    return FragmentDue(start, finish=(start or in_flight) and local_step >= period)


class DiLoCo(InnerSteps):
    """Every group trains on its own. Fragment by fragment, an outer optimizer applies the average of the
    groups' changes.

    The algorithm is that of Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language
    Models", 2023 (arXiv:2311.08105), with fragments, delay and mixing of Douillard et al., "Streaming DiLoCo
    with overlapping communication", 2025 (arXiv:2501.18512). A synchronization is a step of the Manager. Step
    s synchronizes fragment ``s mod n``, so all groups have the same order, including a group that joins. If a
    synchronization fails, the fragment gets its last global parameters back, and the next synchronization is
    of the same fragment.

        with DiLoCo(manager, [model], inner_optimizer=adamw, outer_optimizer=sgd, sync_every=100):
            for batch in data:
                adamw.zero_grad()
                loss(model(batch)).backward()
                adamw.step()

    Args:
        manager: the Manager of this rank, with ``use_async_quorum=False``; its state functions must cover the
            model and the inner optimizer; DiLoCo adds its own state.
        model_fragments: the parts of the model; a parameter belongs to at most one.
        inner_optimizer: its steps are counted.
        outer_optimizer: over all fragments, or a list with one for each. The papers' is SGD with Nesterov
            momentum of 0.9.
        sync_every: inner steps in which every fragment is synchronized once; a multiple of the number of
            fragments.
        backup_device: device of the copy of the last global parameters; default: the CPU.
        pin_memory: whether that copy is in pinned memory, if the model is not on the backup device.
        use_bucketization: concatenate parameters before they are sent; TORCHFT_USE_BUCKETIZATION=True does
            the same. Must be equal in all groups.
        bucket_cap_mb: size of a piece in MiB; default: 1024.
        should_quantize: send 8 bits per value.
        fragment_sync_delay: inner steps that run while a fragment is being averaged; less than
            ``sync_every / len(model_fragments)``.
        fragment_update_alpha: 0 to 1. A group continues with the mean of its own parameters, which have this
            weight, and the new global parameters.

    Raises:
        ValueError: an argument has a wrong type or is out of range, fragments and outer optimizers do not
            fit, or a parameter that is to be quantized cannot be.
    """

    def __init__(
        self,
        manager: Manager,
        model_fragments: List[nn.Module],
        inner_optimizer: optim.Optimizer,
        outer_optimizer: optim.Optimizer | list[optim.Optimizer],
        sync_every: int,
        backup_device: Optional[torch.device] = None,
        pin_memory: bool = True,
        use_bucketization: bool = False,
        bucket_cap_mb: Optional[int] = None,
        should_quantize: bool = False,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
    ) -> None:
        if manager._use_async_quorum:
            raise ValueError(
                "manager: DiLoCo needs a synchronous quorum, make the Manager with use_async_quorum=False"
            )
        modules = _modules(model_fragments)
        sync_every = whole("sync_every", sync_every)
        fragment_sync_delay = whole("fragment_sync_delay", fragment_sync_delay)
        _check_schedule(len(modules), sync_every, fragment_sync_delay, fragment_update_alpha)
        optimizers = _optimizer_of_each(outer_optimizer, len(modules))
        super().__init__(manager, inner_optimizer, "inner_optimizer")
        self._sync_every = sync_every
        self._fragment_sync_delay = fragment_sync_delay
        self._local_step = 0
        self._in_flight: Optional[Fragment] = None
        cap = bucket_bytes(use_bucketization, bucket_cap_mb)
        device = _backup_device(backup_device)
        self._fragments = [
            Fragment(
                f"model_fragments[{i}]",
                module,
                optimizer,
                manager,
                backup_device=device,
                pin_memory=pin_memory,
                bucket_bytes=cap,
                should_quantize=should_quantize,
                free_gradients=fragment_sync_delay == 0,
                alpha=fragment_update_alpha,
            )
            for i, (module, optimizer) in enumerate(zip(modules, optimizers))
        ]
        _check_parameters(self._fragments, optimizers)
        how = f"in pieces of {cap} bytes" if cap else "each parameter for itself"
        manager.register_layout(
            "DiLoCo", [f"sends {how}, {'quantized' if should_quantize else 'not quantized'}"]
        )
        for i, fragment in enumerate(self._fragments):
            manager.register_layout(fragment.name, fragment.layout())
            manager.register_state_dict_fn(
                f"StreamingDiLoCoFragment_{i}", fragment.load_state_dict, fragment.state_dict
            )

    def restore_global_parameters(self) -> None:
        """Copies the last global parameters of all fragments into the model.

        The parameters in training differ between groups, the global ones are equal. So call this before an
        evaluation and at the end of the training.
        """
        for fragment in self._fragments:
            fragment.restore()

    def synchronize(self) -> None:
        self._start()
        if self._fragment_sync_delay and self._manager.current_step() > 0:
            # A group that joins: the others take inner steps until this average arrives, so it does, too.
            self._local_step = self._sync_every // len(self._fragments) - self._fragment_sync_delay
        else:
            self._finish()

    def _after_step(self) -> None:
        self._local_step += 1
        period = self._sync_every // len(self._fragments)
        now = due(self._local_step, period, self._fragment_sync_delay, self._in_flight is not None)
        if now.start:
            self._start()
        if now.finish:
            self._finish()

    def _start(self) -> None:
        # When this returns, a group that was behind has healed and knows the step.
        self._manager.start_quorum()
        for fragment in self._fragments:
            if fragment.refused is not None:
                self._manager.report_error(fragment.refused)
                raise fragment.refused
        fragment = self._fragments[self._manager.current_step() % len(self._fragments)]
        fragment.start()
        self._in_flight = fragment
        if self._fragment_sync_delay:
            # the next inner step changes memory that a healing group may still be reading
            self._manager.finish_serving()

    def _finish(self) -> None:
        fragment, self._in_flight = self._in_flight, None
        assert fragment is not None
        self._local_step = 0
        try:
            fragment.wait()
            committed = self._manager.should_commit()
        except BaseException:
            fragment.abort()
            raise
        if not committed:
            fragment.abort()
            return
        if problem := fragment.nonfinite():
            self._count_nonfinite(problem)
        fragment.commit()


def _modules(given: Iterable[nn.Module]) -> list[nn.Module]:
    if not isinstance(given, Iterable):
        raise ValueError(f"model_fragments is a {type(given).__name__}: allowed are lists of modules")
    modules = list(given)
    for i, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise ValueError(f"model_fragments[{i}]={module!r}: allowed are lists of modules")
    return modules


def _backup_device(given: Optional[torch.device]) -> torch.device:
    try:
        return torch.device("cpu" if given is None else given)
    except (RuntimeError, TypeError) as e:
        raise ValueError(f"backup_device={given!r}: {e}") from e


def _check_schedule(fragments: int, sync_every: int, delay: int, alpha: float) -> None:
    if fragments == 0:
        raise ValueError("model_fragments=[]: allowed are 1 fragment and more")
    if sync_every < fragments:
        raise ValueError(
            f"sync_every={sync_every} with {fragments} model_fragments: allowed are {fragments} and more, "
            "as one fragment is synchronized at a time"
        )
    if sync_every % fragments:
        raise ValueError(
            f"sync_every={sync_every} with {fragments} model_fragments: allowed are multiples of {fragments}"
        )
    period = sync_every // fragments
    if not 0 <= delay < period:
        raise ValueError(
            f"fragment_sync_delay={delay}: allowed are 0 to {period - 1}, less than sync_every / "
            "len(model_fragments), as a fragment must have arrived before the next is sent"
        )
    if not isinstance(alpha, Real) or not 0 <= alpha <= 1:
        raise ValueError(f"fragment_update_alpha={alpha!r}: allowed are 0 to 1")


def _optimizer_of_each(
    given: optim.Optimizer | list[optim.Optimizer], fragments: int
) -> list[optim.Optimizer]:
    if not all(hasattr(one, "param_groups") for one in (given if isinstance(given, list) else [given])):
        raise ValueError(
            f"outer_optimizer={given!r}: allowed are an optimizer, or a list with one for each fragment"
        )
    if not isinstance(given, list):
        return [given] * fragments
    if len(given) != fragments:
        raise ValueError(
            f"outer_optimizer has {len(given)} optimizers for {fragments} model_fragments: allowed are one "
            "for each, or a single one for all (not in a list)"
        )
    return given


def _check_parameters(fragments: list[Fragment], optimizers: list[optim.Optimizer]) -> None:
    owner: dict[int, str] = {}
    for fragment, optimizer in zip(fragments, optimizers):
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in fragment.parameters.items():
            if other := owner.get(id(parameter)):
                raise ValueError(
                    f"{fragment.name}: parameter {name!r} belongs to {other} too; put modules that share "
                    "parameters into one fragment"
                )
            owner[id(parameter)] = fragment.name
            if parameter.requires_grad and id(parameter) not in stepped:
                raise ValueError(
                    f"outer_optimizer of {fragment.name} lacks parameter {name!r}: it would never be trained"
                )
