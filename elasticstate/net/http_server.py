"""HTTP server with threads of its own, for the handler of a library. It sleeps until a request arrives."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_POLL_S = 3600.0  # the server's default wakes the process up twice a second


class HttpServer:
    """Server at a socket that listens already."""

    def __init__(self, listening: socket.socket, handler: type[BaseHTTPRequestHandler]) -> None:
        self._server = ThreadingHTTPServer(listening.getsockname()[:2], handler, bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = listening
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the server."""
        self._server.socket.shutdown(socket.SHUT_RDWR)  # on Linux this wakes up the thread: its accept() fails
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
