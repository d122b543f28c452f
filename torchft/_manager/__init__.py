"""The parts of :class:`torchft.manager.Manager`, in rooms by subject. Each part is small enough to be tested
alone.

Rooms, each with a list of its modules:
    quorum: what a rank asks and is told. step: the data, collectives and errors of one step. heal: how state
    reaches a group. snapshots: copies of the state that outlive the process. checks: whether the groups train
    the same model on the same data. observe: what a rank reports.

What all rooms rest on:
    settings: checks constructor arguments and environment variables. rank: the step and quorum of a rank.
    edge: adapts clients, transports and process groups of other projects.

Above the rooms:
    connection: connects the process group with the members of a quorum, by the decisions of handover (pure).
    parts, stepping: base classes of the Manager. The first puts the parts together, the second begins steps
    and follows their quorums; what torchft's wrappers call beside the public methods. signals: those that
    drain a group. lifetime: ends Managers that nobody has shut down. poison: reports exceptions
    that end a rank.
"""
