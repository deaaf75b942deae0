"""The listening socket of a store for plain workers. Another process, which imports torch, serves it."""

from __future__ import annotations

import asyncio
import socket


class StoreListener:
    """A socket that listens, but accepts no connection itself: connections wait until a process serves the socket."""

    def __init__(self, host: str) -> None:
        """Listen on a free port of ``host``. Raises OSError."""
        self._host = host
        self._socket = socket.create_server((host, 0), backlog=socket.SOMAXCONN)

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def address(self) -> str:
        return f"{self._host}:{self.port}"

    def fileno(self) -> int:
        return self._socket.fileno()

    async def first_connection(self) -> None:
        """Wait for the first connection."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()

        def readable() -> None:
            if not arrived.done():
                arrived.set_result(None)

        loop.add_reader(self._socket, readable)
        try:
            await arrived
        finally:
            loop.remove_reader(self._socket)

    def close(self) -> None:
        """Close this process's descriptor of the socket."""
        self._socket.close()
