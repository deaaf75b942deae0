"""HTTP server of the dashboard. Imported only with ``--dashboard``; runs on the driver's event loop.

``GET /`` is the page, without any data of the job. ``GET /events`` and ``GET /output`` are streams of server-sent
events. ``POST /drain`` and ``POST /end`` act.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from elasticstate.core.types import SlotId, WorkerId
from elasticstate.driver.dashboard.guard import Guard, Visit
from elasticstate.driver.dashboard.merge_patch import View
from elasticstate.driver.dashboard.viewers import INTERVAL_S, Viewers
from elasticstate.driver.tails import Tails

if TYPE_CHECKING:
    import socket

_PAGE = Path(__file__).with_name("page.html")
_MOST_BODY_BYTES = 4096
_TAIL_TIMEOUT_S = 5.0
_END_S = 1.0  # for open streams, at the end
_FORWARDED = ("Forwarded", "Via", "X-Forwarded-For", "X-Real-IP")
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; connect-src 'self'"
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


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

    def __init__(self, controls: Controls, token: str) -> None:
        self._controls = controls
        self._guard = Guard(token)
        self._viewers = Viewers(controls.view)
        self._is_over = asyncio.Event()
        app = web.Application(client_max_size=_MOST_BODY_BYTES, middlewares=[self._guarded])
        app.router.add_get("/", self._page, allow_head=False)
        app.router.add_get("/events", self._events, allow_head=False)
        app.router.add_get("/output", self._output, allow_head=False)
        app.router.add_post("/drain", self._drain)
        app.router.add_post("/end", self._end)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=_END_S)

    async def start(self, listening: socket.socket) -> None:
        await self._runner.setup()
        await web.SockSite(self._runner, listening).start()

    def news(self) -> None:
        """Send all viewers what has changed: there is an event of the job."""
        self._viewers.news()

    async def close(self) -> None:
        """Send the last view to all viewers, and stop."""
        self._is_over.set()
        self._viewers.close()
        await self._runner.cleanup()

    # -------------------------------------------------------------------------------------------------- the requests

    @web.middleware
    async def _guarded(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Refuse strangers before anything else, and add headers to each answer."""
        visit = _visit(request)
        is_action = request.method != "GET"
        if reason := self._guard.refuse(visit):
            return _answer(403, f"Refused: {reason}.")
        if is_action and not self._guard.has_token(visit):
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
        return web.Response(text=page, content_type="text/html", headers=headers)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self._viewers.is_full:
            return _answer(503, "Too many pages are open.")
        return await _streamed(request, self._viewers.messages())

    async def _output(self, request: web.Request) -> web.StreamResponse:
        host, _, index = request.query.get("slot", "").rpartition(":")
        if not (host and index.isdecimal() and len(index) < 6):
            return _answer(400, "slot must be HOST:SLOT.")
        return await _streamed(request, self._tail(SlotId(host, int(index))))

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
        is_forwarded=any(name in request.headers for name in _FORWARDED),
        authorization=request.headers.get("Authorization", ""),
    )


def _read_page() -> str:
    """Return the page with its style and its script."""
    page, style, script = (_PAGE.with_suffix(end).read_text(encoding="utf-8") for end in (".html", ".css", ".js"))
    return page.replace("{style}", style).replace("{script}", script)


def _answer(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=text + "\n", headers=_HEADERS)


def _done(refusal: str) -> web.Response:
    return _answer(409, refusal) if refusal else _answer(200, "done")


async def _streamed(request: web.Request, messages: AsyncGenerator[bytes, None]) -> web.StreamResponse:
    response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    async with aclosing(messages):
        with suppress(ConnectionError):  # the viewer has gone
            async for message in messages:
                await response.write(message)
    return response
