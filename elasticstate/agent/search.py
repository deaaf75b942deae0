"""An agent's first search for its driver. Until a driver is found, nothing depends on the agent: a signal ends it."""

from __future__ import annotations

import asyncio
import signal

from elasticstate.agent.driver_connection import DriverConnection
from elasticstate.exit_status import signal_name
from elasticstate.net.messages import JobSpec


class Stopped(Exception):
    """SIGINT or SIGTERM arrived before a driver was found. ``status``: the exit status for that signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal_name(number))
        self.status = 128 + number


async def find_driver(driver: DriverConnection, wait_s: float) -> tuple[JobSpec, list[int]]:
    """Return the driver's first message, and the signals that arrived during the greeting.

    Raises Stopped, and all that ``DriverConnection.establish`` raises.
    """
    loop = asyncio.get_running_loop()
    finding = asyncio.ensure_future(driver.establish(wait_s))
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        driver.is_sought = False
        if not driver.is_connected:
            finding.cancel()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        await asyncio.wait({finding})
        if received and (finding.cancelled() or finding.exception() is not None):
            raise Stopped(received[0])
        return finding.result(), received
    finally:
        finding.cancel()
        for number in numbers:
            loop.remove_signal_handler(number)
