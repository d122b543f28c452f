"""LocalSGD and streaming DiLoCo, written from their papers: one process, plain loops over lists of numbers.

It uses neither torchft nor PyTorch; a model is a list of fragments, a fragment an array.

- Stich, "Local SGD Converges Fast and Communicates Little", 2018 (arXiv:1805.09767), algorithm 1: K workers
  take SGD steps; after each H of them the parameters become their mean.
- Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023
  (arXiv:2311.08105), algorithm 1: worker i goes from theta(t-1) to theta_i(t) in H inner steps; the outer
  gradient is Delta(t) = 1/k sum_i (theta(t-1) - theta_i(t)); theta(t) = OuterOpt(theta(t-1), Delta(t)),
  OuterOpt being SGD with Nesterov momentum (Sutskever et al., 2013).
- Douillard et al., "Streaming DiLoCo with overlapping communication", 2025 (arXiv:2501.18512), algorithm 2:
  fragment p is sent at its time t_p and arrives tau inner steps later; the outer step is taken from theta_p
  of its last round; each worker goes on with alpha theta_i,p + (1 - alpha) theta_p.

The papers do not define the following, so torchft does: the order of the fragments is round robin; after a
failed round the fragment gets its last global parameters back, and the round is repeated; a joining worker
starts as a copy of another one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Optional

import numpy as np

Parameters = list[np.ndarray]  # one array per fragment
# Of (worker, round, inner step of the round, parameters).
Gradient = Callable[[int, int, int, Parameters], Parameters]


@dataclass(frozen=True)
class Settings:
    """H inner steps per fragment's round (``period``), tau (``delay``), alpha, and the two learning rates."""

    fragments: int
    period: int
    delay: int = 0
    alpha: float = 0.0
    inner_lr: float = 0.05
    outer_lr: float = 0.7
    momentum: float = 0.9


@dataclass(frozen=True)
class Attempt:
    """One round.

    Attributes:
        senders: workers whose outer gradients are in the average.
        committed: whether the round is committed.
        joining: workers that start as a copy of another one (``joining[new] = old``), just before the
            sending.
        failed: workers that have failed before the end of the round.
    """

    senders: tuple[int, ...]
    committed: bool = True
    joining: dict[int, int] = field(default_factory=dict)
    failed: tuple[int, ...] = ()


class DiLoCo:
    """A job with all of its workers.

    Args:
        settings: settings of the job.
        start: the parameters that all workers begin with.
        workers: numbers of the workers.
        gradient: gradient of a worker's loss.
    """

    def __init__(self, settings: Settings, start: Parameters, workers: list[int], gradient: Gradient) -> None:
        self.settings = settings
        self.theta = [p.copy() for p in start]  # the global parameters
        self.velocity = [np.zeros_like(p) for p in start]
        self.local = {worker: [p.copy() for p in start] for worker in workers}
        self.gradient = gradient
        self.round = 0

    def attempt(self, how: Attempt) -> None:
        """Runs the inner steps of a round. Its fragment is sent ``delay`` steps before the last of them."""
        s = self.settings
        p = self.round % s.fragments
        delta: Optional[np.ndarray] = None
        for inner in range(s.period):
            for worker, theta in self.local.items():
                for fragment, g in zip(theta, self.gradient(worker, self.round, inner, theta)):
                    fragment -= s.inner_lr * g
            if inner == s.period - 1 - s.delay:
                for new, old in how.joining.items():
                    self.local[new] = [fragment.copy() for fragment in self.local[old]]
                delta = sum(self.theta[p] - self.local[worker][p] for worker in how.senders) / len(
                    how.senders
                )
        assert delta is not None
        for worker in how.failed:
            del self.local[worker]
        if how.committed:
            self.velocity[p] = s.momentum * self.velocity[p] + delta
            self.theta[p] = self.theta[p] - s.outer_lr * (delta + s.momentum * self.velocity[p])
            for theta in self.local.values():
                theta[p] = s.alpha * theta[p] + (1 - s.alpha) * self.theta[p]
            self.round += 1
        else:
            for theta in self.local.values():
                theta[p] = self.theta[p].copy()


def local_sgd(
    start: Parameters, workers: list[int], gradient: Gradient, rounds: int, period: int, lr: float
) -> Parameters:
    """Returns the mean parameters of all workers after some rounds."""
    mean = [p.copy() for p in start]
    for t in range(rounds):
        local = {worker: [p.copy() for p in mean] for worker in workers}
        for inner in range(period):
            for worker, theta in local.items():
                for fragment, g in zip(theta, gradient(worker, t, inner, theta)):
                    fragment -= lr * g
        mean = [sum(local[w][p] for w in workers) / len(workers) for p in range(len(start))]
    return mean


def two_layers(worker: int, t: int, inner: int, theta: Parameters) -> Parameters:
    """The gradient of the mean squared error of ``tanh(x W0') W1' ... `` on other data for each worker, round
    and step.

    Every fragment is the weight of a linear layer with a tanh behind it. The gradient of each depends on all
    fragments.
    """
    x, target = batch(worker, t, inner, theta[0].shape[1], theta[-1].shape[0])
    activations = [x]
    for w in theta:
        activations.append(np.tanh(activations[-1] @ w.T))
    back = 2 * (activations[-1] - target) / target.size
    gradients: Parameters = []
    for w, before, after in zip(theta[::-1], activations[-2::-1], activations[:0:-1]):
        back = back * (1 - after**2)
        gradients.insert(0, back.T @ before)
        back = back @ w
    return gradients


def batch(worker: int, t: int, inner: int, inputs: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    """The data of a worker in one inner step: noisy values of a function that differs between workers."""
    rng = np.random.default_rng([worker, t, inner])
    x = rng.standard_normal((4, inputs))
    target = np.tanh(x[:, :1] * (0.3 + 0.2 * worker)) * np.ones(outputs) + 0.1 * rng.standard_normal(
        (4, outputs)
    )
    return x, target
