"""``torchft snapshots``: what each host holds, of the lighthouse and of this host's memory."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

import pytest

from torchft._torchft import LighthouseServer
from torchft.cli import main
from torchft.cli.snapshots import disks, table

SLOT = {
    "job": "train",
    "group": "a",
    "group_rank": 0,
    "path": "a/rank-0/0",
    "group_world_size": 1,
    "step": 700,
    "quorum": 3,
    "saved": 1000.0,
    "bytes": 1_500_000_000,
}


def test_the_table() -> None:
    torn = {**SLOT, "path": "a/rank-0/1", "bytes": 4096, "incomplete": "it is being\x1b written"}
    held: list[dict[str, Any]] = [
        {"host": "one", "snapshots": [SLOT, torn]},
        {"host": "two", "snapshots": None},
    ]
    assert table(held, 1120.0).splitlines() == [
        "host  job    group  rank  step    size    age  state",
        "one   train  a         0   700  1.5 GB  2 min  complete",
        "one   train  a         0     -  0.0 MB      -  it is being? written",
    ]
    parts = {**SLOT, "share": [1, 3, 2]}
    held[1]["snapshots"] = [parts, {**parts, "path": "parts-of-step-700/a/rank-0", "stored": True}]
    assert [line.split("min  ")[1] for line in table(held[1:], 1120.0).splitlines()[1:]] == [
        "2 of 3 parts",
        "2 of 3 parts, on disk",
    ]
    held[1]["snapshots"] = []
    assert table(held[1:], 0) == "no snapshots (keepers: two)"
    assert table([], 0) == "no keeper holds snapshots of this job"


def test_the_table_of_disks() -> None:
    about = {"job": "train", "folder": "/ckpt", "written": 600, "bytes": 0, "since": 1000.0}
    writing = {**about, "writing": 700, "bytes": 5_000_000}
    full = {**about, "written": -1, "problem": "No space\x1b left on device"}
    held = [
        {"host": "one", "disks": [about, writing]},
        {"host": "two", "disks": [full]},
        {"host": "three", "snapshots": []},
    ]
    assert disks(held, 1120.0).splitlines() == [
        "",
        "",
        "host  job    folder  step  state",
        "one   train  /ckpt    600  complete",
        "one   train  /ckpt    600  writes step 700: 5.0 MB in 2 min",
        "two   train  /ckpt      -  for 2 min: No space? left on device",
    ]
    assert disks(held[2:], 0) == ""


def test_all_hosts_by_the_lighthouse(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = LighthouseServer("127.0.0.1:0", 1)
    try:
        port = int(server.address().rpartition(":")[2])
        for host in ("one", "two"):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            body = {"address": f"http://{host}:1", "host": host, "snapshots": [SLOT]}
            connection.request("POST", "/api/v1/keepers", json.dumps(body))
            assert connection.getresponse().status == 200
            connection.close()
        monkeypatch.setenv("TORCHFT_LIGHTHOUSE", f"http://127.0.0.1:{port}")
        assert main(["snapshots"]) == 0
        lines = capfd.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == ["host", "one", "two"]
        assert main(["snapshots", "--json"]) == 0
        assert json.loads(capfd.readouterr().out)[0]["snapshots"] == [SLOT]
        assert main(["snapshots", "--job", "other"]) == 0
        assert capfd.readouterr().out == "no keeper holds snapshots of this job\n"
    finally:
        server.shutdown()
    assert main(["snapshots"]) == 1, "the lighthouse that was named does not answer"
    assert "no lighthouse answered" in capfd.readouterr().err


def test_this_host_without_a_keeper(memory_of_snapshots: Path, capfd: pytest.CaptureFixture[str]) -> None:
    slot = memory_of_snapshots / "a%20job" / "group" / "rank-0" / "0"
    slot.parent.mkdir(parents=True)
    slot.write_bytes(bytes(5000))
    (slot.parent / "1").write_bytes(b"TFTSLOT9" + bytes(4088))
    status = {"written": 5, "writing": None, "nbytes": 0, "problem": None, "since": 1.0}
    (memory_of_snapshots / "a%20job" / "disk.json").write_text(json.dumps({"/ckpt": status}))
    assert main(["snapshots", "--here"]) == 0
    shown = capfd.readouterr().out
    assert "a job" in shown
    assert shown.splitlines()[-1].split()[-3:] == ["/ckpt", "5", "complete"]
    assert "it is being written, or its trainer ended while it wrote" in shown
    assert "its format has version '9', and this keeper reads version '1'" in shown
    assert main(["snapshots", "--here", "--job", "other", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)[0]["snapshots"] == []
    assert main(["snapshots", "--here", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)[0]["disks"][0]["written"] == 5
