"""Runs the check of this node (``torchft._node``) in a process of its own, and ends it in time."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

from torchft._lighthouse_http import tell_bad_node
from torchft._manager.settings import BAD_NODE_STATUS
from torchft._security import DEFAULT_JOB, JOB_ENV
from torchft.addresses import node_name
from torchft.launch import process_tree

# The process ends by itself a little earlier. Nodes meet in this time, too.
_CHECK_SEC = 115.0
_START_SEC = 10.0  # of it, for the imports
_END_SEC = 2.0


def check(
    lighthouse: str = "", job: str | None = None, nodes: int | None = None, as_json: bool = False
) -> int:
    """Checks this node, which takes less than two minutes, and prints what is found.

    Args:
        lighthouse: where the nodes of the job meet; empty: this node is not compared with others.
        job: of the nodes; default: TORCHFT_JOB_ID, else the unnamed one.
        nodes: how many there are.
        as_json: prints JSON.

    Returns:
        0; 69 if this node should not train, also if its check hangs or crashes; 1 if it could not be made.
    """
    job = job or os.environ.get(JOB_ENV) or DEFAULT_JOB
    program = process_tree.python("from torchft._node.check import main; sys.exit(main())")
    arguments = ["--job", job, "--seconds", f"{_CHECK_SEC - _START_SEC:g}"]
    arguments += ["--lighthouse", lighthouse] if lighthouse else []
    arguments += ["--nodes", str(nodes)] if nodes else []
    arguments += ["--json"] if as_json else []
    process = subprocess.Popen([*program, *arguments], preexec_fn=process_tree.end_with_parent)
    try:
        status = process.wait(_CHECK_SEC)
    except subprocess.TimeoutExpired:
        return _bad(f"the check of this node did not end within {_CHECK_SEC:g} s", lighthouse, job)
    finally:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # a driver may hold it
            process.wait(_END_SEC)
    if status < 0:
        return _bad(f"the check of this node ended by signal {-status}", lighthouse, job)
    return status


def _bad(why: str, lighthouse: str, job: str) -> int:
    unknown = tell_bad_node(lighthouse, job, node_name(), [why]) if lighthouse else ""
    print("\n".join([f"BAD   {why}", *([f"warn  {unknown}"] if unknown else [])]), file=sys.stderr)
    return BAD_NODE_STATUS
