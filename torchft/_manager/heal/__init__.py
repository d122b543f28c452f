"""How state reaches a group that joins or is behind.

Both ways:
    state: the state of a group, and the user's functions for it. hyperparameters: those of its optimizers.
    recovery: serves, fetches and loads the state. sources: where others offer it.
    wait: lets the other groups wait for a heal that makes progress.

In passing, while all groups train:
    in_passing: whether it is possible. mode: whether it is worth it (pure). joining: the target's side.
    step_parts: the source's. in_passing_rules and pace: the target's decisions (pure). tracked: parameters
    and optimizer state, cut into parts. side_stream: device work in turns with the training thread.
    together: all ranks of a group end the heal in one step.
"""
