"""The steps of docs/operating.md that protect a job: they run as they stand there, with two groups."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import free_port

ROOT = Path(__file__).resolve().parents[2]


def shims(folder: Path) -> Path:
    """The commands of an installed torchft and PyTorch, of this Python."""
    folder.mkdir()
    for name, code in (
        ("torchft_lighthouse", "from torchft._torchft import lighthouse_main; lighthouse_main()"),
        ("torchrun", "from torch.distributed.run import main; main()"),
    ):
        command = folder / name
        command.write_text(f"#!{sys.executable}\nimport sys; sys.path.insert(0, {str(ROOT)!r})\n{code}\n")
        command.chmod(0o755)
    return folder


def steps() -> str:
    text = (ROOT / "docs" / "operating.md").read_text()
    (section,) = re.findall(r"^## Security\n(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    blocks = re.findall(r"^```bash\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    return "\n".join(blocks)


@pytest.mark.timeout(280)
def test_the_steps_of_the_guide_make_a_job_that_trains(tmp_path: Path) -> None:
    missing = [command for command in ("openssl", "curl", "bash") if shutil.which(command) is None]
    if missing:
        if os.environ.get("CI"):
            pytest.fail(f"{missing} not found")
        pytest.skip(f"the guide's steps need {missing}")
    (tmp_path / "train_ddp.py").symlink_to(ROOT / "train_ddp.py")
    script = steps()
    for port in ("29510", "29511", "29512"):
        assert port in script
        script = script.replace(port, str(free_port()))
    assert script.count(" --steps 50 ") == 2
    script = script.replace(" --steps 50 ", " --steps 20 --events events ")
    # Whatever happens, nothing is left behind.
    script = "set -e -m\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n" + script
    environment = {
        **os.environ,
        "PATH": f"{shims(tmp_path / 'bin')}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"Lighthouse listening on: https://", done.stdout), done.stdout

    status, _ = json.JSONDecoder().raw_decode(done.stdout[done.stdout.index("{\n") :])
    addresses = {member["address"] for member in status["members"]}
    assert len(addresses) == 2 and all(address.startswith("https://") for address in addresses)
    assert 'replica "nobody" is not known' in done.stdout

    logs = [(tmp_path / "events" / f"group-{group}-rank-0.jsonl").read_text().splitlines() for group in range(2)]
    ends = [json.loads(lines[-1]) for lines in logs]
    assert [end["event"] for end in ends] == ["end", "end"]
    assert ends[0]["sha256"] == ends[1]["sha256"]
    # One of them fetched its first weights from the other, which showed and saw the token.
    assert any(json.loads(line).get("healing") for lines in logs for line in lines), logs
