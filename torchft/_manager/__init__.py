"""The decisions of :class:`torchft.manager.Manager`, each small enough to test alone.

settings: constructor arguments and environment to checked values; plan: a quorum to what to do (no torch);
recovery: fetching state from a peer; state: the user's registered state; work: what an allreduce gives back; log.
"""
