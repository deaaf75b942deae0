"""The dashboard of a driver: its port, open while the driver runs, and its history, kept for the next driver."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import msgspec

from elasticstate.driver.dashboard.view import History, decoded
from elasticstate.driver.record import JobDirectory
from elasticstate.driver.report import Fields, Report
from elasticstate.errors import OptionError
from elasticstate.failures import WorkerFailure
from elasticstate.net.strangers import Strangers
from elasticstate.net.web import listening_socket, port_of
from elasticstate.options.kinds import split_address
from elasticstate.threads import in_thread

if TYPE_CHECKING:
    from elasticstate.driver.dashboard.server import Controls, DashboardServer

_WRITE_INTERVAL_S = 0.5


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
        self, controls: Controls, token: str, requires_token: bool, strangers: Strangers
    ) -> AsyncIterator[None]:
        """Serve the page. ``requires_token``: seeing it needs the token over the loopback interface, too."""
        from elasticstate.driver.dashboard.server import DashboardServer

        self._server = server = DashboardServer(controls, token, requires_token)
        await server.start(self._listening, strangers)
        shown = f"[{self._host}]" if ":" in self._host else self._host
        self._report.log(f"dashboard: http://{shown}:{self.port}/")
        writing = asyncio.ensure_future(self._write_regularly())
        try:
            yield
        finally:
            writing.cancel()
            await asyncio.wait({writing})
            await server.close()

    def _has_changed(self) -> None:
        self._has_news.set()
        if self._server is not None:
            self._server.news()

    async def _write_regularly(self) -> None:
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            with suppress(OSError):  # the next dashboard shows less
                await in_thread(self._directory.write_history, msgspec.json.encode(self.history))
            await asyncio.sleep(_WRITE_INTERVAL_S)


def require_library() -> None:
    """Import aiohttp. This takes a while: never call it on an event loop. Raises OptionError."""
    try:
        import elasticstate.driver.dashboard.server  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "aiohttp":
            raise
        raise OptionError(
            "--dashboard: requires the package aiohttp. Install it: pip install 'elasticstate[dashboard]'."
        ) from None
