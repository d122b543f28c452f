"""A pytest plugin with the rules for second runs, for skips, and for tests that cannot run on this host.

- A failed test runs a second time, so that one test that a busy machine disturbs does not fail the whole run.
  There is no second run after a timeout, because a wait that nothing ends is a bug, and none with RERUNS=0.
  The first failure is recorded in build/test/flaky.jsonl, one JSON object per line. If more than one test
  needs a second run, the run fails.
- Tests that need CUDA devices, network namespaces, Slurm or Kubernetes are deselected on hosts without them,
  and one line reports that. With CI=true any other skip fails the run, because everything that can be
  installed is installed there. A run in which all tests were deselected passes; the line shows what was not
  tested.
"""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timezone

import pytest

# The first line of a timeout failure: by pytest-timeout, by an exception, or by a wait of this project's
# tests.
TIMEOUTS = [r"\A[^\n]*(from pytest-timeout|\d s passed before|timed out)", r"\A\w*Timeout\w*:"]


@functools.cache
def devices() -> int:
    """The number of CUDA devices."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("default")  # an old driver is a reason to deselect tests, but no error
        return torch.cuda.device_count() if torch.cuda.is_available() else 0


@functools.cache
def _nccl_shares_a_device() -> bool:
    """Whether NCCL accepts several ranks on one device, as it does from 2.30 on if the environment asks for
    it.
    """
    import torch

    asked = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return asked and devices() > 0 and torch.cuda.nccl.version() >= (2, 30)


def _no_device() -> str | None:
    import torch

    if devices():
        return None
    why = (
        f"PyTorch for CUDA {torch.version.cuda} finds none"
        if torch.version.cuda
        else "this PyTorch has no CUDA"
    )
    return f"{why}; docs/gpu.md describes what they need"


def _device() -> str | None:
    import torch

    if not torch.accelerator.is_available():  # a CUDA build names CUDA even on a host without a device
        return None
    device = torch.accelerator.current_accelerator()
    # The simulated device of tests/late does not count.
    return None if device is None or device.type == "late" else "there is one here"


def _no_hosts() -> str | None:
    from hosts import Hosts, NoHosts

    try:
        with Hosts(1, delay_s=0.001):
            return None
    except NoHosts as e:
        return str(e)


def _no_slurm() -> str | None:
    from machines import missing

    return missing()


def _no_control_plane() -> str | None:
    from plane import missing

    return missing()


# A mark, what its tests need, and a function that returns why that is missing; None if it is not.
NEEDS: dict[str, tuple[str, Callable[[], str | None]]] = {
    "device": ("a CUDA device", functools.cache(_no_device)),
    "no_device": ("a host without an accelerator", functools.cache(_device)),
    "hosts": ("network namespaces", functools.cache(_no_hosts)),
    "slurm": ("Slurm", functools.cache(_no_slurm)),
    "kube": ("a control plane of Kubernetes", functools.cache(_no_control_plane)),
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "devices(count): needs that many CUDA devices")
    config.addinivalue_line(
        "markers", "nccl_ranks(count): needs that many CUDA devices, or one and NCCL 2.30"
    )
    for mark, (what, _) in NEEDS.items():
        config.addinivalue_line("markers", f"{mark}: needs {what}")
    config.pluginmanager.register(Policy(config), "policy")


class Policy:
    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.reruns = int(os.environ.get("RERUNS", "1"))
        # The pytest of the system is in use, not that of the test extra.
        self.no_reruns = self.reruns > 0 and not config.pluginmanager.hasplugin("rerunfailures")
        self.strict = os.environ.get("CI", "").lower() in ("1", "true")
        self.deselected: dict[str, str] = {}  # reasons by test
        self.run_again: list[pytest.TestReport] = []
        self.skipped: list[str] = []

    @pytest.hookimpl(trylast=True)  # after -m and -k, because tests that these deselect need nothing
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        kept, deselected = [], []
        for item in items:
            if why := self._missing(item):
                self.deselected[item.nodeid] = why
                deselected.append(item)
                continue
            kept.append(item)
            if self.reruns and not self.no_reruns:
                item.add_marker(pytest.mark.flaky(reruns=self.reruns, rerun_except=TIMEOUTS))
        if deselected:
            self.config.hook.pytest_deselected(items=deselected)
            items[:] = kept

    def _missing(self, item: pytest.Item) -> str | None:
        for mark, (what, missing) in NEEDS.items():
            if item.get_closest_marker(mark) is not None and (why := missing()) is not None:
                return f"need {what} ({why})"
        there = f"there {'is one' if devices() == 1 else f'are {devices()}'}"
        mark = item.get_closest_marker("devices")
        if mark is not None and devices() < mark.args[0]:
            return f"need {mark.args[0]} CUDA devices ({there})"
        mark = item.get_closest_marker("nccl_ranks")
        if mark is not None and devices() < mark.args[0] and not _nccl_shares_a_device():
            return f"need {mark.args[0]} CUDA devices, or one and NCCL 2.30 ({there})"
        return None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note_skip(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "rerun":
            self.run_again.append(report)
            self._record(report)
        self._note_skip(report)

    def _note_skip(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            _, _, why = report.longrepr  # type: ignore[misc]
            self.skipped.append(f"{report.nodeid}: {why}")

    def _record(self, report: pytest.TestReport) -> None:
        """Written at once, because a crash of the run must not lose it."""
        path = self.config.rootpath / "build" / "test" / "flaky.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        with path.open("a") as file:
            file.write(
                json.dumps({"date": now, "test": report.nodeid, "failure": report.longreprtext}) + "\n"
            )

    def _broken(self) -> list[str]:
        """The rules that this run has violated."""
        broken = []
        if len(self.run_again) > 1:
            broken.append(f"{len(self.run_again)} tests needed a second run, and more than one is a failure")
        if self.strict and self.skipped:
            broken.append("skipped under CI=true:\n" + "\n".join(f"  {line}" for line in self.skipped))
        return broken

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.deselected and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK
        if self._broken() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Reports each failure that did not recur in the second run, because it is a bug to be found."""
        for report in self.run_again:
            terminalreporter.section(f"{report.nodeid} was run again after this", yellow=True)
            terminalreporter.write_line(report.longreprtext)
            for name, text in report.sections:
                terminalreporter.section(name, "-")
                terminalreporter.write_line(text)
        for line in self._broken():
            terminalreporter.write_line(line, red=True)
        if self.no_reruns:
            terminalreporter.write_line(
                "no test has a second run: the plugin pytest-rerunfailures is not installed"
            )
        if self.deselected:
            parts = [f"{count} tests {why}" for why, count in Counter(self.deselected.values()).items()]
            terminalreporter.write_line("deselected: " + "; ".join(parts))
