"""Listening sockets of servers that a library provides."""

from __future__ import annotations

import socket


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this address; port 0: any port. Raises OSError."""
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def port_of(listening: socket.socket) -> int:
    """Return the port of a socket."""
    port: int = listening.getsockname()[1]
    return port
