"""An agent's connection to its driver: dialled, lost, dialled again. Messages sent while disconnected are dropped."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from contextlib import suppress
from math import inf

from elasticstate.core.register import Vote, accept, prepare
from elasticstate.failures import signal_name
from elasticstate.net import messages
from elasticstate.net.control import VERSION, DriverStream, Refused
from elasticstate.net.messages import JobSpec, Launch
from elasticstate.net.trust import Trust

_FIRST_PAUSE_S = 0.05  # before the second attempt; doubled after each attempt
_SHORT_PAUSE_S = 0.2  # the longest one in the first _SOON_S: a new driver may begin soon
_SOON_S = 10.0
_LONGEST_PAUSE_S = 1.0
_NEXT_STANDBY_S = 0.2  # each standby is dialled so much later than the one before: the first that lives shall win


class DriverConnection:
    """Connection to the driver. Call ``establish`` first, and again after ``receive`` has raised ConnectionError.

    An agent is an acceptor of its job's record, too (core/register.py): its memory is this object, and its identity the
    agent's. Raises ValueError on a bad token.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self.trust = Trust(launch.token)
        self._epoch = 0  # epoch of the newest driver that this agent has served
        self._job_id = ""  # id of the job that this agent serves
        self._stream: DriverStream | None = None
        self._pending: deque[messages.ToAgent] = deque()  # messages received but not yet returned by receive()
        self._loop = asyncio.get_running_loop()
        self._greeting = asyncio.Lock()  # one driver may have several addresses, and must get one Hello
        self._found: tuple[str, ...] = ()  # where the newest driver was found
        self._standbys: tuple[str, ...] = ()  # where the next driver may listen, or its rivals in the last election
        self._elections: set[DriverStream] = set()  # that are under way
        self._vote = Vote()
        self._accepted_at = self._heard_at = self._loop.time()
        self._promised_at = -inf
        self.is_sought = True  # False: do not retry after a failed attempt

    @property
    def is_connected(self) -> bool:
        """Return True while a greeting or a connection is under way."""
        return self._greeting.locked() or self._stream is not None

    async def establish(self, limit_s: float) -> messages.JobSpec:
        """Dial all places where a driver may be, until one accepts this agent. Return the first message of that driver.

        Raises:
            Refused: a driver of this job refused this agent.
            ConnectionError: no driver accepted this agent within ``limit_s``, or the driver broke the protocol.
        """
        deadline = self._loop.time() + limit_s
        launched = self._launch.addresses
        places: list[tuple[str, ...]] = [(each,) for each in launched] if self._launch.is_joining else [launched]
        places += [self._found] if self._found else []
        waits_s: dict[tuple[str, ...], float] = {
            (address,): number * _NEXT_STANDBY_S for number, address in enumerate(self._standbys)
        }
        waits_s |= dict.fromkeys(places, 0.0)
        seeking = {asyncio.ensure_future(self._seek(place, wait_s, deadline)) for place, wait_s in waits_s.items()}
        reasons: list[str] = []
        try:
            while seeking:
                done, seeking = await asyncio.wait(seeking, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if not isinstance(task.exception(), ConnectionError) or isinstance(task.exception(), Refused):
                        return task.result()
                    reasons.append(str(task.exception()))
        finally:
            for task in seeking:
                task.cancel()
            await asyncio.gather(*seeking, return_exceptions=True)
        raise ConnectionError("; ".join(dict.fromkeys(reasons)))

    async def _seek(self, addresses: tuple[str, ...], wait_s: float, deadline: float) -> messages.JobSpec:
        """Dial one driver after ``wait_s``, again and again until the deadline."""
        await asyncio.sleep(min(wait_s, deadline - self._loop.time()))
        pause_s, began = _FIRST_PAUSE_S, self._loop.time()
        while True:
            try:
                if (spec := await self._greet(addresses, deadline)) is not None:
                    return spec
                left_s, pause_s = deadline - self._loop.time(), _FIRST_PAUSE_S
            except Refused:
                raise
            except ConnectionError:
                left_s = deadline - self._loop.time()
                if left_s <= 0 or not self.is_sought:
                    raise
            await asyncio.sleep(min(pause_s, left_s))  # the last attempt is at the end
            is_soon = self._loop.time() < began + _SOON_S
            pause_s = min(2 * pause_s, _SHORT_PAUSE_S if is_soon else _LONGEST_PAUSE_S)

    async def _greet(self, addresses: tuple[str, ...], deadline: float) -> messages.JobSpec | None:
        """Return the first message of a driver, or None after an election: its winner has to be dialled again."""
        timeout_s = min(self._launch.connect_timeout_s, max(0.1, deadline - self._loop.time()))
        stream = await DriverStream.dial(addresses, self.trust, timeout_s)
        try:
            async with self._greeting:
                if self._stream is not None:
                    raise ConnectionError("another driver has answered first")
                launch = self._launch
                numbers = (launch.slots, self._epoch, os.getpid(), messages.PROTOCOL_VERSION)
                stream.send(messages.AgentHello(launch.host, launch.agent, *numbers, VERSION, launch.rack))
                answer = await self._answer(stream, timeout_s)
                if not isinstance(answer, messages.NotLeading):
                    return self._accepted(stream, answer, addresses)
            self._elections.add(stream)
            with suppress(ConnectionError):  # the election is over
                while isinstance(answer, messages.VoteRequest):
                    self._vote_on(stream, answer)
                    answer = await self._answer(stream, max(0.1, deadline - self._loop.time()))
            stream.abort("the election is over")
            return None
        except BaseException:
            stream.abort("the greeting failed")
            raise
        finally:
            self._elections.discard(stream)

    async def _answer(self, stream: DriverStream, timeout_s: float) -> messages.ToAgent:
        answer = asyncio.ensure_future(stream.receive())
        try:
            await asyncio.wait({answer}, timeout=timeout_s)
            if not answer.done():
                raise ConnectionError("timed out: the driver did not answer")
            return answer.result()
        finally:
            answer.cancel()

    def _accepted(self, stream: DriverStream, spec: messages.ToAgent, addresses: tuple[str, ...]) -> messages.JobSpec:
        if not isinstance(spec, messages.JobSpec):
            raise ConnectionError(f"the first message of the driver is {type(spec).__name__}, not JobSpec")
        if self._job_id not in ("", spec.job_id):
            raise Refused(messages.Refusal("this driver has begun a new job with the same token", is_stopped=True))
        if spec.epoch < self._epoch:
            raise ConnectionError(f"the driver of epoch {spec.epoch} was replaced by one of epoch {self._epoch}")
        self._stream, self._epoch, self._job_id = stream, spec.epoch, spec.job_id
        self._found = addresses
        self._pending.clear()
        return spec

    def _vote_on(self, stream: DriverStream, request: messages.VoteRequest) -> None:
        """Answer a request about the job's record."""
        now = self._loop.time()
        match request:
            case messages.NotLeading():
                stream.send(self._voter(now))
                return
            case messages.Prepare(ballot):
                last = self._vote.promised
                self._vote, is_granted = prepare(self._vote, ballot)
                answer: messages.Vote = messages.Promised(ballot, self._vote.accepted)
                if self._vote.promised != last:
                    self._promised_at = now
                    for rival in self._elections - {stream}:
                        rival.send(self._voter(now))
            case messages.Accept(entry):
                self._vote, is_granted = accept(self._vote, entry)
                self._accepted_at = now if is_granted else self._accepted_at
                answer = messages.Accepted(entry.version)
        assert self._vote.promised is not None
        stream.send(answer if is_granted else messages.VoteRefused(self._vote.promised))

    def _voter(self, now: float) -> messages.Voter:
        return messages.Voter(
            self._vote.accepted, now - self._accepted_at, now - self._heard_at, now - self._promised_at
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
        """Return the next message that is not about this connection itself."""
        while True:
            try:
                message = await stream.receive()
            except ConnectionError as error:
                self._heard_at = stream.received_at
                stream.abort(str(error))
                self._stream = None
                raise
            if isinstance(message, messages.VoteRequest):
                self._vote_on(stream, message)
            elif isinstance(message, messages.Standbys):
                # Without any yet, a rival of this driver may still replace it: one that got votes beside it.
                self._standbys = message.addresses or self._standbys
                stream.send(messages.StandbysKnown(message.addresses))
            else:
                return message

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
