"""The parts of :class:`torchft.manager.Manager`, each small enough to test alone, in the order of a step.

settings: constructor arguments and environment to checked values; group: the ranks of a group find their manager
server; edge: what may be another project's, extras: what the wrappers of a Manager ask of it; rounds: who waits for a
quorum and who follows it; plan: a quorum to what to do (no torch); step: what belongs to one step, and its states,
stepping: what may be asked of it; connection: the process group gets the peers of a quorum, layout: whether groups
reduce the same, loader: whether they train on the same batch; transfers: of state in a step, recovery: serving,
fetching and loading it, phases: where its seconds went, along: what a heal piece by piece asks for and applies (no
torch), sources: from which group the next piece comes, together: the ranks of a group end it in one step, tracked:
pieces of parameters, joining: its two ends; background: its stream on a device; state: which state a group has, and the
user's; collectives: of one step, work: what an allreduce gives back; errors: what a step fails with, failures: those of
peers, incident: what one cost; replayer: a failed step is reduced again, by the decisions of replay and with what
inputs kept; replicas: the groups compare their weights, by the decisions of divergence and the sums of digest; reports:
what the manager server shows; signals: on which the group leaves; log: for people and exporters, trace: of a step,
exporters: which of them are on, ranges: names in a profile.
"""
