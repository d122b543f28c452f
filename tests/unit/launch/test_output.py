"""The output of a script, in the log of its group."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchft.launch.output import error_of, exit_code, tail

FAILED = (
    "E1122 10:47:52.043000 24579 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) "
    "local_rank: 0 (pid: 24684) of binary: /usr/bin/python\n"
)
BOX = (
    60 * "=" + "\nrank.py FAILED\n" + 60 * "-" + "\nRoot Cause (first observed failure):\n" + 60 * "=" + "\n"
)
OF_TORCHRUN = (
    "Traceback (most recent call last):\n" + 40 * "  what torchrun says of it\n" + "ChildFailedError: \n"
)
REPORT = FAILED + OF_TORCHRUN + BOX
RAISED = """\
Traceback (most recent call last):
  File "train.py", line 1, in <module>
    order()
RuntimeError: out of cheese
and of crackers
"""
AT_EXIT = """\
Exception ignored in atexit callback: <function _end>
Traceback (most recent call last):
  File "train.py", line 2, in _end
ValueError: closed
"""


OF_TRITON = (
    '\nnanobind: leaked 4 instances!\n - leaked instance 0x7f of type "attribute"\n - ... skipped remainder\n'
    "nanobind: this is likely caused by a reference counting issue in the binding code.\n"
    "See https://nanobind.readthedocs.io/en/latest/refleaks.html\n"
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "group-0.log"


def test_the_last_lines_of_the_last_life(log: Path) -> None:
    log.write_text("".join(f"line {i}\n" for i in range(30)))
    assert tail(log).splitlines() == [f"line {i}" for i in range(10, 30)]
    log.write_text(f"an earlier life\n{REPORT}{RAISED}{REPORT}")
    assert tail(log) == RAISED.strip(), (
        "what the script says, and not what torchrun says of this life or the last one"
    )
    log.write_text(f"an earlier life\n{REPORT}{RAISED}")
    assert tail(log) == RAISED.strip(), "torchrun was killed with it"
    log.write_text(f"an earlier life\n{FAILED}again\n{RAISED}{REPORT}")
    assert tail(log) == f"again\n{RAISED}".strip(), "torchrun has started it again"
    log.write_text(REPORT)
    assert tail(log) == "\n".join(REPORT.splitlines()[-20:]), "if there is nothing else"


def test_the_error_of_a_script(log: Path) -> None:
    assert error_of(log) == "", "there is no log"
    chained = (
        RAISED.replace("RuntimeError", "KeyError")
        + "\nDuring handling of the above exception, …\n\n"
        + RAISED
    )
    for text in (
        RAISED,
        chained,
        RAISED + AT_EXIT,
        f"{RAISED.replace('cheese', 'wine')}{REPORT}{RAISED}{REPORT}",
        f"{RAISED}{OF_TRITON}{REPORT}{OF_TRITON}",
        "".join(f"[rank0]: {line}\n" for line in RAISED.splitlines()),
    ):
        log.write_text(text)
        assert error_of(log) == "RuntimeError: out of cheese"
    for text in ("it has no traceback\n", AT_EXIT, "Traceback (most recent call last):\n  File"):
        log.write_text(text)
        assert error_of(log) == ""


def test_the_exit_code_of_the_last_life(log: Path) -> None:
    assert exit_code(log) == 0, "there is no log"
    log.write_text(f"{RAISED}{REPORT}again\n{REPORT.replace('exitcode: 1', 'exitcode: -9')}")
    assert exit_code(log) == -9
    log.write_text(RAISED)
    assert exit_code(log) == 0, "torchrun was killed"
