"""An agent's connection to its driver: dialled, lost, dialled again. Messages sent while disconnected are dropped."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque

from elasticstate.failures import signal_name
from elasticstate.machine import version
from elasticstate.net import messages
from elasticstate.net.control import DriverStream, Refused
from elasticstate.net.messages import JobSpec, Launch
from elasticstate.net.trust import Trust

_FIRST_PAUSE_S = 0.05  # before the second attempt; doubled after each attempt, up to _LONGEST_PAUSE_S
_LONGEST_PAUSE_S = 1.0


class DriverConnection:
    """Connection to the driver. Call ``establish`` first, and again after ``receive`` has raised ConnectionError.

    Raises ValueError on a bad token.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self.trust = Trust(launch.token)
        self._epoch = 0  # epoch of the newest driver that this agent has served
        self._job_id = ""  # id of the job that this agent serves
        self._stream: DriverStream | None = None
        self._pending: deque[messages.ToAgent] = deque()  # messages received but not yet returned by receive()
        self._loop = asyncio.get_running_loop()
        self.is_connected = False  # True while a greeting or a connection is under way
        self.is_sought = True  # False: do not retry after a failed attempt

    async def establish(self, limit_s: float) -> messages.JobSpec:
        """Dial until a driver accepts this agent. Return the first message of that driver.

        Raises:
            Refused: a driver of this job refused this agent.
            ConnectionError: no driver accepted this agent within ``limit_s``, or the driver broke the protocol.
        """
        deadline = self._loop.time() + limit_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await self._greet(max(0.1, deadline - self._loop.time()))
            except Refused:
                raise
            except ConnectionError:
                left_s = deadline - self._loop.time()
                if left_s <= 0 or not self.is_sought:
                    raise
            await asyncio.sleep(min(pause_s, left_s))  # the last attempt is at the end
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _greet(self, limit_s: float) -> messages.JobSpec:
        timeout_s = min(self._launch.connect_timeout_s, limit_s)
        deadline = self._loop.time() + timeout_s
        stream = await DriverStream.dial(self._launch.addresses, self.trust, timeout_s)
        self.is_connected = True
        stream.send(self._hello())
        answer = asyncio.ensure_future(stream.receive())
        try:
            await asyncio.wait({answer}, timeout=max(0.0, deadline - self._loop.time()))
            if not answer.done():
                raise ConnectionError("timed out: the driver did not answer")
            spec = answer.result()
            if not isinstance(spec, messages.JobSpec):
                raise ConnectionError(f"the first message of the driver is {type(spec).__name__}, not JobSpec")
            if self._job_id not in ("", spec.job_id):
                raise Refused(messages.Refusal("this driver has begun a new job with the same token", is_stopped=True))
            if spec.epoch < self._epoch:
                raise ConnectionError(f"the driver of epoch {spec.epoch} was replaced by one of epoch {self._epoch}")
        except BaseException:
            self.is_connected = False
            answer.cancel()
            stream.abort("the greeting failed")
            raise
        self._stream, self._epoch, self._job_id = stream, spec.epoch, spec.job_id
        self._pending.clear()
        return spec

    def _hello(self) -> messages.AgentHello:
        launch = self._launch
        return messages.AgentHello(
            launch.host,
            launch.agent,
            launch.slots,
            self._epoch,
            os.getpid(),
            messages.PROTOCOL_VERSION,
            version(),
            launch.rack,
        )

    @property
    def is_established(self) -> bool:
        """Return True if a driver has accepted this agent, and is not lost."""
        return self._stream is not None

    @property
    def local_address(self) -> str:
        """Address at which the driver reaches this host."""
        assert self._stream is not None
        return self._stream.local_address

    @property
    def driver_address(self) -> str:
        """Address at which this host reaches the driver. Raises ConnectionError when disconnected."""
        if self._stream is None:
            raise ConnectionError("not connected to a driver")
        return self._stream.peer_address

    def send(self, message: messages.FromAgent) -> None:
        """Send a message after all earlier ones. Does nothing when disconnected."""
        if self._stream is not None:
            self._stream.send(message)

    async def receive(self) -> messages.ToAgent:
        """Return the next message. Raises ConnectionError, with the reason, when disconnected."""
        if self._pending:
            return self._pending.popleft()
        if self._stream is None:
            raise ConnectionError("the connection to the driver is lost")
        return await self._next(self._stream)

    async def _next(self, stream: DriverStream) -> messages.ToAgent:
        try:
            return await stream.receive()
        except ConnectionError as error:
            stream.abort(str(error))
            self._stream = None
            raise

    async def lost(self) -> None:
        """Wait until the driver refuses this agent or is lost; then raise ConnectionError.

        Messages that arrive meanwhile are kept for ``receive``.
        """
        assert self._stream is not None
        while True:
            self._pending.append(await self._next(self._stream))

    def judge(self, now: float, limit_s: float) -> None:
        """Reset the connection if the driver was silent for longer than ``limit_s``: then ``receive`` raises."""
        if self._stream is not None and now - self._stream.received_at > limit_s:
            self._stream.reset(f"no message from the driver for --heartbeat-timeout of {limit_s:g} s")

    async def close(self) -> None:
        """Send all pending messages, then close the connection."""
        if self._stream is not None:
            await self._stream.close()


class Stopped(Exception):
    """SIGINT or SIGTERM arrived before a driver was found. ``status``: the exit status for that signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal_name(number))
        self.status = 128 + number


async def find_driver(driver: DriverConnection, wait_s: float) -> tuple[JobSpec, list[int]]:
    """Return the driver's first message, and the signals that arrived during the greeting.

    Until a driver is found, nothing depends on the agent: a signal ends it. Raises Stopped, and all that ``establish``
    of the connection raises.
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
