"""The job's token, which checkpoint servers require, since weights are secrets.

These connections are not encrypted, so a proof derived from the token is sent, and not the token itself. An
eavesdropper can use the proof to fetch weights, which it can see on the network anyway, but not to end a
group or to join the job.
"""

from __future__ import annotations

import hashlib
import hmac

from torchft._security import tokens


def checkpoint_token() -> str:
    """The proof of the token that a target shows; empty if the job has none. ValueError: a bad token file."""
    return next((_derived(token) for token in tokens()), "")


def accepts(shown: str) -> bool:
    """Whether a source accepts the proof that a target shows."""
    known = [_derived(token).encode() for token in tokens()]
    # compares with all of them, so that the time reveals nothing
    equal = sum(hmac.compare_digest(shown.encode("utf-8", "replace"), one) for one in known)
    return not known or equal > 0


def _derived(token: str) -> str:
    return hmac.new(token.encode(), b"torchft checkpoint", hashlib.sha256).hexdigest()
