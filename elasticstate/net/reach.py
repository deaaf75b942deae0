"""Probes of links: which other hosts does this host reach?

A probe is a TCP connection to the copy server of another host's agent. The kernels of both hosts open it, so a slow or
stopped process does not matter. Nothing is sent on it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from elasticstate.core.types import LinksProbed
from elasticstate.net.messages import ProbeOrder

_ATTEMPTS = 8  # within the time for an answer: packets may be lost


class Probes:
    """Probes of the links of this host, by order of the driver. An order replaces the one before it."""

    def __init__(self, host: str, send: Callable[[LinksProbed], None]) -> None:
        self._host = host
        self._send = send
        self._running: asyncio.Task[None] | None = None

    def begin(self, order: ProbeOrder) -> None:
        """Probe the hosts of this order, then send the answer."""
        self.cancel()
        self._running = asyncio.ensure_future(self._probe(order))

    def cancel(self) -> None:
        """Send no answer to the last order."""
        if self._running is not None:
            self._running.cancel()
            self._running = None

    async def _probe(self, order: ProbeOrder) -> None:
        found = await asyncio.gather(*(is_reached(address, order.limit_s) for _, address in order.targets))
        cut = [host for (host, _), is_open in zip(order.targets, found, strict=True) if not is_open]
        self._send(LinksProbed(self._host, order.number, tuple(cut)))


async def is_reached(address: str, limit_s: float) -> bool:
    """Return True when a connection to this "ip:port" is open, or False after the limit, if no attempt has opened one.

    Each attempt has until the limit, so a link may be slow.
    """
    attempts: set[asyncio.Task[bool]] = set()
    done: set[asyncio.Task[bool]] = set()
    try:
        for _ in range(_ATTEMPTS):
            attempts.add(asyncio.ensure_future(_opens(address, limit_s)))
            done, _ = await asyncio.wait(attempts, timeout=limit_s / _ATTEMPTS, return_when=asyncio.FIRST_COMPLETED)
            if done:
                break
        return any(attempt.result() for attempt in done)
    finally:
        for attempt in attempts:
            attempt.cancel()
        await asyncio.gather(*attempts, return_exceptions=True)


async def _opens(address: str, limit_s: float) -> bool:
    """Open a connection, and close it. An error is no answer: what refuses it may be a firewall in between."""
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as connection:
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
        except OSError:
            await asyncio.sleep(2 * limit_s)
            return False
        return True
