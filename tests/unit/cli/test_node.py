"""The process that checks a node is ended in time, whatever it does."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from torchft.cli import main, node


@pytest.mark.slow  # tests/unit/node tests its parts, and the tests below its process
def test_doctor_checks_a_node(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The real check, alone: what is bad depends on this machine."""
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    monkeypatch.setenv("TORCHFT_NODE_NAME", "here")
    status = main(["doctor", "--node", "--json"])
    shown = json.loads(capfd.readouterr().out)
    assert shown["name"] == "here" and len(shown["figures"]["processor: memory"]) == 9
    assert status == (69 if shown["problems"] else 0)


@pytest.mark.parametrize(
    ("script", "status", "said"),
    [
        ("exit 0", 0, ""),
        ("exit 69", 69, ""),
        ("exit 1", 1, ""),
        ("kill -SEGV $$", 69, "BAD   the check of this node ended by signal 11"),
        pytest.param(
            "exec sleep 1000",
            69,
            "BAD   the check of this node did not end within 5 s",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_status_of_the_check(
    script: str,
    status: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$$ $@" > {tmp_path}/started\n{script}\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    told: list[tuple[object, ...]] = []
    monkeypatch.setattr(node, "tell_bad_node", lambda *given: told.append(given) or "")
    monkeypatch.setenv("TORCHFT_NODE_NAME", "here")
    monkeypatch.setattr(node, "_CHECK_SEC", 5.0 if said.endswith("5 s") else 60.0)
    assert node.check("http://there:1", None, 4, as_json=True) == status
    assert capsys.readouterr().err.strip() == said
    # The process itself tells the lighthouse, if it is able to.
    assert told == ([("http://there:1", "default", "here", [said.removeprefix("BAD   ")])] if said else [])
    pid, *started = (tmp_path / "started").read_text().split()
    assert " ".join(started).endswith("--lighthouse http://there:1 --nodes 4 --json")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


@pytest.mark.parametrize("flags", [["--nodes", "2"], ["--json"]])
def test_flags_of_the_check_without_it(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main(["doctor", *flags])
    assert e.value.code == 2 and f"{flags[0]} is not allowed without --node" in capsys.readouterr().err


def test_doctor_passes_its_flags_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr("torchft.cli.doctor.check", lambda *given: asked.append(given) or 69)
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://there:1")
    assert main(["doctor", "--node"]) == 69
    main(
        ["doctor", "--node", "--lighthouse", "http://a:1,http://b:1", "--job", "x", "--nodes", "3", "--json"]
    )
    assert asked == [
        ("http://there:1", None, None, False),
        ("http://a:1,http://b:1", "x", 3, True),
    ]
