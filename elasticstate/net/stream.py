"""Connection between the driver and an agent, or a client that asks for the status: TLS, length-prefixed messages.

No library is used for this. The existing ones (gRPC's core) accept any number of unauthenticated connections, and do
not report a refused client with the reason. asyncio and ssl leave both to us, and lack only a length before each
message.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from elasticstate.compat.standard_library import set_tls_buffer_bytes
from elasticstate.net.messages import MAX_MESSAGE_BYTES

# With asyncio's default of 256 KiB, the driver of a thousand hosts would waste a quarter of a gigabyte.
set_tls_buffer_bytes(1 << 14)
_LENGTH = struct.Struct("!I")
_MAX_BACKLOG_BYTES = 64 << 20  # unread data of a peer, before the connection is aborted
_NO_LINGER = struct.pack("ii", 1, 0)  # socket(7)
_LAST_MOMENT_S = 1.0  # time for the other end to close as well


class Stream(asyncio.Protocol):
    """One connection; messages keep their order. ``received(data)`` gets each message, ``lost(reason)`` the end, once.

    A message of length 0 is a heartbeat of the other end, and is not passed to ``received``.
    """

    def __init__(self, received: Callable[[bytes], None], lost: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._received = received
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._pending = bytearray()
        self._reason = ""
        self._first_done: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self.received_at = self._loop.time()

    # ---------------------------------------------------------------------------------------------------- for its user

    def send(self, data: bytes) -> None:
        """Send a message after all earlier ones. No effect after the connection has ended."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(_LENGTH.pack(len(data)) + data)
        if transport.get_write_buffer_size() > _MAX_BACKLOG_BYTES:
            self.abort("the peer does not read its messages")

    def close(self) -> None:
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
        await asyncio.wait({self._first_done, self._ended}, return_when=asyncio.FIRST_COMPLETED)

    async def closed(self) -> None:
        """Wait until the connection has ended."""
        await asyncio.wait({self._ended})

    def when_closed(self, callback: Callable[[], object]) -> None:
        self._ended.add_done_callback(lambda _: callback())

    @property
    def local_address(self) -> str:
        """The address of this end. Raises ConnectionError when the connection has ended."""
        if self._transport is None:
            raise ConnectionError(self._reason)
        address: str = self._transport.get_extra_info("sockname")[0]
        return address

    @property
    def peer_address(self) -> str:
        """The address of the other end. Raises ConnectionError when the connection has ended."""
        if self._transport is None:
            raise ConnectionError(self._reason)
        address: str = self._transport.get_extra_info("peername")[0]
        return address

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
                self._received(bytes(self._pending[begin + _LENGTH.size : end]))
            begin = end
        del self._pending[:begin]
        if begin and not self._first_done.done():
            self._first_done.set_result(None)

    def give_up(self) -> None:
        """Forget user and callbacks: the handshake has failed, so ``connection_lost`` is never called.

        The stream is freed at once. Otherwise thousands of refused connections would wait for one long collection.
        """
        self._received = self._lost = _ignore
        self._ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._ended.set_result(None)
        self._reason = self._reason or (reason_of(error) if error is not None else "the peer has closed the connection")
        self._lost(self._reason)


def _ignore(_: object) -> None:
    pass


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
            return "timed out: the peer did not authenticate"
        case ConnectionResetError() | BrokenPipeError():
            return "the peer has reset the connection"
        case ConnectionRefusedError():
            return "connection refused: no process listens at this port"
        case _:
            return str(error) or type(error).__name__


class MessageQueue:
    """The messages of a stream, one at a time."""

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()
        self._end: str | None = None
        self._changed = asyncio.Event()

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


async def dial(address: str, context: ssl.SSLContext, name: str, timeout_s: float) -> tuple[Stream, MessageQueue]:
    """Connect to ``host:port``. Raises ConnectionError with the reason."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    queue = MessageQueue()
    loop = asyncio.get_running_loop()
    connecting = asyncio.ensure_future(
        loop.create_connection(
            lambda: Stream(queue.received, queue.lost), host, int(port), ssl=context, server_hostname=name
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
    return stream, queue
