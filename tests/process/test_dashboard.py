"""The lighthouse's page in a real browser: a kill and what follows, live, without loading the page again."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import HERE, ours_path

from torchft.coordination import LighthouseServer
from torchft.launch import process_tree
from torchft.launch.lighthouse import free_port

MEMBER = HERE / "member.py"
WAIT_S = 60.0


def missing() -> str | None:
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed (pip install selenium)"
    for command in ("chromium", "chromedriver"):
        if shutil.which(command) is None:
            return f"there is no {command} (Debian: apt install chromium chromium-driver)"
    return None


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    why = missing()
    if why is not None:
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(f"CI must try the page in a browser: {why}")
        pytest.skip(why)
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    for flag in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--window-size=1200,1000",
    ):
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium") or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


class Member:
    """A group that asks and votes, as a process."""

    def __init__(self, number: int, lighthouse: str, folder: Path) -> None:
        env = {
            "PYTHONPATH": ours_path(),
            "REPLICA_GROUP_ID": str(number),
            "TORCHFT_LIGHTHOUSE": lighthouse,
            "TORCHFT_MANAGER_PORT": str(free_port()),
        }
        log = folder / f"member-{number}.log"
        self.process = process_tree.start([sys.executable, str(MEMBER), "1000000000"], log, env)

    def kill(self) -> None:
        process_tree.kill_tree(self.process)


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    server = LighthouseServer("127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=2000)
    yield server
    server.shutdown()


@pytest.fixture
def members(lighthouse: LighthouseServer, tmp_path: Path) -> Iterator[list[Member]]:
    started = [Member(number, lighthouse.address(), tmp_path) for number in range(3)]
    yield started
    for member in started:
        member.kill()


def wait(until: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not until():
        assert time.monotonic() < deadline, f"{WAIT_S:g} s passed before: {what}"
        time.sleep(0.1)


class Page:
    def __init__(self, browser: Any, address: str) -> None:
        self.browser = browser
        browser.get(address)
        browser.execute_script("window.loadedOnce = true")

    def text(self, element: str) -> str:
        return str(self.browser.execute_script("return document.getElementById(arguments[0]).innerText", element))

    def rows(self) -> dict[str, str]:
        """The state of each group."""
        script = (
            "return [...document.querySelectorAll('#rows tr')].map(r => [r.cells[0].innerText, r.cells[1].innerText])"
        )
        return dict(self.browser.execute_script(script))

    def states(self) -> list[str]:
        return sorted(self.rows().values())

    def complaints(self) -> list[str]:
        """What the browser did not like: errors of the script, what the content policy forbids, what is missing."""
        return [entry["message"] for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]

    def was_not_loaded_again(self) -> bool:
        return bool(self.browser.execute_script("return window.loadedOnce === true"))


def test_a_kill_and_the_return_are_seen_live(
    browser: Any, lighthouse: LighthouseServer, members: list[Member], tmp_path: Path
) -> None:
    page = Page(browser, lighthouse.address())
    wait(lambda: page.states() == ["training"] * 3, "three groups train")
    wait(lambda: page.text("rate") not in ("", "0.0"), "steps are counted")
    assert page.text("link") == "live" and page.text("groups") == "3"

    members[0].kill()
    wait(lambda: "failed" in page.text("events") and "member_0" in page.text("events"), "the failure is told")
    wait(lambda: page.states() == ["training"] * 2 and page.text("groups") == "2", "two go on")

    members[0] = Member(0, lighthouse.address(), tmp_path)
    wait(lambda: page.states() == ["training"] * 3, "it is back")
    wait(lambda: "joined" in page.text("events"), "its return is told")
    assert page.browser.execute_script("return document.querySelectorAll('#chart .mark.failed').length") >= 1
    assert page.was_not_loaded_again()
    assert page.complaints() == []
    if "DASHBOARD_PICTURES" in os.environ:  # `make pictures`
        pictures(page, Path(os.environ["DASHBOARD_PICTURES"]))


def pictures(page: Page, folder: Path) -> None:
    """The page as docs/ shows it: light, dark, and on a phone."""
    time.sleep(20)  # some throughput to look at
    for name, dark, size in (
        ("light", False, (1200, 1000)),
        ("dark", True, (1200, 1000)),
        ("phone", False, (500, 1000)),
    ):
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        page.browser.set_window_size(*size)
        time.sleep(2)
        page.browser.save_screenshot(str(folder / f"dashboard-{name}.png"))


def test_a_name_is_text_and_never_markup(browser: Any, lighthouse: LighthouseServer) -> None:
    from datetime import timedelta

    from torchft.coordination import LighthouseClient

    evil = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    second = timedelta(seconds=1)
    LighthouseClient(lighthouse.address(), 10 * second).quorum(evil, timeout=10 * second, address="javascript:alert(1)")
    page = Page(browser, lighthouse.address())
    wait(lambda: page.rows(), "the group is shown")
    assert list(page.rows()) == [evil]
    wait(lambda: evil in page.text("events"), "its event is shown")
    assert browser.title == "torchft" and page.complaints() == []


def test_the_kill_button_asks_first_and_shows_why_it_was_refused(browser: Any, lighthouse: LighthouseServer) -> None:
    from datetime import timedelta

    from torchft.coordination import LighthouseClient

    second = timedelta(seconds=1)
    LighthouseClient(lighthouse.address(), 10 * second).quorum("a", timeout=10 * second, address="http://127.0.0.1:9")
    page = Page(browser, lighthouse.address())
    wait(lambda: page.rows(), "the group is shown")
    browser.execute_script("document.querySelector('#rows button').click()")
    assert browser.execute_script("return document.getElementById('kill').open")
    assert page.text("victim") == "a" and page.text("refused") == ""
    browser.execute_script("document.getElementById('confirm').click()")
    wait(lambda: page.text("refused"), "the answer is shown")
    assert browser.execute_script("return document.getElementById('kill').open"), "it was not ended"


def test_a_lighthouse_that_ends_is_noticed(browser: Any) -> None:
    server = LighthouseServer("127.0.0.1:0", min_replicas=1)
    try:
        page = Page(browser, server.address())
        wait(lambda: page.text("link") == "live", "the page is live")
    finally:
        server.shutdown()
    wait(lambda: "connection lost" in page.text("link"), "it says so")
