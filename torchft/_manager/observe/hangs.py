"""What a rank does that makes no progress: its phase, its threads, and the collective that it waits for.

Everything here is asked from another thread than the one that trains, and only when a step takes long.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import sys
import tempfile
from types import FrameType
from typing import Any

from torch import nn

# The phases that a script may begin, and their names in the proto.
PHASES = {"evaluation": "EVALUATION", "checkpoint": "CHECKPOINT", "compilation": "FIRST_STEPS"}
BETWEEN_STEPS = "BETWEEN_STEPS"

# Files whose functions are on the stack only while something is compiled (others of these packages are on
# that of compiled code, too), or a debugger has stopped it, and functions that write a checkpoint.
_COMPILERS = (
    "torch/_dynamo/convert_frame.py",
    "torch/_inductor/graph.py",
    "torch/_inductor/scheduler.py",
    "torch/_inductor/async_compile.py",
    "torch/_inductor/select_algorithm.py",
    "torch/utils/cpp_extension.py",
    "triton/compiler/compiler.py",
)
_DEBUGGERS = ("/bdb.py", "/pydevd.py")  # of Python, and of VS Code and PyCharm
_SAVERS = {
    "save": ("torch/serialization.py", "checkpoint/state_dict_saver.py", "torchft/_job/checkpoints.py"),
    "save_file": ("safetensors/torch.py",),
    "save_pretrained": ("transformers/modeling_utils.py",),
}
_MODULE = "torch/nn/modules/module.py"


def seen(thread: int, between: bool) -> str:
    """The phase that the stack of a thread shows, as named in the proto; empty: none in particular.

    Args:
        thread: its identifier.
        between: whether it is between two steps, where a model in evaluation mode is evaluated. Within a step
            it may be a teacher.
    """
    phase = ""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if file.endswith((*_COMPILERS, *_DEBUGGERS)):  # may take as long
            return PHASES["compilation"]
        if file.endswith(_SAVERS.get(function, ())):
            return PHASES["checkpoint"]
        if between and file.endswith(_MODULE):
            phase = _mode(frame) or phase
        frame = frame.f_back
    return phase or (BETWEEN_STEPS if between else "")


def _mode(frame: FrameType) -> str:
    """The phase of the module that a frame calls; the outermost one decides."""
    module = frame.f_locals.get("self")
    if not isinstance(module, nn.Module):
        return ""
    return BETWEEN_STEPS if module.training else PHASES["evaluation"]


def stacks() -> str:
    """The stacks of all threads of this process, in faulthandler's format."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


def awaited() -> str:
    """The first collective of PyTorch's flight recorder that has not ended, in words; empty: none."""
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        with contextlib.suppress(Exception):  # built without it, or with other arguments
            dump = getattr(importlib.import_module("torch._C._distributed_c10d"), name)
            found = first_active(json.loads(dump(includeCollectives=True, onlyActive=True)))
            if found:
                return found
    return ""


def first_active(trace: dict[str, Any]) -> str:
    """As :func:`awaited`, from the JSON of the flight recorder."""
    entries = [entry for entry in trace.get("entries", []) if entry.get("state") != "completed"]
    if not entries:
        return ""
    first = min(entries, key=lambda entry: entry.get("record_id", 0))
    name, sizes = first.get("profiling_name", "a collective"), first.get("input_sizes", "")
    return f"{name} of {sizes} in process group {first.get('process_group', '')}, {first.get('state')}"
