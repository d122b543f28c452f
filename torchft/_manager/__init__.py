"""The decisions of :class:`torchft.manager.Manager`, each small enough to test alone.

settings: constructor arguments and environment to checked values; plan: a quorum to what to do (no torch);
rounds: who waits for a quorum and who follows it; peers: meeting those of torchft 0.2.0; recovery: serving, fetching
and loading state; phases: where a recovery's seconds went; state: the user's registered state; failures: deaths of
peers; work: what an allreduce gives back; errors, log.
"""
