"""The control plane: the driver listens; its agents, and clients that ask for the status, connect to it.

An unauthenticated connection can only wait for authentication: data from it is not read. The time for authentication
and the number of such connections (see trust.py) are limited. Each refused connection is reported.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
from collections import deque
from contextlib import suppress
from itertools import groupby
from math import inf
from typing import Protocol

import msgspec

from elasticstate.compat.libraries import set_tls_buffer_bytes
from elasticstate.core.register import Vote, accept, prepare
from elasticstate.machine import version
from elasticstate.net import messages
from elasticstate.net.messages import MAX_MESSAGE_BYTES
from elasticstate.net.names import listening_socket, port_of
from elasticstate.net.trust import BACKLOG, NAME, LocalPeers, Strangers, Trust

# --------------------------------------------------------------------------------------------------------------- stream
# Connection between the driver and an agent, or a client that asks for the status: TLS, length-prefixed messages.
# docs/decisions/control-plane.md says why no library does this.


# With asyncio's default of 256 KiB, the driver of a thousand hosts would waste a quarter of a gigabyte.
set_tls_buffer_bytes(1 << 14)
VERSION = version()  # read from a file: not while an event loop runs
_LENGTH = struct.Struct("!I")
_MAX_BACKLOG_BYTES = 64 << 20  # unread data of a peer, before the connection is aborted
_NO_LINGER = struct.pack("ii", 1, 0)  # socket(7)
_LAST_MOMENT_S = 1.0  # time for the other end to close as well


class Stream(asyncio.Protocol):
    """One connection; messages keep their order. A subclass handles what arrives."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._pending = bytearray()
        self._reason = ""
        self._first_done: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.received_at = self._loop.time()

    # ----------------------------------------------------------------------------------------------- for its subclass

    def received(self, data: bytes) -> None:
        """Handle a message. One of length 0 is a heartbeat of the other end, and does not come here."""

    def lost(self, reason: str) -> None:
        """Handle the end of the connection; called once."""

    # ---------------------------------------------------------------------------------------------------- for its user

    def send(self, message: messages.Message) -> None:
        """Send a message after all earlier ones. No effect after the connection has ended."""
        self.write(messages.encode(message))

    def write(self, data: bytes) -> None:
        """Send an encoded message; empty: a heartbeat."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(_LENGTH.pack(len(data)) + data)
        if transport.get_write_buffer_size() > _MAX_BACKLOG_BYTES:
            self.abort("the peer does not read its messages")

    def finish(self) -> None:
        """Send all pending messages and close: within a moment, even if the other end does not."""
        # A second close() of an SSL transport drops its protocol (Python 3.11, asyncio/sslproto.py).
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()
            self._loop.call_later(_LAST_MOMENT_S, self.abort, "the peer did not close the connection in time")

    def abort(self, reason: str) -> None:
        """Close at once, without sending pending data. ``lost`` gets the reason."""
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.abort()

    def reset(self, reason: str) -> None:
        """Close at once with a reset (RST), so that the other end detects it even if nothing arrives from there.

        An orderly close would wait until pending data is acknowledged.
        """
        connection = self._transport.get_extra_info("socket") if self._transport is not None else None
        if connection is not None:  # the connection has not ended yet
            with suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.abort(reason)

    async def first_received(self) -> None:
        """Wait until the first message has been received and handled, or the connection has ended."""
        await asyncio.wait({self._first_done, self.ended}, return_when=asyncio.FIRST_COMPLETED)

    async def closed(self) -> None:
        """Wait until the connection has ended."""
        await asyncio.wait({self.ended})

    @property
    def local_address(self) -> str:
        """The address of this end. Raises ConnectionError when the connection has ended."""
        return self._address("sockname")

    @property
    def peer_address(self) -> str:
        """The address of the other end. Raises ConnectionError when the connection has ended."""
        return self._address("peername")

    def _address(self, end: str) -> str:
        if self._transport is None:
            raise ConnectionError(self._reason)
        return str(self._transport.get_extra_info(end)[0])

    # ------------------------------------------------------------------------------------------------------ for asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.received_at = self._loop.time()
        self._pending += data
        begin = 0
        while len(self._pending) - begin >= _LENGTH.size and not self._reason:
            (length,) = _LENGTH.unpack_from(self._pending, begin)
            if length > MAX_MESSAGE_BYTES:
                self.abort(f"received a message of {length} bytes; the limit is {MAX_MESSAGE_BYTES}")
                return
            end = begin + _LENGTH.size + length
            if len(self._pending) < end:
                break
            if length:
                self.received(bytes(self._pending[begin + _LENGTH.size : end]))
            begin = end
        del self._pending[:begin]
        if begin and not self._first_done.done():
            self._first_done.set_result(None)

    def give_up(self) -> None:
        """End: the handshake has failed, so ``connection_lost`` is never called."""
        self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self.ended.set_result(None)
        self._reason = self._reason or (reason_of(error) if error is not None else "the peer has closed the connection")
        self.lost(self._reason)


def reason_of(error: BaseException) -> str:
    """Return why a connection was refused or has ended, as text for the log."""
    match error:
        case ssl.SSLCertVerificationError():
            return "TLS handshake failed: the peer has the token of another job"
        case ssl.SSLError() if "DID_NOT_RETURN" in (error.reason or ""):
            return "TLS handshake failed: the peer has sent no certificate"
        case ssl.SSLError() if "ALERT" in (error.reason or "") or "CERTIFICATE" in (error.reason or ""):
            return "TLS handshake failed: the peer and this process have different tokens"
        case ssl.SSLError():
            detail = (error.reason or str(error)).lower().replace("_", " ")
            return f"TLS handshake failed: the peer does not belong to this job ({detail})"
        case asyncio.TimeoutError() | TimeoutError():
            return "timed out: the peer did not answer"
        case ConnectionAbortedError():
            return _NO_AUTHENTICATION
        case ConnectionResetError() | BrokenPipeError():
            return "the peer has reset the connection"
        case ConnectionRefusedError():
            return "connection refused: no process listens at this port"
        case _:
            return str(error) or type(error).__name__


_NO_AUTHENTICATION = "timed out: the peer did not authenticate"
_NEXT_ADDRESS_S = 0.25  # RFC 8305
_CLOSED_EARLY = "the peer closed the connection before it had authenticated, perhaps because it has another token"


class Owner(Protocol):
    """Callbacks of the owner of a ControlServer. All run on the server's event loop."""

    def agent_joined(self, stream: AgentStream, /) -> None:
        """Handle the Hello of an agent."""

    def agent_sent(self, stream: AgentStream, message: messages.FromAgent, /) -> None:
        """Handle a later message of an agent."""

    def agent_lost(self, stream: AgentStream, reason: str, /) -> None:
        """Handle the end of an agent's connection; called once."""

    def status(self, as_json: bool, /) -> str:
        """Return the answer to ``elasticrun status``."""

    def replaced(self, epoch: int, at: str, /) -> None:
        """Handle the word of a newer driver of the job, on host ``at``."""

    def refused(self, peer: str, reason: str, /) -> None:
        """Handle a connection that was refused, or has ended, before the Hello of an agent."""


class AgentStream(Stream):
    """The driver's end of one connection. It belongs to an agent once its Hello has arrived."""

    hello: messages.AgentHello

    def __init__(self, owner: Owner, peer: str) -> None:
        super().__init__()
        self.peer = peer
        self.has_sent = False
        self._owner = owner
        self._is_agent = False

    def refuse(self, reason: str, is_stopped: bool = False) -> None:
        """Send a refusal (see messages.Refusal), and close the connection."""
        self.send(messages.Refusal(reason, is_stopped))
        self.finish()

    def received(self, data: bytes) -> None:
        try:
            if self._is_agent:
                self._owner.agent_sent(self, messages.decode_from_agent(data))
            elif not self.has_sent:
                self._first(messages.decode_opening(data))
        except msgspec.DecodeError as error:
            self.abort(f"received a malformed message ({error})")

    def _first(self, first: messages.Opening) -> None:
        self.has_sent = True
        if isinstance(first, messages.AskStatus):
            self.write(self._owner.status(first.as_json).encode())
            self.finish()
        elif isinstance(first, messages.Replaced):
            self._owner.replaced(first.epoch, first.at)
            self.finish()
        elif first.protocol != messages.PROTOCOL_VERSION:
            reason = (
                f"the agent has elasticstate {first.version} (protocol {first.protocol}), the driver has elasticstate "
                f"{VERSION} (protocol {messages.PROTOCOL_VERSION}). Install the same version on all hosts"
            )
            self._owner.refused(self.peer, reason)
            self.refuse(reason)
        else:
            self.hello, self._is_agent = first, True
            self._owner.agent_joined(self)

    def lost(self, reason: str) -> None:
        if self._is_agent:
            self._owner.agent_lost(self, reason)
        elif not self.has_sent:
            self._owner.refused(self.peer, reason)


class _Authentication:
    """The authentication of one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.refusal = ""  # the reason

    def dismiss(self, reason: str) -> None:
        """Refuse the connection for this reason."""
        self.refusal = reason
        with suppress(OSError):  # the connection has ended already
            self._connection.shutdown(socket.SHUT_RDWR)


class ControlServer:
    """The driver's server."""

    def __init__(
        self, trust: Trust, authentication_timeout_s: float, owner: Owner, strangers: Strangers | None = None
    ) -> None:
        """``strangers``: the unauthenticated connections of all ports of this process."""
        self._trust = trust
        self._owner = owner
        self._strangers = Strangers(authentication_timeout_s, owner.refused) if strangers is None else strangers
        self._unauthenticated: dict[asyncio.Task[None], _Authentication] = {}
        self._streams: set[Stream] = set()
        self._listeners: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []

    def listen(self, host: str, port: int = 0) -> int:
        """Listen at the address ``host``; may be called for several. Return the port. Raises OSError."""
        listener = listening_socket(host, port, BACKLOG)
        listener.setblocking(False)
        self._listeners.append(listener)
        self._accepting.append(asyncio.ensure_future(self._strangers.accept(listener, self._accepted)))
        return port_of(listener)

    async def stop(self) -> None:
        """Close all connections, after their pending messages are sent."""
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        for authentication in self._unauthenticated.values():
            authentication.dismiss("the driver is shutting down")
        await asyncio.gather(*self._unauthenticated)
        closing = [asyncio.ensure_future(stream.closed()) for stream in self._streams]
        for stream in self._streams:
            stream.finish()
        if closing:
            await asyncio.wait(closing)

    # --------------------------------------------------------------------------------------------- incoming connections

    def _accepted(self, connection: socket.socket, peer: str, local_peers: LocalPeers) -> None:
        if reason := local_peers.refuse(connection):
            connection.close()
            self._owner.refused(peer, reason)
            return
        authentication = _Authentication(connection)
        self._strangers.add(authentication, local_peers.user_of(connection))
        task = asyncio.ensure_future(self._authenticate(connection, peer, authentication))
        self._unauthenticated[task] = authentication
        task.add_done_callback(lambda task: self._strangers.remove(self._unauthenticated.pop(task)))

    async def _authenticate(self, connection: socket.socket, peer: str, authentication: _Authentication) -> None:
        """Wait for the certificate and the first message, each with a time limit; else close the connection."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._strangers.timeout_s
        await _first_byte(connection, self._strangers.timeout_s)
        left_s = ends_at - loop.time()
        if authentication.refusal or left_s <= 0:
            connection.close()
            self._owner.refused(peer, authentication.refusal or _NO_AUTHENTICATION)
            return
        stream = AgentStream(self._owner, peer)
        self._streams.add(stream)
        stream.ended.add_done_callback(lambda _: self._streams.discard(stream))
        try:
            await loop.connect_accepted_socket(
                lambda: stream, connection, ssl=self._trust.server, ssl_handshake_timeout=left_s
            )
        except (OSError, ssl.SSLError) as error:
            stream.give_up()
            error.__traceback__ = None  # its frames would hold the buffers of TLS, 70 kB, until a garbage collection
            reason = _CLOSED_EARLY if isinstance(error, ConnectionResetError) else reason_of(error)
            self._owner.refused(peer, authentication.refusal or reason)
        else:
            await asyncio.wait({asyncio.ensure_future(stream.first_received())}, timeout=self._strangers.timeout_s)
            if not stream.has_sent:
                stream.abort(authentication.refusal or "timed out: the peer authenticated but sent no message")


async def _first_byte(connection: socket.socket, timeout_s: float) -> None:
    """Wait until the peer has sent something or has closed the connection, or for the time. TLS costs 70 kB, and dozens
    of objects that each garbage collection examines: an idle connection does not have them."""
    loop, came = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, came.set)
    try:
        await asyncio.wait_for(came.wait(), timeout_s)
    except asyncio.TimeoutError:
        pass
    finally:
        loop.remove_reader(connection)


class Refused(ConnectionRefusedError):
    """The driver has refused this agent; the text is the reason. ``is_stopped``: see messages.Refusal."""

    def __init__(self, refusal: messages.Refusal) -> None:
        super().__init__(refusal.reason)
        self.is_stopped = refusal.is_stopped


class DriverStream(Stream):
    """The end of an agent, or of a client that asks for the status: it gets the messages one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._messages: deque[bytes] = deque()
        self._end: str | None = None
        self._changed = asyncio.Event()

    @classmethod
    async def dial(cls, addresses: tuple[str, ...], trust: Trust, timeout_s: float) -> DriverStream:
        """Connect to the first of these ``host:port`` that authenticates as the job's driver.

        As in RFC 8305, each further address is tried a moment after the one before; but one of the other family (IPv4
        or IPv6) only when all before have failed: all hosts of a job must take the same one. Raises ConnectionError,
        with the reasons, when none succeeds in time.
        """
        reasons: list[str] = []
        for _, family in groupby(addresses, lambda address: address.startswith("[")):
            if (stream := await cls._dial(list(family), trust, timeout_s, reasons)) is not None:
                return stream
        raise ConnectionError("; ".join(dict.fromkeys(reasons)))

    @classmethod
    async def _dial(cls, ahead: list[str], trust: Trust, timeout_s: float, reasons: list[str]) -> DriverStream | None:
        """Connect to the first of these that authenticates. Return None, and add the reasons, if none does in time."""
        dialling: set[asyncio.Task[DriverStream]] = set()
        try:
            while ahead or dialling:
                if ahead:
                    dialling.add(asyncio.ensure_future(dial(ahead.pop(0), trust.client, NAME, timeout_s)))
                done, dialling = await asyncio.wait(
                    dialling, timeout=_NEXT_ADDRESS_S if ahead else None, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    if task.exception() is None:
                        return task.result()
                    reasons.append(str(task.exception()))
            return None
        finally:
            for task in dialling:
                task.cancel()
            for result in await asyncio.gather(*dialling, return_exceptions=True):
                if isinstance(result, DriverStream):  # this connection succeeded, too
                    result.abort("another address answered first")

    def received(self, data: bytes) -> None:
        self._messages.append(data)
        self._changed.set()

    def lost(self, reason: str) -> None:
        self._end = reason
        self._changed.set()

    async def get(self) -> bytes:
        """Return the next message. After the last one, raises ConnectionError with the reason."""
        while not self._messages:
            if self._end is not None:
                raise ConnectionError(self._end)
            self._changed.clear()
            await self._changed.wait()
        return self._messages.popleft()

    async def receive(self) -> messages.ToAgent:
        """Return the next message to an agent. Raises ConnectionError, with the reason, when the connection has ended.

        Raises Refused when the driver has refused this agent.
        """
        try:
            message: messages.ToAgent = messages.decode_to_agent(await self.get())
        except msgspec.DecodeError as error:
            raise ConnectionError(f"received a malformed message ({error})") from None
        if isinstance(message, messages.Refusal):
            raise Refused(message)
        return message

    async def close(self) -> None:
        """Send all pending messages, then close the connection."""
        self.finish()
        await self.closed()


async def dial(address: str, context: ssl.SSLContext, name: str, timeout_s: float) -> DriverStream:
    """Connect to ``host:port``. Raises ConnectionError with the reason."""
    host, _, port = address.rpartition(":")
    connecting = asyncio.ensure_future(
        asyncio.get_running_loop().create_connection(
            DriverStream, host.strip("[]"), int(port), ssl=context, server_hostname=name
        )
    )
    # Not asyncio.wait_for: until Python 3.12 it loses a cancellation that arrives while the connection is made.
    try:
        await asyncio.wait({connecting}, timeout=timeout_s)
        if not connecting.done():
            raise ConnectionError(f"{address}: {reason_of(asyncio.TimeoutError())}")
        _, stream = connecting.result()
    except (OSError, ssl.SSLError) as error:
        raise ConnectionError(f"{address}: {reason_of(error)}") from None
    finally:
        connecting.cancel()
    return stream


async def tell_replaced(address: str, trust: Trust, timeout_s: float, message: messages.Replaced) -> None:
    """Tell the driver at ``address`` that a newer one leads the job. Raises ConnectionError with the reason."""
    stream = await dial(address, trust.client, NAME, timeout_s)
    stream.send(message)
    await stream.close()


async def ask_status(address: str, token: str, timeout_s: float, as_json: bool = False) -> str:
    """Return the status of the driver at ``address``. Raises ConnectionError with the reason."""
    stream = await dial(address, Trust(token).client, NAME, timeout_s)
    stream.send(messages.AskStatus(as_json))
    getting = asyncio.ensure_future(stream.get())
    await asyncio.wait({getting}, timeout=timeout_s)
    await stream.close()
    return (await getting).decode()


# ----------------------------------------------------------------------------------------------------------- connection
# An agent's connection to its driver: dialled, lost, dialled again. Messages sent while disconnected are dropped.


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

    def __init__(self, launch: messages.Launch) -> None:
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
