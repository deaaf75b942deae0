"""The dashboard of a driver: its HTTP server, open while the driver runs, and its history, kept for the next driver.

Imported only with ``--dashboard``; runs on the driver's event loop. ``GET /events`` and ``GET /output`` are streams of
server-sent events, whose number is limited. ``POST /drain`` and ``POST /end`` act. Each connection is for one request.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from math import ceil, inf
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec
from aiohttp import web
from aiohttp.http import HttpProcessingError

from elasticstate.core.ids import SlotId, WorkerId
from elasticstate.driver.dashboard.view import History, View, decoded, difference
from elasticstate.driver.output import Tails
from elasticstate.driver.record import JobDirectory
from elasticstate.driver.report import Fields, Report
from elasticstate.errors import OptionError
from elasticstate.failures import WorkerFailure
from elasticstate.net.names import host_port, is_loopback, is_own_host, listening_socket, port_of, without_carrier
from elasticstate.net.trust import Crowd, Strangers
from elasticstate.net.web import Visitor, WebPort
from elasticstate.options.kinds import split_address
from elasticstate.threads import in_thread, next_beat

if TYPE_CHECKING:
    import socket


# ---------------------------------------------------------------------------------------------------------------- guard
# Guard of the dashboard: decides which requests may see the job, and which may act on it.
#
# - A request of another site is refused: ``Sec-Fetch-Site`` and ``Origin`` name the site that caused it (CSRF).
# - A request for another name is refused: a stranger's name that resolves to this machine makes a browser regard the
#   dashboard as a part of the stranger's site (DNS rebinding). Addresses and this machine's own name are allowed.
# - Seeing needs the job's token, unless the request comes over the loopback interface, and not through a proxy. A proxy
#   may leave no sign in a request: with ``--dashboard-require-token``, seeing always needs the token.
# - Acting always needs the token.


_OF_PROXIES = {"cdn-loop", "forwarded", "true-client-ip", "via", "x-client-ip", "x-cluster-client-ip", "x-real-ip"}
_OF_PROXIES |= {"x-amzn-trace-id", "x-cloud-trace-context", "x-proxyuser-ip", "x-request-id", "x-scheme"}
_BEGINNINGS = ("cf-", "proxy-", "tailscale-", "x-arr-", "x-azure-", "x-envoy-", "x-forwarded", "x-original", "x-proxy-")


@dataclass(frozen=True, slots=True)
class Visit:
    """The facts about a request on which the guard decides."""

    peer: str  # address of the peer
    host: str  # header Host
    scheme: str = "http"
    origin: str | None = None
    fetch_site: str | None = None  # header Sec-Fetch-Site
    is_forwarded: bool = False  # by a proxy
    authorization: str = ""


class Guard:
    """Guard of a job with this token."""

    def __init__(self, token: str, requires_token: bool) -> None:
        """``requires_token``: also over the loopback interface."""
        self._expected = f"Bearer {token}".encode()
        self._requires_token = requires_token

    def refuse(self, visit: Visit) -> str:
        """Return why the request is refused, or "": it comes from another site, or is for another name."""
        if not is_own_host(visit.host):
            return f"the host {visit.host!r} is not this machine. Open the dashboard by an address of this machine"
        if visit.fetch_site not in (None, "same-origin", "none"):
            return "the request comes from another site. Enter the dashboard's address yourself"
        if visit.origin not in (None, f"{visit.scheme}://{visit.host}"):
            return "the request comes from another site"
        return ""

    def has_token(self, visit: Visit) -> bool:
        return hmac.compare_digest(visit.authorization.encode(errors="replace"), self._expected)

    def may_see(self, visit: Visit) -> bool:
        is_near = is_loopback(without_carrier(visit.peer)) and not visit.is_forwarded
        return self.has_token(visit) or (is_near and not self._requires_token)


def is_from_proxy(headers: Iterable[str], version: tuple[int, int]) -> bool:
    """Return True if a request with these names of headers, and this version of HTTP, has signs of a proxy.

    Browsers and curl send HTTP/1.1. nginx sends 1.0 unless it is told otherwise, and then no header of its own.
    """
    names = [name.lower() for name in headers]
    return version < (1, 1) or any(name in _OF_PROXIES or name.startswith(_BEGINNINGS) for name in names)


# -------------------------------------------------------------------------------------------------------------- viewers
# The viewers of a dashboard. Each gets the whole view once, and then only changes: after an event of the job at once,
# but not sooner than INTERVAL_S after the last ones; without one, ticks and times every QUIET_INTERVAL_S.


INTERVAL_S = 1.0
QUIET_INTERVAL_S = 2.0
_MOST_WAITING = 8  # messages that a slow viewer may have to receive yet; then it must connect again


class Viewers:
    """The viewers who watch now. Without them no view is made."""

    def __init__(self, view: Callable[[], View]) -> None:
        self._view = view
        self._last: View = {}
        self._queues: set[asyncio.Queue[bytes | None]] = set()
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.TimerHandle | None = None
        self._published_at = -inf

    async def messages(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events for one viewer, until the job is over or the viewer is too slow."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_MOST_WAITING)
        if not self._queues or self._loop.time() >= self._published_at + INTERVAL_S:
            self.publish()  # else others have got this view a moment ago
        queue.put_nowait(_event("view", self._last))
        self._queues.add(queue)
        self._publish_at(self._quiet_until)
        try:
            while (message := await queue.get()) is not None:
                yield message
        finally:
            self._queues.discard(queue)

    def news(self) -> None:
        """Send the changes soon: there is an event of the job."""
        if self._queues:
            self._publish_at(self._published_at + INTERVAL_S)

    def publish(self) -> None:
        """Send the changes since the last call to all viewers. A viewer without changes gets a sign of life."""
        view = self._view()
        message = _event("patch", difference(self._last, view)) if self._queues else b""
        self._last, self._published_at = view, self._loop.time()
        for queue in list(self._queues):
            if queue.full():
                self._dismiss(queue)
            else:
                queue.put_nowait(message)

    def close(self) -> None:
        """Send the last view, and end all streams."""
        if self._next is not None:
            self._next.cancel()
        if self._queues:
            self.publish()
        for queue in list(self._queues):
            if not queue.full():
                queue.put_nowait(_event("over", {}))
            self._dismiss(queue)

    def _dismiss(self, queue: asyncio.Queue[bytes | None]) -> None:
        self._queues.discard(queue)
        if queue.full():
            queue.get_nowait()
        queue.put_nowait(None)

    @property
    def _quiet_until(self) -> float:
        """Return the time of the next changes without an event, together with other looks of the driver."""
        return ceil(2 * (self._published_at + QUIET_INTERVAL_S)) / 2

    def _publish_at(self, at: float) -> None:
        """Publish at this time of the event loop's clock, or sooner if that is planned already."""
        if self._next is not None:
            if self._next.when() <= at:
                return
            self._next.cancel()
        self._next = self._loop.call_at(at, self._publish_regularly)

    def _publish_regularly(self) -> None:
        self._next = None
        if self._queues:
            self.publish()
            self._publish_at(self._quiet_until)


def _event(kind: str, content: View) -> bytes:
    """Return a server-sent event. JSON has no line breaks, so the data is one line."""
    data = msgspec.json.encode({"now": round(time.time(), 3), "content": content})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


# --------------------------------------------------------------------------------------------------------------- server


_PAGE = Path(__file__).with_name("page.html")
_MOST_BODY_BYTES = 4096
_TAIL_TIMEOUT_S = 5.0
_END_S = 1.0  # for open streams, at the end
_MOST_STREAMS = 64  # of all open pages: each has one, and one more while it shows the output of a worker
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; connect-src 'self'"
_MALFORMED = (HttpProcessingError, web.RequestPayloadError, UnicodeEncodeError)  # the last: a header that is no UTF-8
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Response = TypeVar("_Response", bound=web.StreamResponse)


@dataclass(frozen=True, slots=True)
class Controls:
    """The parts of the driver that the dashboard uses."""

    view: Callable[[], View]
    worker_in: Callable[[SlotId], WorkerId | None]
    tails: Tails
    drain: Callable[[str], str]  # of this host; returns why not, or ""
    end: Callable[[], str]  # likewise


class DashboardServer:
    """HTTP server at a socket that listens already."""

    def __init__(self, controls: Controls, token: str, requires_token: bool = False) -> None:
        """``requires_token``: to see the job over the loopback interface, too."""
        self._controls = controls
        self._guard = Guard(token, requires_token)
        self._viewers = Viewers(controls.view)
        self._streams: Crowd[Visitor] = Crowd()  # without the token
        self._streams_with_token = 0
        self._is_over = asyncio.Event()
        app = web.Application(client_max_size=_MOST_BODY_BYTES, middlewares=[self._guarded])
        app.router.add_get("/", self._page, allow_head=False)
        app.router.add_get("/events", self._events, allow_head=False)
        app.router.add_get("/output", self._output, allow_head=False)
        app.router.add_post("/drain", self._drain)
        app.router.add_post("/end", self._end)
        logger = logging.Logger("elasticstate.dashboard")
        logger.parent = logging.getLogger("elasticstate")
        logger.addFilter(self._is_no_refusal)
        self._runner = web.AppRunner(app, access_log=None, logger=logger, shutdown_timeout=_END_S)
        self._port: WebPort | None = None
        self._refused: Callable[[str, str], None]

    async def start(self, listening: socket.socket, strangers: Strangers) -> None:
        await self._runner.setup()
        assert self._runner.server is not None
        self._refused = strangers.refused
        self._port = WebPort("dashboard", listening, strangers, self._runner.server)

    def news(self) -> None:
        """Send all viewers what has changed: there is an event of the job."""
        self._viewers.news()

    async def close(self) -> None:
        """Send the last view to all viewers, and stop."""
        self._is_over.set()
        self._viewers.close()
        await self._runner.cleanup()
        if self._port is not None:
            await self._port.close()

    def _is_no_refusal(self, record: logging.LogRecord) -> bool:
        """Count a malformed request as refused. aiohttp logs it as an error, with a traceback."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, _MALFORMED):
            peer = str(record.args[0]) if isinstance(record.args, tuple) and record.args else "an unknown peer"
            self._refused(peer, "dashboard: malformed request")
            return False
        return True

    # -------------------------------------------------------------------------------------------------- the requests

    @web.middleware
    async def _guarded(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Refuse strangers before anything else, and add headers to each answer."""
        visit, visitor = _visit(request), _visitor(request)
        has_token, is_action = self._guard.has_token(visit), request.method != "GET"
        if has_token and visitor is not None:
            visitor.authenticated()
        if reason := self._guard.refuse(visit):
            return _answer(403, f"Refused: {reason}.")
        if is_action and not has_token:
            return _answer(401, "An action requires the job's token.")
        if request.path != "/" and not self._guard.may_see(visit):
            return _answer(401, "The job's token is required here.")
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _answer(error.status, error.reason)

    async def _page(self, request: web.Request) -> web.StreamResponse:
        nonce = secrets.token_urlsafe(16)
        policy = f"{_POLICY}; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:"
        page = _read_page().replace("{nonce}", nonce)
        headers = {**_HEADERS, "Content-Security-Policy": policy}
        return _once(web.Response(text=page, content_type="text/html", headers=headers))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        return await self._streamed(request, self._viewers.messages())

    async def _output(self, request: web.Request) -> web.StreamResponse:
        host, _, index = request.query.get("slot", "").rpartition(":")
        if not (host and index.isdecimal() and len(index) < 6):
            return _answer(400, "slot must be HOST:SLOT.")
        return await self._streamed(request, self._tail(SlotId(host, int(index))))

    async def _tail(self, slot: SlotId) -> AsyncGenerator[bytes, None]:
        """Yield the last lines of the worker in a slot as they change."""
        last: View | None = None
        while not self._is_over.is_set():
            worker = self._controls.worker_in(slot)
            tail = await self._controls.tails.of(worker, _TAIL_TIMEOUT_S) if worker is not None else None
            if tail is not None:
                shown: View = {"worker": str(tail.worker), "stdout": tail.stdout, "stderr": tail.stderr}
                yield b": \n\n" if shown == last else b"event: output\ndata: " + msgspec.json.encode(shown) + b"\n\n"
                last = shown
            else:
                yield b": \n\n"
            await asyncio.sleep(INTERVAL_S)

    # --------------------------------------------------------------------------------------------------- the streams

    async def _streamed(self, request: web.Request, messages: AsyncGenerator[bytes, None]) -> web.StreamResponse:
        visitor, has_token = _visitor(request), self._guard.has_token(_visit(request))
        if visitor is None or not self._admit(visitor, has_token):
            return _answer(503, "Too many pages are open.")
        if has_token:
            self._streams_with_token += 1
        else:
            self._streams.add(visitor, visitor.user)
        visitor.stay()
        response = _once(web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream; charset=utf-8"}))
        try:
            with suppress(ConnectionError):  # the viewer has gone
                await response.prepare(request)
                async with aclosing(messages):
                    async for message in messages:
                        await response.write(message)
        finally:
            if has_token:
                self._streams_with_token -= 1
            self._streams.discard(visitor)
        return response

    def _admit(self, visitor: Visitor, has_token: bool) -> bool:
        """Return True if one more stream may begin, and dismiss another one for it if need be.

        The token dismisses a stream without, and a user with few streams one of a user with many.
        """
        if len(self._streams) + self._streams_with_token < _MOST_STREAMS:
            return True
        if len(self._streams):
            oldest = self._streams.first_to_go()
            if has_token or self._streams.number_of(visitor.user) + 1 < self._streams.number_of(oldest.user):
                self._streams.discard(oldest)
                oldest.dismiss("too many streams")
                return True
        visitor.refused("too many streams")
        return False

    # --------------------------------------------------------------------------------------------------- the actions

    async def _drain(self, request: web.Request) -> web.StreamResponse:
        try:
            host = msgspec.json.decode(await request.read(), type=dict[str, str])["host"]
        except (msgspec.DecodeError, KeyError):
            return _answer(400, 'The body must be {"host": NAME}.')
        return _done(self._controls.drain(host))

    async def _end(self, request: web.Request) -> web.StreamResponse:
        return _done(self._controls.end())


def _visit(request: web.Request) -> Visit:
    peername = request.transport.get_extra_info("peername") if request.transport is not None else None
    return Visit(
        peer=peername[0] if peername else "",
        host=request.headers.get("Host", ""),
        scheme=request.scheme,
        origin=request.headers.get("Origin"),
        fetch_site=request.headers.get("Sec-Fetch-Site"),
        is_forwarded=is_from_proxy(request.headers, request.version),
        authorization=request.headers.get("Authorization", ""),
    )


@functools.cache
def _read_page() -> str:
    """Return the page with its style and its script."""
    page, style, script = (_PAGE.with_suffix(end).read_text(encoding="utf-8") for end in (".html", ".css", ".js"))
    return page.replace("{style}", style).replace("{script}", script)


def _visitor(request: web.Request) -> Visitor | None:
    """Return the connection of a request; None if it has ended."""
    return cast("Visitor", request.transport.get_protocol()) if request.transport is not None else None


def _once(response: _Response) -> _Response:
    """Let the connection end with this response: each is for one request."""
    response.force_close()
    return response


def _answer(status: int, text: str) -> web.Response:
    return _once(web.Response(status=status, text=text + "\n", headers=_HEADERS))


def _done(refusal: str) -> web.Response:
    return _answer(409, refusal) if refusal else _answer(200, "done")


# ------------------------------------------------------------------------------------------------------------ dashboard


_WRITE_INTERVAL_S = 0.5
_SAMPLE_INTERVAL_S = 1.0
_SAMPLES_PER_WRITE = 10


class Dashboard:
    """A port that listens, and the history of the job. Raises OptionError."""

    def __init__(self, address: str, last_port: int, directory: JobDirectory, report: Report) -> None:
        """``last_port``: of the previous driver; 0: none. It is used again if the option leaves the port open."""
        self._host, port = split_address(address)
        try:
            self._listening = listening_socket(self._host, port or last_port)
        except OSError as error:
            if port or not last_port:
                raise OptionError(
                    f"--dashboard: {address!r}: cannot listen there ({error.strerror}). Choose an address of this "
                    "machine and a free port."
                ) from None
            self._listening = listening_socket(self._host, 0)
        self.port = port_of(self._listening)
        self.history = decoded(directory.history()) if directory.found is not None else History()
        self._directory = directory
        self._report = report
        self._has_news = asyncio.Event()
        self._server: DashboardServer | None = None
        report.watch(self)

    def event(self, name: str, fields: Fields, at: float) -> None:
        self.history.event(name, fields, at)
        self._has_changed()

    def failure(self, failure: WorkerFailure, at: float) -> None:
        self.history.failure(failure, at)
        self._has_changed()

    def line(self, text: str, at: float) -> None:
        self.history.line(text, at)
        self._has_changed()

    @asynccontextmanager
    async def served(
        self,
        controls: Controls,
        token: str,
        requires_token: bool,
        strangers: Strangers,
        sample: Callable[[float], None],
    ) -> AsyncIterator[None]:
        """Serve the page. ``requires_token``: seeing it needs the token over the loopback interface, too.

        ``sample(time)`` is called each second, and adds to the curves of the history.
        """
        self._server = server = DashboardServer(controls, token, requires_token)
        await server.start(self._listening, strangers)
        self._report.log(f"dashboard: http://{host_port(self._host, self.port)}/")
        beside = {
            asyncio.ensure_future(self._write_regularly()),
            asyncio.ensure_future(self._sample_regularly(sample)),
        }
        try:
            yield
        finally:
            for task in beside:
                task.cancel()
            await asyncio.wait(beside)
            sample(time.time())  # the last values
            await server.close()

    def _has_changed(self) -> None:
        self._has_news.set()
        if self._server is not None:
            self._server.news()

    async def _sample_regularly(self, sample: Callable[[float], None]) -> None:
        samples = 0
        while True:
            await next_beat(_SAMPLE_INTERVAL_S)
            sample(time.time())
            samples += 1
            if samples % _SAMPLES_PER_WRITE == 0:
                self._has_news.set()

    async def _write_regularly(self) -> None:
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            with suppress(OSError):  # the next dashboard shows less
                await in_thread(self._directory.write_history, msgspec.json.encode(self.history))
            await asyncio.sleep(_WRITE_INTERVAL_S)
