"""The parts of :class:`torchft.manager.Manager`, by subject. Each is small enough to be tested alone.

Before the first step:
    settings: checks constructor arguments and environment variables. group: lets the ranks of a group find their
    manager server. edge: adapts clients, transports and process groups of other projects. extras: the methods that
    torchft's wrappers call on a Manager beside the public ones.

A step:
    rounds: requests quorums and waits for them. plan: computes from a quorum what this rank does (without torch).
    step: the data and states of one step. stepping: the methods that return properties of the current step.
    connection: connects the process group with the members of a quorum, by the decisions of handover.
    collectives: the collectives of a step. work: the futures that an allreduce returns.

Heals:
    state: the state of a group, and the user's functions for it. hyperparameters: those of its optimizers.
    recovery: serves, fetches and loads the state. transfers: calls recovery at the right moments of a step.
    heal_wait: lets the other groups wait for a heal that makes progress. background: the CUDA stream of a heal.
    Heals in passing: heal_along decides whether they are possible, heal_plan whether they are worth it. joining is the
    target's side, giving the source's.
    along and pace make the target's decisions (without importing torch). tracked: cuts parameters and optimizer state
    into parts. together: lets the ranks of a group end the heal in the same step.

Failures:
    errors: the errors of a step. failures: failures of peers. replayer: reduces a failed step again, by the decisions
    of replay and with the copies that inputs keeps. signals: the signals that drain a group.

In packages of their own, with a list of their modules: checks (whether the groups train the same model on the same
data), observe (what a rank reports).
"""
