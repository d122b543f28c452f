"""The examples in the README and in the docs run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from published import client_path
from torch.distributed import TCPStore

from torchft.coordination import LighthouseServer

ROOT = Path(__file__).resolve().parents[2]


EXAMPLES = [
    pytest.param(text, id=f"{document}-{i}")
    for document in ("README.md", "docs/training_loops.md")
    for i, text in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL))
]


@pytest.mark.timeout(900)  # the first run installs what an example needs
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_example_trains_in_two_groups_and_ends(example: str, tmp_path: Path) -> None:
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    path += [
        str(client_path(p)) for p in ("lightning", "transformers") if re.search(rf"^(from|import) {p}\b", example, re.M)
    ]
    script = tmp_path / "example.py"
    script.write_text(example + "\nprint('ended at step', manager.current_step())\n")
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=100)
    # As torchrun does for a group of one rank.
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    groups = []
    try:
        for store in stores:
            env = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path),
                "TORCHFT_LIGHTHOUSE": lighthouse.address(),
                "RANK": "0",
                "WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
            }
            command = [sys.executable, str(script)]
            groups.append(
                subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            )
        for group in groups:
            output, _ = group.communicate(timeout=200)
            assert group.returncode == 0, output
            assert output.splitlines()[-1] == "ended at step 100", output
    finally:
        for group in groups:
            group.kill()
            group.communicate()
        lighthouse.shutdown()
