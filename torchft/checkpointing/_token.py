"""The job's token: weights are secrets."""

from __future__ import annotations

import os

TOKEN_FILE_ENV = "TORCHFT_TOKEN_FILE"


def checkpoint_token() -> str:
    """What a target shows and a source wants to see; empty where the job has none.

    It is read anew each time, so that a token can be changed under a running job.

    Raises:
        ValueError: TORCHFT_TOKEN_FILE names a file that cannot be read, or is empty
    """
    path = os.environ.get(TOKEN_FILE_ENV, "")
    if not path:
        return ""
    try:
        with open(path, encoding="utf-8") as file:
            token = file.read().strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"{TOKEN_FILE_ENV}={path!r} cannot be read: {error}") from error
    if not token or not token.isprintable() or not token.isascii():
        raise ValueError(f"{TOKEN_FILE_ENV}={path!r}: allowed is one line of ASCII without control characters")
    return token
