"""One status line per replica group: updated in place on a terminal, printed periodically elsewhere."""

from __future__ import annotations

import shutil
import sys
import time

from torchft.launch.job import STANDBY, GroupState, LocalJob
from torchft.launch.step_rate import StepRate

_EVERY_SEC = 10.0  # seconds between two lines of a group that only continues to train
# From then on a group that starts names its log: on a busy machine PyTorch alone takes as long.
_START_SEC = 30.0


class StatusLines:
    def __init__(self) -> None:
        self._in_place = sys.stdout.isatty()
        self._drawn = 0
        self._last: dict[int, tuple[str, float]] = {}  # state and time of a group's last line
        self._decision = ""

    def show(self, job: LocalJob) -> None:
        if self._in_place:
            lines = [line(member, job.pace) for member in job.members]
            lines += [job.decision] if job.decision else []
            print((f"\x1b[{self._drawn}A\x1b[J" if self._drawn else "") + "\n".join(lines), flush=True)
            width = shutil.get_terminal_size().columns or 80
            # Rows: a line may be wider than the terminal.
            self._drawn = sum(-(-len(text) // width) for text in lines)
            return
        for member in job.members:
            number = member.group.number
            state, when = self._last.get(number, ("", 0.0))
            if state != member.state or time.monotonic() - when > _EVERY_SEC:
                self._last[number] = (member.state, time.monotonic())
                print(line(member, job.pace), flush=True)
        if job.decision != self._decision:
            self._decision = job.decision
            print(job.decision, flush=True)


def line(member: GroupState, pace: StepRate) -> str:
    """The state of a group in one line, without a step of a standby, which has none, and after the end: the
    last look may be older than the last step.
    """
    step = " " * 13 if member.state in ("done", "left", STANDBY) else f"step {member.step:>8d}"
    text = f"group {member.group.number:<3d} {step}  {member.state}"
    if member.state == "training" and (rate := str(pace)):
        text += f", {rate}"
    if member.state.startswith("starting") and (seconds := time.time() - member.group.started) > _START_SEC:
        group = member.group
        text += f" for {seconds:.0f} s, see {group.log}; `py-spy dump -s --pid {group.pid}` shows where"
    return text + _restarts(member.group.starts - 1, member.state)


def _restarts(times: int, state: str) -> str:
    said = state == "starting again"
    if times > 1:
        return f"  ({times} times)" if said else f"  (started again {times} times)"
    return "  (started again)" if times and not said else ""
