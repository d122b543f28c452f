"""The lighthouse's page in a real browser: a kill and its effects appear live, without reloading the page."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from dashboard_page import WAIT_S, Member, Page, missing, wait
from processes import HERE, Child, Job, ours_path

from torchft._lighthouse_http import HttpLighthouse
from torchft.coordination import LighthouseServer
from torchft.launch import process_tree
from torchft.launch.lighthouse import free_port, lighthouses


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


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    server = LighthouseServer(
        "127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=10_000
    )
    yield server
    server.shutdown()


@pytest.fixture
def members(lighthouse: LighthouseServer, tmp_path: Path) -> Iterator[list[Member]]:
    started = [Member(number, lighthouse.address(), tmp_path) for number in range(3)]
    yield started
    for member in started:
        member.kill()


@pytest.fixture
def groups(lighthouse: LighthouseServer) -> Iterator[Callable[[int], Child]]:
    """Starts groups that train and heal 32 MB at 8 MB/s, or for the pictures 1.6 GB at 150 MB/s."""
    sizes = (1600, 150) if PICTURES else (32, 8)
    with Job() as job:

        def start(number: int) -> Child:
            env = {"REPLICA_GROUP_ID": str(number), "TORCHFT_LIGHTHOUSE": lighthouse.address()}
            return job.python(
                f"group-{number}", HERE / "healing_member.py", *sizes, path=ours_path(), env=env
            )

        yield start


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_kill_and_the_heal_are_seen_live(
    browser: Any, lighthouse: LighthouseServer, groups: Callable[[int], Child]
) -> None:
    # Two groups, so that the restarted one heals from one source, in a known time.
    count = 3 if PICTURES else 2
    members = [groups(number) for number in range(count)]
    page = Page(browser, lighthouse.address())
    wait(lambda: page.states() == ["training"] * count, "all groups train")
    wait(lambda: page.text("rate") not in ("", "0.0"), "steps are counted")
    assert page.text("link") == "live" and page.text("groups") == str(count)
    assert re.fullmatch(r"\d+ ms|\d+\.\d s", page.text("period")), page.text("period")
    pause(25)

    os.kill(members[0].pid, signal.SIGUSR1)
    wait(lambda: page.event("failed", "group_0"), "the failure is shown")
    assert "no sign of life for" not in page.event("failed", "group_0"), "not by the broken connection"
    wait(lambda: page.text("groups") == str(count - 1), "the others continue")
    wait(lambda: page.event("recovered", "go on at step"), "the recovery time of the survivors is shown")
    pause(15)

    members[0] = groups(0)
    seen: list[float] = []

    def heals() -> bool:
        for state in page.states():
            if done := re.match(r"healing (\d+\.\d) (MB|GB) of (32\.0 MB|1\.6 GB)", state):
                megabytes = float(done[1]) * (1000 if done[2] == "GB" else 1)
                if megabytes not in seen:
                    seen.append(megabytes)
        return len(seen) >= 3

    try:
        wait(heals, "the received part of the state is shown")
    except AssertionError as e:
        raise AssertionError(f"seen {seen}; {page.rows()}\n{page.text('events')}") from e
    assert seen == sorted(seen), "the received part must grow"
    picture(page, "light")
    wait(lambda: page.event("healed", "group_0"), "the cost of the heal is shown")
    healed = page.event("healed", "group_0")
    assert "took over the state of step" in healed
    assert re.search(r"\((32\.0 MB|1\.6 GB)\): \d+\.\d s \(.*transfer \d+\.\d s", healed), healed
    wait(lambda: page.states() == ["training"] * count, "all train again")
    assert page.browser.execute_script("return document.querySelectorAll('#chart .mark.failed').length") >= 1
    pause(15)
    picture(page, "dark")
    picture(page, "phone")
    assert page.was_not_reloaded()
    assert page.complaints() == []


# The directory for pictures of the page in docs/, which `make pictures` sets; the job then runs for longer.
PICTURES = os.environ.get("DASHBOARD_PICTURES", "")
SIZES = {"light": (1200, 1150), "dark": (1200, 1150), "phone": (500, 1150)}


def pause(seconds: float) -> None:
    if PICTURES:
        time.sleep(seconds)


def picture(page: Page, name: str) -> None:
    if not PICTURES:
        return
    scheme = {"name": "prefers-color-scheme", "value": "dark" if name == "dark" else "light"}
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    page.browser.set_window_size(*SIZES[name])
    time.sleep(1.5)
    page.browser.save_screenshot(str(Path(PICTURES) / f"dashboard-{name}.png"))


def test_a_name_is_shown_as_text_and_not_markup(browser: Any, lighthouse: LighthouseServer) -> None:
    from datetime import timedelta

    from torchft.coordination import LighthouseClient

    evil = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    second = timedelta(seconds=1)
    LighthouseClient(lighthouse.address(), 10 * second).quorum(
        evil, timeout=10 * second, address="javascript:alert(1)"
    )
    page = Page(browser, lighthouse.address())
    wait(lambda: page.rows(), "the group is shown")
    assert list(page.rows()) == [evil]
    wait(lambda: evil in page.text("events"), "its event is shown")
    assert browser.title == "torchft" and page.complaints() == []


@pytest.mark.slow
def test_the_kill_button_asks_first_and_shows_why_it_was_refused(
    browser: Any, lighthouse: LighthouseServer
) -> None:
    from datetime import timedelta

    from torchft.coordination import LighthouseClient

    second = timedelta(seconds=1)
    LighthouseClient(lighthouse.address(), 10 * second).quorum(
        "a", timeout=10 * second, address="http://127.0.0.1:9"
    )
    page = Page(browser, lighthouse.address())
    wait(lambda: page.rows(), "the group is shown")
    for button, question in (("kill", "End this group?"), ("drain", "Let this group leave?")):
        browser.execute_script(f"document.querySelector('#rows button.{button}').click()")
        assert browser.execute_script("return document.getElementById('ask').open")
        assert page.text("question") == question and page.text("victim") == "a" and page.text("refused") == ""
        browser.execute_script("document.getElementById('confirm').click()")
        wait(lambda: page.text("refused"), "the answer is shown")
        assert browser.execute_script("return document.getElementById('ask').open"), "the dialog closed"
        browser.execute_script("document.getElementById('ask').close()")


def test_the_drain_button_drains_a_group(
    browser: Any, lighthouse: LighthouseServer, members: list[Member]
) -> None:
    page = Page(browser, lighthouse.address())
    wait(lambda: page.states() == ["training"] * 3, "three groups train")
    rows = "[...document.querySelectorAll('#rows tr')]"
    browser.execute_script(
        f"{rows}.find(r => r.innerText.includes('member_1')).querySelector('.drain').click()"
    )
    browser.execute_script("document.getElementById('confirm').click()")
    wait(lambda: members[1].process.poll() == 0, "the drained group ends with status 0")
    wait(lambda: page.states() == ["training"] * 2, "two continue")
    wait(lambda: "left as asked (drain)" in page.text("events"), "the drain is shown")
    assert "failed" not in page.text("events"), page.text("events")
    assert page.complaints() == []


def test_the_kill_button_ends_a_group(
    browser: Any, lighthouse: LighthouseServer, members: list[Member]
) -> None:
    page = Page(browser, lighthouse.address())
    wait(lambda: page.states() == ["training"] * 3, "three groups train")
    rows = "[...document.querySelectorAll('#rows tr')]"
    browser.execute_script(
        f"{rows}.find(r => r.innerText.includes('member_2')).querySelector('.kill').click()"
    )
    assert members[2].process.poll() is None, "the first click must only ask"
    browser.execute_script("document.getElementById('confirm').click()")
    wait(lambda: members[2].process.poll() == 1, "the killed group ends")
    wait(lambda: page.event("killed", "member_2"), "the kill is shown")
    wait(lambda: page.states() == ["training"] * 2, "two continue")
    assert (
        not browser.execute_script("return document.getElementById('ask').open") and page.complaints() == []
    )


def test_the_kill_button_takes_the_token(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("a-secret-of-this-job\n")
    token.chmod(0o600)
    monkeypatch.setenv("TORCHFT_TOKEN_FILE", str(token))  # for the processes that are started here
    with lighthouses(tmp_path, ["--min_replicas", "1"], bind="127.0.0.1:0") as (address, _):
        member = Member(0, address, tmp_path)
        try:
            page = Page(browser, address)
            wait(lambda: page.states() == ["training"], "the group trains")
            browser.execute_script("document.querySelector('#rows .kill').click()")
            for guess in ("", "another"):
                browser.execute_script("document.getElementById('token').value = arguments[0]", guess)
                browser.execute_script("document.getElementById('refused').textContent = ''")
                browser.execute_script("document.getElementById('confirm').click()")
                wait(lambda: "kill is refused" in page.text("refused"), "the kill is refused")
            assert member.process.poll() is None
            browser.execute_script("document.getElementById('token').value = 'a-secret-of-this-job'")
            browser.execute_script("document.getElementById('confirm').click()")
            wait(lambda: member.process.poll() == 1, "the group ends")
        finally:
            member.kill()


def test_the_reason_for_a_missing_quorum_is_shown(browser: Any, tmp_path: Path) -> None:
    disk = tmp_path / "state"
    server = LighthouseServer("127.0.0.1:0", min_replicas=2, state_dir=str(disk))
    members = [Member(0, server.address(), tmp_path)]
    try:
        page = Page(browser, server.address())
        wait(lambda: page.states() == ["waiting"], "the group waits")
        assert (
            "Next quorum: 1 member asked, min_replicas is 2. 1 alive, 1 waiting, at least 2 needed."
            in page.text("reason")
        )
        assert page.text("quorum") == "no quorum yet" and page.complaints() == []
        # The page also shows errors that an operator must fix, such as a state directory that was removed.
        assert page.text("unkept") == ""
        shutil.rmtree(disk)
        members.append(Member(1, server.address(), tmp_path))
        wait(
            lambda: "The state of the job is not kept on disk: " in page.text("unkept"),
            "the page shows the error",
        )
    finally:
        for member in members:
            member.kill()
        server.shutdown()


@pytest.mark.slow  # go/lighthouse/http_test.go tests the pages of jobs
def test_each_job_has_its_page(browser: Any, lighthouse: LighthouseServer, tmp_path: Path) -> None:
    members = [
        Member(0, lighthouse.address(), tmp_path),
        Member(1, lighthouse.address(), tmp_path, job="second"),
    ]
    try:
        page = Page(browser, lighthouse.address())
        wait(lambda: page.states() == ["training"], "the first one trains")
        options = "[...document.getElementById('jobs').options].map(o => o.value)"
        wait(
            lambda: browser.execute_script(f"return {options}") == ["default", "second"], "both can be chosen"
        )
        assert "member_0" in next(iter(page.rows()))
        browser.execute_script("""
            const jobs = document.getElementById("jobs");
            jobs.value = "second";
            jobs.dispatchEvent(new Event("change"));
        """)
        wait(lambda: any("member_1" in name for name in page.rows()), "the second one is shown")
        assert len(page.rows()) == 1 and page.complaints() == []
    finally:
        for member in members:
            member.kill()


def test_a_thousand_groups_and_a_narrow_screen(browser: Any, lighthouse: LighthouseServer) -> None:
    page = Page(browser, lighthouse.address())
    wait(lambda: page.text("link") == "live", "the page is live")
    screen = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    try:
        browser.execute_script("""
            const head = {
              quorum_id: 1, groups: 1000, healthy: 1000, waiting: 0, min_replicas: 1, reason: "",
            };
            const rows = Array.from({ length: 1000 }, (_, i) => ({
              replica_id: `train_${String(i).padStart(4, "0")}:5f9c3f0e-9a51-4f0b-8a57-2a4f6d1c7e11`,
              state: i == 999 ? "failed" : "training", since: 0, step: 123456789, world_size: 8,
              address: "http://host-with-a-long-name.example.com:29600",
            }));
            takeChange({ head: { ...head, step: 7 }, rows });
        """)
        wait(lambda: len(page.rows()) == 200, "at most 200 are shown")
        assert page.text("more") == "and 800 more: search for them"
        assert next(iter(page.rows())) == "train_0999:5f9c3f0e…", "failed members come first"
        browser.execute_script("""
            const filter = document.getElementById("filter");
            filter.value = "train_07";
            filter.dispatchEvent(new Event("input"));
        """)
        wait(lambda: len(page.rows()) == 100, "the results of the search are shown")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390, (
            "the page scrolls sideways"
        )
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert page.complaints() == []


def test_the_throughput_has_numbers_and_times(browser: Any, lighthouse: LighthouseServer) -> None:
    page = Page(browser, lighthouse.address())
    wait(lambda: page.text("link") == "live", "the page is live")
    shown = browser.execute_script("""
        const head = {
          quorum_id: 1, groups: 2, healthy: 2, waiting: 1, min_replicas: 1, reason: "", step_us: 50000,
        };
        const began = new Date(2026, 4, 1, 12).getTime();
        // A group with a checkpoint joins after five minutes.
        const points = Array.from({ length: 11 }, (_, i) => ({
          at: began + 60000 * i, step: 1200 * i + (i > 5 ? 1e6 : 0), groups: 2, trained: 1200 * i,
        }));
        const time = new Date(began).toISOString();
        const joined = { id: 1e6, kind: "quorum", time, members: 2, joined: ["a"] };
        takeWhole({ rows: [], events: [joined], last: 1e6, points, head });
        drawSummary();
        drawChart();
        drawEvents();
        const labels = (axis) => [...document.querySelectorAll(`#labels .${axis}`)];
        const texts = (axis) => labels(axis).map((label) => label.innerText);
        const inside = [...document.querySelectorAll("#labels span")].every((label) => {
          const { left, right } = label.getBoundingClientRect();
          return left >= 0 && right <= innerWidth;
        });
        const others = ["rate", "period", "reason", "events"].map((id) => at(id).innerText);
        return [texts("x"), texts("y"), inside, ...others];
    """)
    assert shown[:2] == [
        ["12:00", "12:02", "12:04", "12:06", "12:08", "12:10"],
        ["0", "10", "20", "30", "40"],
    ]
    assert shown[2] is True, "a number is cut off"
    assert shown[3:6] == ["20.0", "50 ms", "2 alive, 1 waiting, at least 1 needed."]
    assert "2 groups train from step 0" in shown[6]
    assert page.complaints() == []


class Refusing(BaseHTTPRequestHandler):
    """Answers like a proxy whose lighthouse is down. A browser does not reconnect by itself after such an
    answer.
    """

    asked = threading.Event()

    def do_GET(self) -> None:
        self.send_error(503)
        self.asked.set()

    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.slow
def test_the_page_notices_the_end_of_a_lighthouse_and_its_successor(browser: Any) -> None:
    port = free_port()
    server = LighthouseServer(f"127.0.0.1:{port}", min_replicas=1)
    try:
        page = Page(browser, server.address())
        wait(lambda: page.text("link") == "live", "the page is live")
    finally:
        server.shutdown()
    wait(lambda: "connection lost" in page.text("link"), "the page shows that the connection broke")
    with HTTPServer(("127.0.0.1", port), Refusing) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            assert Refusing.asked.wait(WAIT_S), "the page does not reconnect"
        finally:
            proxy.shutdown()
            thread.join()
    server = LighthouseServer(f"127.0.0.1:{port}", min_replicas=1)
    try:
        wait(lambda: page.text("link") == "live", "the page is live again")
        assert page.was_not_reloaded()
    finally:
        server.shutdown()


def test_the_lighthouses_of_a_cluster_are_shown(browser: Any, lighthouse: LighthouseServer) -> None:
    page = Page(browser, lighthouse.address())
    wait(lambda: page.text("link") == "live", "the page is live")
    hidden = "return document.getElementById('cluster').hidden"
    assert browser.execute_script(hidden)
    show = """
        const [cluster, done] = arguments;
        state.head.cluster = true;
        const fetched = window.fetch;
        window.fetch = async () => new Response(JSON.stringify(cluster));
        drawCluster().then(done);
        window.fetch = fetched;
    """
    members = [
        {"address": "http://a:1", "leads": False, "voter": True, "reached": True},
        {"address": "http://b:1", "leads": True, "voter": True, "reached": True},
        {"address": "http://c:1", "leads": False, "voter": True, "reached": False},
        {"address": "http://<b>d</b>:1", "leads": False, "voter": False, "reached": True},
    ]
    cluster = {
        "self": "http://a:1",
        "leader": "http://b:1",
        "since_ms": 720_000,
        "members": members,
        "trouble": "",
    }
    browser.execute_async_script(show, cluster)
    assert not browser.execute_script(hidden)
    assert page.text("leader") == "http://b:1 has led for 12 min." and page.text("trouble") == ""
    assert [line.split("\t") for line in page.text("lighthouses").splitlines()] == [
        ["http://a:1", "follower"],
        ["http://b:1", "leader"],
        ["http://c:1", "not reached"],
        ["http://<b>d</b>:1", "not in the cluster"],
    ]
    none = [{**member, "leads": False} for member in members]
    browser.execute_async_script(
        show, {**cluster, "leader": "", "members": none, "trouble": "the disk is full"}
    )
    assert page.text("leader").startswith("None has led for 12 min: 2 of 3 must reach each other.")
    assert page.text("trouble") == "http://a:1: the disk is full"
    assert page.complaints() == []


def test_what_hosts_hold_in_memory_and_write_to_disks_is_shown(
    browser: Any, lighthouse: LighthouseServer
) -> None:
    slot = {
        "job": "j",
        "group": "a",
        "group_rank": 0,
        "group_world_size": 1,
        "quorum": 1,
        "bytes": 50_000_000,
    }
    slots = [
        {**slot, "path": "a/rank-0/0", "step": 700, "saved": time.time() - 720},
        {**slot, "path": "a/rank-0/1", "step": 0, "saved": 0, "incomplete": "it is being written"},
    ]
    disk = {"job": "j", "folder": "/<b>ckpt</b>", "written": 600, "bytes": 0, "since": time.time() - 720}
    disks = [
        disk,
        {**disk, "written": -1, "writing": 700, "bytes": 5_000_000},
        {**disk, "problem": "No space left on device"},
    ]
    report = {"address": "http://b:1", "host": "b", "snapshots": slots, "disks": disks}

    def shown() -> bool:
        told = urllib.request.Request(f"{lighthouse.address()}/api/v1/keepers", json.dumps(report).encode())
        with urllib.request.urlopen(told, timeout=10):  # again and again: it counts for ten seconds
            return "complete" in page.text("disks")

    page = Page(browser, lighthouse.address())
    wait(shown, "the disks are shown")
    rows = "return [...document.querySelectorAll(arguments[0])].map(r => [...r.cells].map(c => c.innerText))"
    assert browser.execute_script(rows, "#slots tr") == [
        ["b", "a", "0", "700", "50.0 MB", "12 min", "complete"],
        ["b", "a", "0", "", "50.0 MB", "", "it is being written"],
    ]
    assert browser.execute_script(rows, "#disks tbody tr") == [
        ["b", "/<b>ckpt</b>", "600", "complete"],
        ["b", "/<b>ckpt</b>", "", "writes step 700: 5.0 MB in 12 min"],
        ["b", "/<b>ckpt</b>", "600", "for 12 min: No space left on device"],
    ]
    assert page.complaints() == []


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_page_follows_the_lighthouses_that_fail(browser: Any, tmp_path: Path) -> None:
    """Also the last one, which cannot lead alone, says so on a page that is open."""
    with lighthouses(tmp_path, ["--min_replicas", "1"], 3) as (addresses, _):
        each = addresses.split(",")
        wait(lambda: led(each[0]), "one leads")
        member = Member(0, addresses, tmp_path)
        try:
            page = Page(browser, each[0])
            wait(lambda: page.states() == ["training"], "the group trains")
            wait(lambda: page.text("lighthouses").count("follower") == 2, "the lighthouses are shown")
            assert page.text("leader").startswith(f"{led(each[0])} has led for ")
            for other in each[1:]:
                end_lighthouse(other)
            wait(lambda: page.text("lighthouses").count("not reached") == 2, "the others are not reached")
            wait(lambda: page.text("leader").startswith("None has led for "), "it cannot lead alone")
            assert page.was_not_reloaded()
        finally:
            member.kill()


def led(address: str) -> str:
    """The leader as a lighthouse knows it; empty if it knows none."""
    return str(HttpLighthouse(address).get("/cluster")["leader"])


def end_lighthouse(address: str) -> None:
    bind = f"--bind\0{address.removeprefix('http://')}\0"
    for pid in process_tree.tree(os.getpid()):
        if bind in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGKILL)


def test_a_page_that_is_open_for_a_day_keeps_only_data_that_it_shows(
    browser: Any, lighthouse: LighthouseServer
) -> None:
    page = Page(browser, lighthouse.address())
    wait(lambda: page.text("link") == "live", "the page is live")
    kept = browser.execute_script("""
        const head = { quorum_id: 1, groups: 2, healthy: 2, waiting: 0, min_replicas: 1, reason: "" };
        const row = { state: "training", since: 0, step: 0, world_size: 1, address: "http://localhost:1" };
        for (let second = 0; second < 86400; second++) {
          // Each minute a group comes back under a new name.
          const minute = Math.floor(second / 60);
          const removed = second % 60 ? undefined : [`group:${minute - 1}`];
          const point = { at: 1000 * second, step: second, groups: 2, trained: second };
          const rows = [{ ...row, replica_id: `group:${minute}` }];
          takeChange({ head: { ...head, step: second }, rows, removed, point });
          const failed = { id: 1e6 + minute, kind: "failed", time: "2026-01-02T03:04:05Z", left: ["a"] };
          if (!(second % 60)) keepEvent(failed);
        }
        drawEvents();
        return [state.points.length, state.events.length, state.rows.size, at("events").children.length];
    """)
    points, events, rows, items = kept
    assert points <= 4000 and events <= 300 and items <= 300 and rows == 1, kept
    assert page.complaints() == []


def test_events_of_another_day_show_their_date(browser: Any, lighthouse: LighthouseServer) -> None:
    page = Page(browser, lighthouse.address())
    wait(lambda: page.text("link") == "live", "the page is live")
    old, now = browser.execute_script("""
        const text = (time) => new Date(time).toISOString();
        const event = (id, time) => keepEvent({ id, kind: "failed", time: text(time), left: ["a"] });
        event(1e6, Date.now() - 40 * 86400e3);
        event(1e6 + 1, Date.now());
        drawEvents();
        return [...document.querySelectorAll("#events time")].reverse().map((time) => time.innerText);
    """)
    assert re.fullmatch(r"\S+ \S+\s\d\d:\d\d:\d\d", old), old
    assert re.fullmatch(r"\d\d:\d\d:\d\d", now), now
    yesterday = browser.execute_script("""
        const RealDate = Date;
        const later = RealDate.now() + 2 * 86400e3;
        Date = class extends RealDate {
          constructor(...given) { super(...(given.length ? given : [later])); }
        };
        try { redate(); } finally { Date = RealDate; }
        return document.querySelector("#events time").innerText;
    """)
    assert re.fullmatch(r"\S+ \S+\s\d\d:\d\d:\d\d", yesterday), (
        "a page that stays open until another day shows no date"
    )
    assert page.complaints() == []
