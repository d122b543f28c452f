"""For test_dashboard.py: the lighthouse's page in a browser, and the groups that it shows."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from processes import HERE, ours_path

from torchft.launch import process_tree
from torchft.launch.lighthouse import free_port

WAIT_S = 100.0  # PyTorch may take long to start where tests share a small machine


def missing() -> str | None:
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed (pip install selenium)"
    for command in ("chromium", "chromedriver"):
        if shutil.which(command) is None:
            return f"there is no {command} (Debian: apt install chromium chromium-driver)"
    return None


class Member:
    """A group as a process that requests quorums and votes."""

    def __init__(self, number: int, lighthouse: str, folder: Path, job: str = "default") -> None:
        env = {
            "PYTHONPATH": ours_path(),
            "REPLICA_GROUP_ID": str(number),
            "TORCHFT_LIGHTHOUSE": lighthouse,
            "TORCHFT_JOB_ID": job,
            "TORCHFT_MANAGER_PORT": str(free_port()),
        }
        log = folder / f"member-{number}.log"
        self.process = process_tree.start([sys.executable, str(HERE / "member.py"), "1000000000"], log, env)

    def kill(self) -> None:
        process_tree.kill_tree(self.process)


def wait(until: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not until():
        assert time.monotonic() < deadline, f"{WAIT_S:g} s passed before: {what}"
        time.sleep(0.1)


class Page:
    def __init__(self, browser: Any, address: str) -> None:
        self.browser = browser
        browser.get_log("browser")  # drops messages of earlier pages
        browser.get(address)
        browser.execute_script("window.loadedOnce = true")

    def text(self, element: str) -> str:
        return str(
            self.browser.execute_script("return document.getElementById(arguments[0]).innerText", element)
        )

    def rows(self) -> dict[str, str]:
        """Returns the state of each group."""
        script = (
            "return [...document.querySelectorAll('#rows tr')].map(r => [r.cells[0].innerText, "
            "r.cells[1].innerText])"
        )
        return dict(self.browser.execute_script(script))

    def event(self, kind: str, word: str) -> str:
        """Returns the text of the latest event of this kind that contains this word; empty if there is
        none.
        """
        script = (
            "return [...document.querySelectorAll('#events li')].map(li => [li.children[1].innerText, "
            "li.innerText])"
        )
        return next(
            (text for of, text in self.browser.execute_script(script) if of == kind and word in text), ""
        )

    def states(self) -> list[str]:
        return sorted(self.rows().values())

    def complaints(self) -> list[str]:
        """Returns the browser's complaints: script errors, violations of the content policy, missing
        files.
        """
        return [entry["message"] for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]

    def was_not_reloaded(self) -> bool:
        return bool(self.browser.execute_script("return window.loadedOnce === true"))
