"""The bounds of tests for promised durations: the promised duration times a factor, which is defined here
only.
"""

from __future__ import annotations

# Tests run in parallel and keep both processors busy, so a thread may be delayed for seconds.
SLACK = 20.0
# Added to each bound, because a delayed thread exceeds the shortest promises, too.
HELD_UP_S = 1.0

# From a kill -9 until the survivors commit again: docs/failures.md. suspect_grace_ms is the largest part of
# it.
KILL_S = 0.25
# From an abort until all waits have ended; also when a peer or an isolated worker is killed:
# docs/internals/benchmarks.md.
ABORT_S = 0.1
# From configure with new peers until the first allreduce among them: docs/internals/benchmarks.md.
NEW_PEERS_S = 0.3
# From Ctrl-C until the wait of the core has ended.
CTRL_C_S = 0.05
# From the end of a script until its process has ended: the time that Python takes to exit after `import
# torch`.
LEAVE_PYTHON_S = 0.6
# From the failure of a source until the transfer from it has ended: docs/failures.md.
HEAL_ENDS_S = 0.5


def within(promised_s: float) -> float:
    """The bound of a test in seconds, given the promised time on an idle machine."""
    return SLACK * promised_s + HELD_UP_S
