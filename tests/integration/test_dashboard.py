"""The dashboard of a real job, read and used in a real browser, through a kill, a join, a drain, a hang and a restart
of the driver. The page is loaded once."""

from __future__ import annotations

import asyncio
import copy
import re
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from elasticstate.core.ids import WorkerId
from elasticstate.core.state import Running, Straggler
from elasticstate.core.types import CopyFigures
from elasticstate.driver.dashboard.charts import Sampler
from elasticstate.driver.dashboard.server import Controls, DashboardServer
from elasticstate.driver.dashboard.view import History, View, view_of
from elasticstate.driver.job import JobState
from elasticstate.driver.output import Tails
from elasticstate.failures import WorkerFailure
from elasticstate.net import messages
from elasticstate.net.names import listening_socket, own_addresses, port_of
from elasticstate.net.trust import Strangers
from tests.kit.browser import NO_CHROMIUM, TIMEOUT_MS, WHY, opened, soon, url_of
from tests.kit.core import ALL_KEPT, NEWER, attach, drive
from tests.kit.driver import state_after
from tests.kit.job import Hosts, Job
from tests.kit.policy import policy_of
from tests.kit.series import Series, faults_file

pytestmark = pytest.mark.skipif(NO_CHROMIUM, reason=WHY)

FAST = ("--join-window", "30", "--min-interrupt-distance", "0.2", "--heartbeat-timeout", "2")
FAST = (*FAST, "--cooldown-range", "0", "600", "--hang-timeout", "5")
EVIL = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
SCRIPT = {"steps": 10, "step_seconds": 0.05}


def members(page: Page, count: int) -> None:
    """Wait until the map shows so many members, each with its rank, ticks and ages."""
    cells = page.get_by_role("gridcell").filter(has_text="member")
    expect(cells).to_have_count(count, timeout=TIMEOUT_MS)
    for rank in range(count):
        cell = cells.filter(has_text=f"rank {rank}")
        soon(cell, re.compile(r"tick [1-9]\d*heartbeat [\d.]+ s agocommit [\d.]+ s ago"))


def generation(page: Page, cause: str) -> None:
    """Wait until the newest world has this cause."""
    soon(page.get_by_role("region", name="Generations").locator("tbody tr").first, cause)


def confirm(page: Page, action: str, token: str) -> None:
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Token of the job").fill(token)
    dialog.get_by_role("button", name=action, exact=True).click()


def test_a_page_shows_a_job_through_all_its_changes(tmp_path: Path) -> None:
    hosts, name, errors = Hosts(tmp_path).set("localhost:2"), f"dashboard-{uuid.uuid4().hex[:8]}", list[str]()
    options = ("-np", "2", "--min-np", "1", *hosts.options, "--dashboard", "0", "--job-name", name)
    options = (*options, "--durable-dir", str(tmp_path / "durable"), "--durable-interval", "2")
    script = {**SCRIPT, "until": tmp_path / "stop", "faults_file": faults_file(tmp_path), "metric": ["steps", EVIL]}
    with Job(tmp_path, *options, *FAST, **script) as job:
        url = url_of(job)
        assert job.output.splitlines()[0] == f"elasticrun: dashboard: {url}"
        with opened(url, errors) as page:
            expect(page.get_by_role("heading", level=1)).to_have_text(f"{name} running", timeout=TIMEOUT_MS)
            expect(page.get_by_role("status")).to_have_text("Live")
            page.evaluate("window.loaded = 'once'")
            members(page, 2)
            values_and_use_are_shown(page)
            durable_copies_are_saved(page)
            a_worker_is_killed(job, page)
            a_host_joins_and_is_drained(hosts, name, page)
            a_worker_hangs(job, page)
            a_collective_hangs(job, page)
            the_driver_is_restarted(job, name, url, page)
            the_output_of_a_worker_is_shown(page)
            the_past_stays_on_the_page(job, page)
            the_page_fits_a_phone(page)
            page.get_by_role("button", name="End the job …").click()
            confirm(page, "End the job", token_of(name))
            expect(page.get_by_role("status")).to_have_text("The job has ended.", timeout=TIMEOUT_MS)
            assert page.evaluate("window.loaded") == "once"
            assert page.evaluate("window.hacked") is None
        job.finish(status=128 + signal.SIGTERM)
    assert not errors


def token_of(name: str) -> str:
    command = [sys.executable, "-m", "elasticstate", "status", name, "--token"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def values_and_use_are_shown(page: Page) -> None:
    for name in ("steps", EVIL):
        soon(page.get_by_role("figure").filter(has_text=name), re.compile(r"[1-9]\d*of rank 0; 2 ranks: \d+ to \d+"))
    for name in ("ticks per second", "processors", "memory"):
        expect(page.get_by_role("img", name=re.compile(f"{name}: newest"))).to_be_visible(timeout=TIMEOUT_MS)
    soon(page.get_by_role("region", name="Use of the hosts"), re.compile(r"localhost[\d.]+ %[\d.]+ GB of [\d.]+ GB"))
    expect(page.get_by_role("img", name=re.compile("GPUs"))).to_have_count(has_gpus(page))


def has_gpus(page: Page) -> int:
    """Return the number of charts for GPUs, of which this machine may have some."""
    return 2 * page.get_by_role("columnheader", name="GPUs", exact=True).count()


def mark(page: Page, name: str) -> None:
    """Wait for a mark on the time axis."""
    expect(page.get_by_role("button", name=re.compile(name)).first).to_be_visible(timeout=TIMEOUT_MS)


def durable_copies_are_saved(page: Page) -> None:
    commits = page.get_by_role("region", name="Commits")
    soon(commits, re.compile(r"newest durable copy\(\d+, \d+\)[\d.]+ s ago, [\d.]+ kB"))
    soon(commits, re.compile(r"durable copies[1-9]\d* saved0 failed"))
    expect(commits).not_to_contain_text(re.compile("commit line|replica"))


def a_worker_is_killed(job: Job, page: Page) -> None:
    job.kill(1)
    failures = page.get_by_role("region", name="Failures")
    soon(failures, re.compile(r"localhost:1 ended: SIGKILL \(rank \d, generation \d+\)"))
    soon(page.get_by_role("region", name="Generations").locator("tbody tr", has_text="left: localhost:1#1"), "SIGKILL")
    members(page, 2)
    soon(page.get_by_role("region", name="Numbers"), "1 failure")
    expect(page.get_by_role("link", name="1 failure")).to_be_visible()
    mark(page, "worker or host lost: localhost:1 ended: SIGKILL")
    mark(page, "joined: .*localhost:1#2")


def a_host_joins_and_is_drained(hosts: Hosts, name: str, page: Page) -> None:
    hosts.set("localhost:2", "127.0.0.2:1")
    members(page, 3)
    generation(page, "joined: 127.0.0.2:0#1")
    page.get_by_role("button", name="Drain host 127.0.0.2", exact=True).click()
    confirm(page, "Drain", "x" * 40)
    expect(page.get_by_role("alert")).to_have_text("This is not the token of the job.", timeout=TIMEOUT_MS)
    confirm(page, "Drain", token_of(name))
    expect(page.get_by_role("dialog")).to_be_hidden()
    members(page, 2)
    generation(page, "left: 127.0.0.2:0#1")
    soon(page.get_by_role("region", name="Discovery and cooldowns"), "127.0.0.2: in cooldown")
    soon(page.get_by_role("log", name="Lines of elasticrun"), "host 127.0.0.2 drains: preemption notice: the dashboard")
    mark(page, "joined: .*joined: 127.0.0.2:0#1")  # one mark, if another worker has just joined
    mark(page, "left as planned: host 127.0.0.2 drains: the dashboard")
    hosts.set("localhost:2")


def a_worker_hangs(job: Job, page: Page) -> None:
    job.kill(1, number=signal.SIGSTOP)
    failures = page.get_by_role("region", name="Failures")
    soon(failures, re.compile(r"localhost:1 ended: SIGKILL \(no heartbeat .*rank \d"))
    mark(page, "worker hung: localhost:1 ended: SIGKILL .no heartbeat")
    members(page, 2)


def a_collective_hangs(job: Job, page: Page) -> None:
    series = Series(job, 2)
    series.wait_until_whole()
    series.arm("deadlock@step:rank=1:generation={now}")
    lines = page.get_by_role("log", name="Lines of elasticrun")
    soon(lines, re.compile(r"all_reduce\(Float\[\d+\]\) .* was entered by rank 0 and not by rank 1"))
    failures = page.get_by_role("region", name="Failures")
    soon(failures, re.compile(r"ended: SIGKILL \(no tick for --hang-timeout of 5 s.*rank 1"))
    members(page, 2)


def the_driver_is_restarted(job: Job, name: str, url: str, page: Page) -> None:
    rows = page.get_by_role("region", name="Generations").locator("tbody tr")
    before = rows.count()
    job.kill_driver()
    expect(page.get_by_role("status")).to_have_text("Connection lost. Trying again …", timeout=TIMEOUT_MS)
    job.start("--reattach", name)
    assert url_of(job, 2) == url
    expect(page.get_by_role("status")).to_have_text("Live", timeout=TIMEOUT_MS)
    soon(page.get_by_role("log", name="Lines of elasticrun"), "driver 2 reattached")
    members(page, 2)
    assert rows.count() >= before, "the history of the first driver is lost"
    soon(page.get_by_role("region", name="Failures"), "SIGKILL")
    mark(page, "driver restarted")
    mark(page, "worker hung")


def the_past_stays_on_the_page(job: Job, page: Page) -> None:
    """By the keyboard, which gets to each mark and shows its text."""
    expect(page.get_by_role("link", name=re.compile(r"[34] failures"))).to_be_visible()
    failures = page.get_by_role("region", name="Failures")
    soon(failures, re.compile(r"no tick.*no heartbeat.*localhost:1 ended: SIGKILL \(rank", re.DOTALL))
    page.get_by_role("button", name=re.compile("driver restarted")).click()
    page.keyboard.press("Home")
    first = page.get_by_role("button", pressed=True)
    expect(first).to_be_focused()
    joins = [worker for world in job.events("world_formed")[1:] for worker in world["joined"] if worker.endswith("#1")]
    is_whole = not joins or joins[0].startswith("127.0.0.2")  # else one of the two has booted late
    earliest = "localhost:1 ended: SIGKILL" if is_whole else f"joined: {joins[0]}"
    expect(page.locator("#mark-text")).to_contain_text(earliest)
    words = page.get_by_role("list", name="Legend").get_by_role("listitem")
    expect(words).to_have_text(["worker or host lost", "worker hung", "left as planned", "joined", "driver restarted"])


def the_page_fits_a_phone(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.evaluate(CUT_OFF) == []
    page.set_viewport_size({"width": 1280, "height": 1000})


CUT_OFF = """() => [...document.querySelectorAll('header, header *, main, main *')].filter((e) => {
  if (e.closest('.hidden, .skip, thead') || !e.getClientRects().length) return false;
  const hides = getComputedStyle(e).overflowX !== 'visible' && e.scrollWidth > e.clientWidth + 1;
  return hides || e.getBoundingClientRect().right > 391 || e.getBoundingClientRect().left < -1;
}).map((e) => e.outerHTML.slice(0, 200))"""


def the_output_of_a_worker_is_shown(page: Page) -> None:
    """By the keyboard alone."""
    page.get_by_role("gridcell", name="").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    detail = page.get_by_role("region", name="Selected worker")
    soon(detail, re.compile(r"localhost:1, member, rank \d, in train, tick \d+"))
    expect(detail.get_by_role("log", name="stdout of localhost:1")).to_be_visible()


# ------------------------------------------------------------------------------------------------------ hostile texts


def hostile(value: Any) -> Any:
    """Return a view in which each text is hostile, too, except states."""
    if isinstance(value, dict):
        return {key: hostile(inner) if key not in ("state", "phase", "kind") else inner for key, inner in value.items()}
    if isinstance(value, list):
        return value if value and isinstance(value[0], float) else [EVIL]  # points of a curve, or texts
    return value + EVIL if isinstance(value, str) else value


@contextmanager
def served(view: View, address: str = "127.0.0.1") -> Iterator[str]:
    """Serve a view of no job, from a thread. Yield the address."""
    loop, listening = asyncio.new_event_loop(), listening_socket(address, 0)
    tails = Tails(lambda _, message: tails.received(messages.OutputTail(message.worker, EVIL, EVIL)))
    worker = WorkerId("a", 0, 1)
    controls = Controls(lambda: copy.deepcopy(view), lambda slot: worker, tails, lambda host: EVIL, lambda: EVIL)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    async def started() -> DashboardServer:
        server = DashboardServer(controls, "t" * 40)
        await server.start(listening, Strangers(10.0, lambda *_: None))
        return server

    server = run(started())
    try:
        yield f"http://{address}:{port_of(listening)}/"
    finally:
        run(server.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def commits_in_trouble() -> View:
    """Return the part of the view about a sharded job and durable copies that both have a trouble."""
    m, _ = attach(durable_dir="/copies")
    m, _ = drive(f"2.0 {ALL_KEPT.format('1.0')} + {NEWER}\n2.1 dropped b b:0 1.5", m)
    state = JobState(policy_of(np=3, min_np=1), 0.0)
    state.membership, state.durable.failed, state.durable.trouble = m, 3, "no space is left"
    state.copies.update("a", CopyFigures(3_000_000, 5, 5), 2.0)
    view = view_of("j", state, History(), 2.2, 1000.0)
    return {"shards": view["shards"], "durable": view["durable"]}


def test_troubles_with_copies_are_told_in_words() -> None:
    view, errors = {**view_of("j", state_after(5), History(), 4.5, 1000.0), **commits_in_trouble()}, list[str]()
    with served(view) as url, opened(url, errors) as page:
        troubles = page.get_by_role("list", name="Troubles with copies").get_by_role("listitem")
        expect(troubles).to_have_text(
            [
                "Replication: the last attempt to replicate failed",
                "Durable copies: the last attempt failed: no space is left",
            ],
            timeout=TIMEOUT_MS,
        )
        commits = page.get_by_role("region", name="Commits")
        soon(
            commits, re.compile(r"commit line\(1, 5\).*replicated commit\(1, 0\).*replicationwaits.*none yet.*3 failed")
        )
    assert not errors


def test_texts_of_a_job_never_become_a_part_of_the_page() -> None:
    history, state = History(), state_after(6)
    history.failure(WorkerFailure("failed", "a", 0, error="Traceback"), 1.0)
    history.line("a line", 1.0)
    fields = {"generation": 1, "size": 2, "hosts": 1, "joined": [], "left": ["a:0#1"]}
    history.event("world_formed", fields, 1.0)
    state.copies.update("a", CopyFigures(1, 1, 1), 1.0)
    values = ((f"loss{EVIL}", 1.0), ("__proto__", 2.0), ("constructor", float("nan")))
    state.readings.update(
        "a", messages.Stamps((), metrics=((next(iter(state.membership.workers)), values),)), state.membership, 1.0
    )
    Sampler(history.charts, state)(5.0)
    view = hostile({**view_of("j", state, history, 9.0, 1000.0), **commits_in_trouble()})
    view["shards"]["memory"] = {f"h{EVIL}": 2_000_000}
    view["hosts"][f"h{EVIL}"] = {**view["hosts"]["a"], "state": "lost", "why": EVIL}
    errors = list[str]()
    with served(view) as url, opened(url, errors) as page:
        expect(page.get_by_role("heading", level=1)).to_contain_text(f"j{EVIL}", timeout=TIMEOUT_MS)
        for name in ("Failures", "Generations", "Discovery and cooldowns", "Commits"):
            soon(page.get_by_role("region", name=name), EVIL)
        expect(page.get_by_role("figure").filter(has_text=f"loss{EVIL}")).to_be_visible()
        expect(page.get_by_role("figure").filter(has_text="__proto__")).to_contain_text("2")
        expect(page.get_by_role("button", name=f"host lost: failed{EVIL}")).to_be_visible()
        page.get_by_text("Memory of copies by host").click()
        soon(page.get_by_role("region", name="Commits").get_by_role("table"), f"h{EVIL}")
        page.get_by_role("gridcell").first.click()
        soon(page.get_by_role("log", name="stdout of a:0"), EVIL)
        page.get_by_role("button", name="End the job …").click()
        confirm(page, "End the job", "t" * 40)
        soon(page.get_by_role("alert"), EVIL)
        assert page.evaluate("document.scripts.length") == 1
        assert page.evaluate("document.images.length") == 0
        assert page.evaluate("window.hacked") is None
    assert not errors


def test_a_host_may_have_the_name_of_a_property_of_objects() -> None:
    view, errors, names = (
        view_of("j", state_after(5), History(), 4.5, 1000.0),
        list[str](),
        ("__proto__", "constructor"),
    )
    with served(view) as url, opened(url, errors) as page:
        page.evaluate("window.properties = () => JSON.stringify(Object.getOwnPropertyNames(Object.prototype))")
        before = page.evaluate("properties()")
        cells = page.get_by_role("gridcell")
        expect(cells).to_have_count(2, timeout=TIMEOUT_MS)
        for order, name in enumerate(names, 2):  # as changes of the view that the page has
            view["hosts"][name] = {"state": "joined", "slots": 1, "order": order}
            view["workers"][f"{name}:0"] = {"state": "empty", "why": "no worker yet"}
        expect(cells).to_have_count(4, timeout=TIMEOUT_MS)
        for name in names:
            soon(page.get_by_role("row", name=name), "joined")
            view["hosts"][name]["state"] = "lost"
        for name in names:
            soon(page.get_by_role("row", name=name), "lost")
        assert page.evaluate("properties()") == before
        host = {"state": "joined", "slots": 40}
        long = ("gpu-node-01.rack-7", "gpu-node-02.rack-7", "node-3.rack-8")
        view["hosts"] = {f"{name}.example.com": {**host, "order": order} for order, name in enumerate(long)}
        shown = page.get_by_role("rowheader").locator("span")  # of a map with many slots
        expect(shown).to_have_text(["…de-01.rack-7", "…de-02.rack-7", "node-3.rack-8"], timeout=TIMEOUT_MS)
    assert not errors


@pytest.mark.skipif(not own_addresses(), reason="this machine has only the loopback interface")
def test_a_page_beyond_loopback_asks_for_the_token_first() -> None:
    view, errors = view_of("j", with_straggler(state_after(5)), History(), 4.5, 1000.0), list[str]()
    with served(view, own_addresses()[0]) as url, opened(url, errors) as page:
        expect(page.get_by_role("dialog", name="This page needs the token")).to_be_visible(timeout=TIMEOUT_MS)
        expect(page.get_by_role("gridcell")).to_have_count(0)
        confirm(page, "Open", "t" * 40)
        expect(page.get_by_role("status")).to_have_text("Live", timeout=TIMEOUT_MS)
        expect(page.get_by_role("gridcell")).to_have_count(2)
        stragglers = page.get_by_role("region", name="Stragglers")
        expect(stragglers.get_by_role("listitem")).to_have_text("a:1#1 (rank 1): 1.50 times the own time of the others")
    assert not errors


def with_straggler(state: JobState) -> JobState:
    phase = state.membership.phase
    assert isinstance(phase, Running)
    straggler = Straggler(WorkerId("a", 1, 1), 1, 0.0, 1.5)
    state.membership = replace(state.membership, phase=replace(phase, stragglers=(straggler,)))
    return state
