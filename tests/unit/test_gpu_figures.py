"""`make gpu-figures`, without a GPU: stand-in commands in place of the measurements."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torchft.launch.process_tree import alive

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python" / "bench"))
import gpu_figures  # noqa: E402
from gpu_figures import PARTS, Part, measure  # noqa: E402
from gpu_job import Span, gaps  # noqa: E402


def stand_in(name: str, code: str, wants_s: float | None = None, **env: str) -> Part:
    return Part(name, f"measurement {name}", [sys.executable, "-c", code], wants_s, env)


def test_the_parts_follow_each_other_and_share_one_file(tmp_path: Path) -> None:
    out = tmp_path / "figures.md"
    parts = [
        stand_in("first", "print('one'); import sys; print('more', file=sys.stderr)"),
        # The file is there while the later parts still run.
        stand_in(
            "second",
            f"import os; print(os.environ['SET'], 'second: not run' in open({str(out)!r}).read())",
            SET="x",
        ),
    ]
    assert measure(parts, 60, out) == 0
    text = out.read_text()
    assert "- first: done, " in text and "- second: done, " in text
    assert text.index("measurement first") < text.index("one\nmore") < text.index("measurement second")
    assert "x True" in text


def test_a_part_that_fails_is_reported_and_the_next_one_runs(tmp_path: Path) -> None:
    out = tmp_path / "figures.md"
    parts = [
        stand_in("raises", "print(1 / 0)"),
        stand_in("killed", "import os; os.kill(os.getpid(), 9)"),
        Part("missing", "no such program", ["/nowhere/program"]),
        stand_in("last", "print('all the same')"),
    ]
    assert measure(parts, 60, out) == 1
    text = out.read_text()
    assert "- raises: failed: ended with 1, " in text and "ZeroDivisionError" in text
    assert "- killed: failed: ended with -9, " in text
    assert "- missing: failed: [Errno 2] No such file or directory: '/nowhere/program', " in text
    assert "- last: done, " in text and "all the same" in text


@pytest.mark.slow
def test_a_part_past_its_share_is_ended_with_its_children_and_keeps_its_lines(tmp_path: Path) -> None:
    out = tmp_path / "figures.md"
    # The child is in a session of its own, as the ranks of a job are.
    hangs = (
        "import subprocess, sys, time\n"
        "sleeps = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "child = subprocess.Popen(sleeps, start_new_session=True)\n"
        f"print('partial'); open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); sys.stdout.flush()\n"
        "time.sleep(600)"
    )
    parts = [
        stand_in("hangs", hangs, 3),
        stand_in("last", "print('all the same')", 3),
        stand_in("late", "", 600),
    ]
    # The last one would have all of the remaining time; what is kept for it is taken from the first.
    assert measure(parts[:2], 6, out) == 1
    text = out.read_text()
    assert "- hangs: not done: ended after 3 s, " in text and "partial" in text
    assert "- last: done, " in text
    assert not alive([int((tmp_path / "pid").read_text())])


def test_no_part_begins_after_the_time_is_over(tmp_path: Path) -> None:
    out = tmp_path / "figures.md"
    assert measure([stand_in("one", "print('ran')")], 0, out) == 1
    assert "- one: not run for lack of time, " in out.read_text() and "ran\n" not in out.read_text()


def test_a_part_without_a_share_takes_what_the_others_leave(tmp_path: Path) -> None:
    out = tmp_path / "figures.md"
    told = Part(
        "told", "its time", [sys.executable, "-c", "import sys; print('told', sys.argv[1])", "{seconds}"]
    )
    assert measure([told, stand_in("later", "", 60)], 160, out) == 0
    assert "told 89" in out.read_text() or "told 90" in out.read_text()


def test_all_programs_exist_and_the_shares_leave_time_for_the_tests() -> None:
    assert [part.name for part in PARTS][:2] == ["tests", "figures"]
    for part in PARTS[1:]:
        assert Path(part.command[1]).is_file()
    assert sum(part.wants_s or 0 for part in PARTS) <= gpu_figures.TOTAL_S - 60


@pytest.mark.parametrize("argument", ["--seconds=0", "nothing"])
def test_bad_arguments_are_named(
    argument: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_figures.py", argument])
    with pytest.raises(SystemExit, match="2"):
        gpu_figures.main()
    assert "allowed" in capsys.readouterr().err


def test_a_gap_is_from_the_last_allreduce_to_the_first_kernel_of_the_optimizer() -> None:
    reduce, adam = (
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
        "void at::native::multi_tensor_apply_kernel<...>",
    )
    steps = [
        Span(reduce, 0, 100),
        Span("gemm", 50, 90),
        Span(reduce, 110, 200),
        Span("ncclDevKernel_ReduceScatter_Sum_f32", 190, 230),
        Span(adam, 250, 260),
        Span(adam, 265, 270),
        # A step that is not committed has no optimizer.
        Span(reduce, 300, 400),
        Span(reduce, 500, 600),
        Span("Optimizer.step#Adam.step", 640, 700),
        Span(adam, 650, 660),
    ]
    assert gaps(reversed(steps)) == [50, 40]
    assert gaps([Span(adam, 0, 10), Span(reduce, 20, 30)]) == []
