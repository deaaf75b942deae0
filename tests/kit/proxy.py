"""A TCP proxy in front of a copy server, which changes, stops or cuts what it carries."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

Change = Callable[[int, bytes], bytes | None]
"""Returns the bytes to forward instead of those at an offset of the stream; None: cut the connection."""


def unchanged(offset: int, data: bytes) -> bytes:
    return data


def flip_once(at: int) -> Change:
    """Flip one bit of the byte at this offset of the first stream that is so long."""
    done = threading.Event()

    def change(offset: int, data: bytes) -> bytes:
        if offset <= at < offset + len(data) and not done.is_set():
            done.set()
            return data[: at - offset] + bytes([data[at - offset] ^ 1]) + data[at - offset + 1 :]
        return data

    return change


class Proxy:
    """Forwards connections to ``address``. ``streams`` counts the connections, ``carried`` the bytes to the server."""

    def __init__(self, address: str, up: Change = unchanged, down: Change = unchanged) -> None:
        self.lead_to(address)
        self._up, self._down = up, down
        self.streams = self.carried = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        self.cut()
        for thread in self._threads[1:]:
            thread.join()
        for end in self._sockets:
            end.close()

    def lead_to(self, address: str) -> None:
        """Forward the next connections to this server."""
        host, port = address.split(":")
        self._to = host, int(port)

    def cut(self) -> None:
        """Cut all connections."""
        for end in list(self._sockets):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.streams += 1
            try:
                far = socket.create_connection(self._to)
            except OSError:  # the server is gone
                near.close()
                continue
            self._sockets += [near, far]
            last = threading.Lock()
            for ends, change in (((near, far), self._up), ((far, near), self._down)):
                thread = threading.Thread(target=self._carry, args=(*ends, change, last))
                self._threads.append(thread)
                thread.start()

    def _carry(self, begin: socket.socket, end: socket.socket, change: Change, last: threading.Lock) -> None:
        offset = 0
        with suppress(OSError):
            while data := begin.recv(1 << 16):
                changed = change(offset, data)
                if changed is None:
                    break
                end.sendall(changed)
                offset += len(data)
                if change is self._up:
                    self.carried += len(data)
        for one in (begin, end):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        if not last.acquire(blocking=False):  # both directions have ended: what is unread resets the connections
            begin.close()
            end.close()
