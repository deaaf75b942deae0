"""The dashboard without a browser: views and their differences, who may see and act, its option."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from aiohttp import ClientSession, ClientTimeout
from hypothesis import given, strategies as st

from elasticstate.core.ids import SlotId, WorkerId
from elasticstate.driver.dashboard.server import (
    INTERVAL_S,
    QUIET_INTERVAL_S,
    Controls,
    DashboardServer,
    Guard,
    Viewers,
    Visit,
    is_from_proxy,
)
from elasticstate.driver.dashboard.view import History, decoded, difference, view_of
from elasticstate.driver.output import Tails
from elasticstate.driver.status import overview_of
from elasticstate.errors import OptionError
from elasticstate.failures import WorkerFailure
from elasticstate.net import messages
from elasticstate.net.names import listening_socket, own_addresses, port_of
from elasticstate.net.trust import Strangers
from elasticstate.options import read_options
from tests.kit.driver import Clock, state_after

TOKEN = "t" * 40
VALUES = st.recursive(
    st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=4),
    max_leaves=12,
)
VIEWS = st.dictionaries(st.sampled_from("abcd"), VALUES, max_size=4)


def merged(target: Any, patch: Any) -> Any:
    """Apply a patch as RFC 7396, section 2, defines."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


@given(VIEWS, VIEWS)
def test_a_patch_changes_the_old_view_to_the_new_one(old: dict[str, Any], new: dict[str, Any]) -> None:
    patch = json.loads(json.dumps(difference(old, new)))
    assert merged(old, patch) == new
    assert (patch == {}) == (old == new)


@pytest.mark.parametrize("lines", range(1, 14))
def test_the_view_has_the_numbers_of_the_status(lines: int) -> None:
    state = state_after(lines)
    view = view_of("j", state, History(), 21.0, 1000.0)
    overview, _ = overview_of("j", state.membership, "training", 21.0)
    assert json.loads(json.dumps(view)) == view
    assert view["world"] == {"generation": overview.generation, "size": overview.size, "living": overview.living}
    figures = {key: value for key, value in overview.figures.items() if value is not None}
    assert view["figures"] == {**figures, "ticks": overview.ticks}
    states = [worker["state"] for worker in view["workers"].values()]
    assert {s: states.count(s) for s in states if s != "empty"} == {s: n for s, n in overview.workers.items() if n}


def test_a_view_has_the_age_of_heartbeats_and_commits() -> None:
    view = view_of("j", state_after(5), History(), 4.5, 1000.0)
    assert view["workers"]["a:1"] == {
        "state": "member",
        "name": "a:1#1",
        "place": "train",
        "tick": 11,
        "seen": 1004.0,
        "rank": 1,
        "commit": "(1, 10)",
        "commit_at": 1004.0,
    }
    assert view["commit"]["id"] == "(1, 10)"
    assert view["commit"]["at"] == 1004.0


def test_the_next_driver_continues_the_history() -> None:
    history = History()
    fields = {"generation": 1, "size": 2, "hosts": 1, "joined": ["a:0#1"], "left": []}
    history.event("world_formed", fields, 5.0)
    history.event("end", {"generation": 1, "cause": "a joined"}, 6.0)
    account = {"generation": 1, "wall_s": 2.0, "goodput_s": 1.0}
    history.event("generation_finished", account, 7.0)
    history.event("world_formed", {**fields, "generation": 2}, 7.0)
    assert decoded(msgspec.json.encode(history)) == history
    assert decoded(b"{") == History()
    causes = {number: entry["cause"] for number, entry in history.generations.items()}
    assert causes == {"1": "start of the job", "2": "a joined"}
    assert history.generations["1"]["until"] == 7.0


def test_the_cause_of_a_world_is_the_failure_and_not_what_a_survivor_reports() -> None:
    history = History()
    fields = {"generation": 2, "size": 1, "hosts": 1, "joined": [], "left": ["a:1#1"]}
    history.event("worker_unresponsive", {"worker": "a:1#1", "reason": "no heartbeat for 2 s"}, 1.0)
    history.event("end", {"generation": 1, "cause": "a:0#1 reported a broken generation"}, 1.0)
    history.failure(WorkerFailure("a:1 ended: SIGKILL", "a", 1, 1, 1, signal=9, error="Traceback"), 1.0)
    history.event("world_formed", fields, 2.0)
    cause = "a:1 ended: SIGKILL (no heartbeat for 2 s)"
    assert history.generations["2"]["cause"] == cause
    (failure,) = history.failures.values()
    about = {"worker": "a:1", "rank": 1, "generation": 1}
    assert failure == {"reason": cause, **about, "at": 1.0, "error": "Traceback"}
    history.failure(WorkerFailure("a:1 ended: SIGKILL", "a", 1, 1, 2, signal=9), 3.0)
    history.event("end", {"generation": 2, "cause": "a:2#1 joins"}, 4.0)
    history.event("world_formed", {**fields, "generation": 3, "left": []}, 5.0)
    assert history.generations["3"]["cause"] == "a:2#1 joins", "a late end of a worker that had left already"


def test_the_history_is_bounded() -> None:
    history = History()
    for number in range(1000):
        history.line("x" * 10_000, float(number))
    assert len(history.lines) <= 200
    assert len(json.dumps(history.lines)) < 200_000
    assert list(history.lines.values())[-1]["at"] == 999.0


# ------------------------------------------------------------------------------------------------------ who may what

NEAR = Visit("127.0.0.1", "127.0.0.1:80")
FAR = Visit("192.0.2.7", "192.0.2.1:80")


@pytest.mark.parametrize(
    ("visit", "is_refused"),
    [
        (NEAR, False),
        (Visit("127.0.0.1", "localhost:80"), False),
        (Visit("::1", "[::1]:80"), False),
        (Visit("127.0.0.1", "evil.example:80"), True),
        (Visit("127.0.0.1", "127.0.0.1.evil.example"), True),
        (Visit("127.0.0.1", ""), True),
        (Visit("127.0.0.1", "localhost:80", fetch_site="cross-site"), True),
        (Visit("127.0.0.1", "localhost:80", fetch_site="same-site"), True),
        (Visit("127.0.0.1", "localhost:80", fetch_site="same-origin"), False),
        (Visit("127.0.0.1", "localhost:80", origin="http://evil.example"), True),
        (Visit("127.0.0.1", "localhost:80", origin="http://localhost:81"), True),
        (Visit("127.0.0.1", "localhost:80", origin="null"), True),
        (Visit("127.0.0.1", "localhost:80", origin="http://localhost:80"), False),
    ],
)
def test_requests_of_other_sites_and_for_other_names_are_refused(visit: Visit, is_refused: bool) -> None:
    assert bool(Guard(TOKEN, requires_token=False).refuse(visit)) == is_refused


@pytest.mark.parametrize(
    ("peer", "forwarded", "authorization", "sees", "acts"),
    [
        ("127.0.0.1", False, "", True, False),
        ("127.0.0.2", False, "", True, False),
        ("::1", False, "", True, False),
        ("::ffff:127.0.0.1", False, "", True, False),
        ("127.0.0.1", True, "", False, False),
        ("192.0.2.7", False, "", False, False),
        ("", False, "", False, False),
        ("192.0.2.7", False, f"Bearer {TOKEN}", True, True),
        ("192.0.2.7", False, f"Bearer {TOKEN[:-1]}", False, False),
        ("127.0.0.1", False, "Bearer ", True, False),
        ("127.0.0.1", False, f"Basic {TOKEN}", True, False),
    ],
)
def test_seeing_needs_loopback_or_the_token_and_acting_the_token(
    peer: str, forwarded: bool, authorization: str, sees: bool, acts: bool
) -> None:
    visit = Visit(peer, "127.0.0.1:80", is_forwarded=forwarded, authorization=authorization)
    guard = Guard(TOKEN, requires_token=False)
    assert (guard.may_see(visit), guard.has_token(visit)) == (sees, acts)
    assert Guard(TOKEN, requires_token=True).may_see(visit) == acts


@pytest.mark.parametrize(
    ("headers", "version", "is_found"),
    [
        (("Host", "Accept", "User-Agent", "Origin", "Sec-Fetch-Site", "Cookie", "Authorization"), (1, 1), False),
        (("Host", "Connection"), (1, 0), True),
        *((("Host", name), (1, 1), True) for name in ("forwarded", "Via", "X-Forwarded-Host", "X-REAL-IP")),
        *((("Host", name), (1, 1), True) for name in ("CF-Ray", "X-Envoy-External-Address", "X-Request-ID")),
    ],
)
def test_signs_of_a_proxy(headers: tuple[str, ...], version: tuple[int, int], is_found: bool) -> None:
    assert is_from_proxy(headers, version) == is_found


class Served:
    """A dashboard that listens, with the actions that were carried out."""

    def __init__(self) -> None:
        self.drained: list[str] = []
        self.ends = 0
        self.state = state_after(5)
        self.tails = Tails(self._fetch)
        self.controls = Controls(
            view=lambda: view_of("j", self.state, History(), 4.5, 1000.0),
            worker_in=lambda slot: WorkerId(*slot, 1) if slot == SlotId("a", 0) else None,
            tails=self.tails,
            drain=lambda host: self.drained.append(host) or "",  # type: ignore[func-returns-value]
            end=self._end,
        )

    def _fetch(self, host: str, message: messages.ToAgent) -> None:
        assert isinstance(message, messages.FetchOutput)
        tail = messages.OutputTail(message.worker, "<script>alert(1)</script>", "oops")
        asyncio.get_running_loop().call_soon(self.tails.received, tail)

    def _end(self) -> str:
        self.ends += 1
        return "" if self.ends == 1 else "The job is ending already."


def on_server(scenario: Any, address: str = "127.0.0.1", requires_token: bool = False) -> Served:
    """Run ``scenario(session, url)`` at a server, and close it."""
    served = Served()

    async def run() -> None:
        listening = listening_socket(address, 0)
        url = f"http://{address}:{port_of(listening)}"
        server = DashboardServer(served.controls, TOKEN, requires_token)
        await server.start(listening, Strangers(10.0, lambda *_: None))
        async with ClientSession(timeout=ClientTimeout(30)) as session:
            await scenario(session, url)
            await server.close()

    asyncio.run(run())
    return served


ROUTES = [("GET", "/", 200), ("GET", "/events", 200), ("GET", "/output?slot=a:0", 200), ("POST", "/drain", 401)]
ROUTES += [("POST", "/end", 401)]


@pytest.mark.parametrize(("method", "path", "status"), ROUTES)
def test_each_route_on_loopback(method: str, path: str, status: int) -> None:
    async def ask(session: ClientSession, url: str) -> None:
        strange = ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"})
        for headers in strange:
            with_token = {**headers, "Authorization": f"Bearer {TOKEN}"}
            async with session.request(method, url + path, headers=with_token) as answer:
                assert answer.status == 403, headers
                assert "j" not in (await answer.text()).split()
        forwarded = 200 if path == "/" else 401
        async with session.request(method, url + path, headers={"X-Forwarded-For": "127.0.0.1"}) as answer:
            assert answer.status == forwarded
        async with session.request(method, url + path) as answer:
            assert answer.status == status
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["Cache-Control"] == "no-store"

    served = on_server(ask)
    assert (served.drained, served.ends) == ([], 0)


@pytest.mark.skipif(not own_addresses(), reason="this machine has only the loopback interface")
@pytest.mark.parametrize(("method", "path", "status"), ROUTES)
def test_each_route_beyond_loopback_needs_the_token(method: str, path: str, status: int) -> None:
    async def ask(session: ClientSession, url: str) -> None:
        without = ({}, {"Authorization": "Bearer "}, {"Authorization": f"Bearer {TOKEN}x"}, {"Cookie": TOKEN})
        for headers in without:
            async with session.request(method, url + path, headers=headers) as answer:
                assert answer.status == (200 if path == "/" else 401), headers
                text = await answer.text()
                assert not re.search(r"training|a:0", text), "a stranger sees the job"
        async with session.request(method, url + path, headers={"Authorization": f"Bearer {TOKEN}"}) as answer:
            assert answer.status == (400 if path == "/drain" else 200)

    served = on_server(ask, own_addresses()[0])
    assert (served.drained, served.ends) == ([], int(path == "/end"))


def test_an_action_with_the_token_is_carried_out() -> None:
    async def act(session: ClientSession, url: str) -> None:
        token = {"Authorization": f"Bearer {TOKEN}"}
        cases = [("/drain", b'{"host": "a"}', 200), ("/drain", b"{}", 400), ("/drain", b"[", 400), ("/end", b"", 200)]
        for path, body, status in [*cases, ("/end", b"", 409), ("/drain", b"x" * 9000, 413)]:
            async with session.post(url + path, data=body, headers=token) as answer:
                assert answer.status == status, (path, body)
        async with session.get(url + "/end", headers=token) as answer:
            assert answer.status == 405
        async with session.get(url + "/nothing", headers=token) as answer:
            assert answer.status == 404

    served = on_server(act)
    assert (served.drained, served.ends) == (["a"], 2)


async def next_event(lines: Any) -> tuple[str, dict[str, Any]]:
    """Return the next server-sent event that is not a comment."""
    kind = ""
    async for line in lines:
        text = line.decode().rstrip("\n")
        if text.startswith("event: "):
            kind = text[7:]
        elif text.startswith("data: "):
            return kind, json.loads(text[6:])
    raise AssertionError("the stream has ended")


def test_a_viewer_gets_the_view_then_its_changes_then_the_end() -> None:
    async def watch(session: ClientSession, url: str) -> None:
        async with session.get(url + "/events") as answer:
            assert answer.content_type == "text/event-stream"
            kind, first = await next_event(answer.content)
            assert (kind, first["content"]["job"]["reason"]) == ("view", "training")
            served_now[0].state.reason = "another reason"
            kind, second = await next_event(answer.content)
            assert (kind, second["content"]) == ("patch", {"job": {"reason": "another reason"}})

    served_now: list[Served] = []
    with remembered(served_now):
        on_server(watch)


@contextmanager
def remembered(into: list[Served]) -> Iterator[None]:
    original = Served.__init__

    def init(self: Served) -> None:
        original(self)
        into.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Served, "__init__", init)
        yield


def test_changes_are_sent_after_an_event_and_otherwise_less_often() -> None:
    times: list[float] = []

    async def watch() -> None:
        loop = asyncio.get_running_loop()
        viewers = Viewers(lambda: {"now": loop.time()})
        viewers.news()  # nobody looks
        stream = viewers.messages()
        for events in ((), (), (), (0.1, 0.2), (), (1.5,), ()):
            for after in events:
                loop.call_later(after, viewers.news)
            await anext(stream)
            times.append(loop.time())
        viewers.close()
        async for _ in stream:
            pass

    with closing(Clock()) as clock:
        clock.run_until_complete(watch())
    quiet, soon = QUIET_INTERVAL_S, INTERVAL_S
    steps = [later - earlier for earlier, later in pairwise(times)]
    assert times[0] == 0.0
    assert steps == pytest.approx([quiet, quiet, soon, quiet, 1.5, quiet])


def test_output_is_sent_as_data() -> None:
    async def watch(session: ClientSession, url: str) -> None:
        async with session.get(url + "/output?slot=a:0") as answer:
            kind, tail = await next_event(answer.content)
            assert (kind, tail["worker"], tail["stdout"]) == ("output", "a:0#1", "<script>alert(1)</script>")
        for slot in ("", "a", "a:x", ":0", "a:123456"):
            async with session.get(url + "/output", params={"slot": slot}) as answer:
                assert answer.status == 400

    on_server(watch)


def test_the_page_is_one_file_that_runs_only_its_own_script() -> None:
    async def read(session: ClientSession, url: str) -> None:
        pages = []
        for _ in range(2):
            async with session.get(url + "/") as answer:
                policy = answer.headers["Content-Security-Policy"]
                pages.append(await answer.text())
            nonce = policy.partition("script-src 'nonce-")[2].partition("'")[0]
            assert f'<script nonce="{nonce}">' in pages[-1]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
        assert pages[0] != pages[1], "a nonce is used once"
        assert "http://" not in pages[0].replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in pages[0]
        assert "innerHTML" not in pages[0]

    on_server(read)


@pytest.mark.parametrize("text", ["x", "70000", "1.2.3.4", "localhost:9100", ""])
def test_a_bad_address_is_an_error_of_the_option(text: str) -> None:
    with pytest.raises(OptionError, match="--dashboard"):
        read_options({"np": "1", "dashboard": text}, ["true"], {})


def test_the_loopback_interface_is_the_default() -> None:
    assert read_options({"np": "1", "dashboard": "8265"}, ["true"], {}).dashboard == "127.0.0.1:8265"
