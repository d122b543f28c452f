"""The token and the certificates that protect a job's connections, in files that the environment names.

The Go core reads the certificates, and the token for its calls. Checkpoint servers, and requests of Python to
a lighthouse, take the token from this module.
"""

from __future__ import annotations

import json
import os
from typing import Optional

#: File with the job's token, of servers and clients: without one, anybody who reaches a port can join.
#: Default: none.
TOKEN_FILE_ENV = "TORCHFT_TOKEN_FILE"
#: Certificate of this host in PEM, of servers and clients: servers then speak TLS. Default: none.
TLS_CERT_ENV = "TORCHFT_TLS_CERT"
#: Name of the job; of each its own, if several share a lighthouse or a host. Default: default; for copies of
#: the state, the script, its arguments and the folder.
JOB_ENV = "TORCHFT_JOB_ID"
#: Names one start of the job, alike in all of its groups: a group that comes back after the end of the
#: training ends with success. `torchft run`, the TorchX component and the examples for Slurm and Kubernetes
#: set it. Default: none.
RUN_ENV = "TORCHFT_RUN_ID"
#: Set by torchrun's rendezvous through the lighthouse for its ranks: the number of their round. Default:
#: none.
ROUND_ENV = "TORCHFT_ROUND"
DEFAULT_JOB = "default"
_FILES = {
    "token_file": TOKEN_FILE_ENV,
    "tls_cert": TLS_CERT_ENV,
    #: Key of the certificate. Default: none.
    "tls_key": "TORCHFT_TLS_KEY",
    #: Authority of servers, of clients: if it is set, they refuse `http://`. Default: the system's.
    "tls_ca": "TORCHFT_TLS_CA",
    #: Authority of clients, of servers: clients without a certificate of it are refused. Default: none.
    "tls_client_ca": "TORCHFT_TLS_CLIENT_CA",
}


def files() -> dict[str, str]:
    """Returns the names of the files for the Go core, by their settings; empty for a file that the
    environment lacks.

    They are passed explicitly, because Go copies the environment when its library is loaded and sees no later
    change.
    """
    return {name: os.environ.get(env, "") for name, env in _FILES.items()}


def run_id() -> str:
    """Returns the id of this start of the job; empty: it has none."""
    return os.environ.get(RUN_ENV, "")


def security(run: Optional[str] = None) -> str:
    """Returns the files, the job that calls name, and the id of this start of the job, as JSON. `run`: the
    id; None: that of the environment.
    """
    job, run = os.environ.get(JOB_ENV) or DEFAULT_JOB, run_id() if run is None else run
    return json.dumps({**files(), "job": job, "run": run})


def tokens() -> list[str]:
    """The job's tokens, one per line of the file: the first is sent with requests, and each of them is
    accepted.

    Without TORCHFT_TOKEN_FILE there are none. The file is read each time, so that a token can be changed
    while the job runs.

    Raises:
        ValueError: TORCHFT_TOKEN_FILE names a file that cannot be read, or holds no token
    """
    path = os.environ.get(TOKEN_FILE_ENV, "")
    if not path:
        return []
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file]
    except (OSError, ValueError) as error:
        raise ValueError(f"{TOKEN_FILE_ENV}={path!r} cannot be read: {error}") from error
    found = [line for line in lines if line]
    if not found or not all("!" <= character <= "~" for line in found for character in line):
        raise ValueError(
            f"{TOKEN_FILE_ENV}={path!r}: allowed are lines of printable ASCII, at least one, no spaces"
        )
    return found
