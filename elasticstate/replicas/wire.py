"""Protocol of the copy servers: authentication of both ends, and frames over plain TCP.

::

    server                                       client
    magic, nonce                ──────────────►
                                ◄──────────────  magic, nonce, proof over both nonces
    proof over both nonces      ──────────────►
    frames                      ◄─────────────►  frames

A proof is an HMAC with the job's key, and each end has its own label. So a stranger gets a nonce and nothing else.
A frame is its length, its body, and a tag: a keyed checksum of the direction, the number of the frame, and the body.
Contents of large ranges follow a frame as they are, without a keyed checksum; a CRC-32C is in the next frame.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from elasticstate.core.ids import CommitId, SlotId
from elasticstate.errors import CopyError
from elasticstate.replicas.store import MAX_HEADER_BYTES, Sealed

MAGIC = b"escopy\x00\x01"
NONCE_BYTES = 32
PROOF_BYTES = 32
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
ANSWER_BYTES = len(MAGIC) + NONCE_BYTES + PROOF_BYTES
MAX_REQUEST_BYTES = 1 << 20
MAX_REPLY_BYTES = MAX_HEADER_BYTES + (1 << 16)
MAX_FETCH_BYTES = 4 << 20  # in one frame, with a keyed checksum
MAX_RANGES = 4096  # in one request
PIECE_BYTES = 1 << 20  # the unit in which bytes are moved and checksummed, so that they stay in a cache

_LENGTH = struct.Struct("<I")
_NUMBER = struct.Struct("<Q")
_TAG_BYTES = 16


class OpenReplica(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Request for the seal and the header of a copy. Reply: ReplicaOpened or RequestRefused."""

    slot: SlotId
    commit: CommitId


class ReplicaOpened(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The seal of a copy, and all bytes before its random state."""

    sealed: Sealed
    header: bytes


class FetchBytes(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Request for a few bytes, with a keyed checksum. Reply: FetchedBytes or RequestRefused."""

    slot: SlotId
    commit: CommitId
    ranges: list[tuple[int, int]]  # offset and length of each


class FetchedBytes(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The bytes of all ranges of a FetchBytes."""

    data: bytes


class ReadRanges(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Request for many bytes. Reply: RangesFollow, the bytes of all ranges, RangesEnd; or RequestRefused."""

    slot: SlotId
    commit: CommitId
    ranges: list[tuple[int, int]]


class RangesFollow(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The bytes follow."""


class RangesEnd(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End of the bytes of a ReadRanges. If ``reason`` is not "", they are not those of the commit."""

    checksum: int  # CRC-32C of all these bytes
    reason: str = ""


class PushReplica(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Offer of a copy. Reply: ReplicaWanted or RequestRefused.

    The bytes from ``ReplicaWanted.offset`` on follow, and then the reply ReplicaComplete.
    """

    sealed: Sealed
    size_bytes: int  # of the file, as its header states: beyond the sealed bytes it is empty


class ReplicaWanted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Offset from which the target needs the bytes of a copy; ``is_kept``: it needs none."""

    offset: int
    is_kept: bool = False


class ReplicaComplete(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The copy is complete, and its checksum is correct."""


class ReplyFollows(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The reply to a request follows: the server verifies a copy, or reserves the space of one."""


class RequestRefused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The request is refused."""

    reason: str


Request = OpenReplica | FetchBytes | ReadRanges | PushReplica
Reply = (
    ReplicaOpened
    | FetchedBytes
    | RangesFollow
    | RangesEnd
    | ReplicaWanted
    | ReplicaComplete
    | ReplyFollows
    | RequestRefused
)

_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)
_encoder = msgspec.msgpack.Encoder()
R = TypeVar("R", bound=msgspec.Struct)


def proof(key: bytes, role: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """Return the proof that one end of a connection has the job's key. ``role``: its label."""
    return hmac.digest(key, b"elasticstate copies: " + role + MAGIC + server_nonce + client_nonce, "sha256")


def check_answer(key: bytes, server_nonce: bytes, answer: bytes) -> bytes:
    """Return the nonce in a client's answer. Raises CopyError if the client has not proved the key."""
    nonce, proved = answer[len(MAGIC) : -PROOF_BYTES], answer[-PROOF_BYTES:]
    if not answer.startswith(MAGIC) or not hmac.compare_digest(proved, proof(key, b"client", server_nonce, nonce)):
        raise CopyError("the peer does not belong to this job")
    return nonce


def set_up(connection: socket.socket, timeout_s: float) -> None:
    """Let each call on the connection block for at most ``timeout_s``, and detect a lost host in that time."""
    connection.settimeout(None)  # a socket with Python's time-out would need two system calls for each piece
    value = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = max(1, int(timeout_s))
    for number, setting in ((socket.TCP_KEEPIDLE, seconds), (socket.TCP_KEEPINTVL, seconds), (socket.TCP_KEEPCNT, 1)):
        connection.setsockopt(socket.IPPROTO_TCP, number, setting)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))


def cut(connection: socket.socket) -> None:
    """End all calls on a socket, also in other threads."""
    with suppress(OSError):  # it is not connected, or closed
        connection.shutdown(socket.SHUT_RDWR)


class Wire:
    """One end of an authenticated connection. All methods raise OSError when it breaks or times out."""

    def __init__(self, connection: socket.socket, key: bytes, role: bytes, nonces: tuple[bytes, bytes]) -> None:
        """``role``: ``b"server"`` or ``b"client"``. ``nonces``: of the server and of the client."""
        self.socket = connection
        self._key = proof(key, b"session", *nonces)
        other = b"client" if role == b"server" else b"server"
        self._sent, self._received = _Frames(self._key, role), _Frames(self._key, other)

    def close(self) -> None:
        self.socket.close()

    def send(self, message: msgspec.Struct) -> None:
        body = _encoder.encode(message)
        frame = b"".join((_LENGTH.pack(len(body)), body, self._sent.tag(body)))
        self.send_bytes(frame, 0, len(frame))

    def receive_request(self, wait: bool) -> Request | None:
        """Return the next request; None: the peer has closed the connection. ``wait``: without a time limit."""
        return self._receive(_requests, MAX_REQUEST_BYTES, wait)

    def receive(self, kind: type[R]) -> R:
        """Return the next reply. Raises CopyError if the peer refuses."""
        while isinstance(reply := self._receive(_replies, MAX_REPLY_BYTES, False), ReplyFollows):
            pass
        if isinstance(reply, RequestRefused):
            raise CopyError(reply.reason)
        if not isinstance(reply, kind):
            raise ConnectionError(f"received {type(reply).__name__} instead of {kind.__name__}")
        return reply

    def _receive(self, decoder: msgspec.msgpack.Decoder[R], most_bytes: int, wait: bool) -> R | None:
        prefix = bytearray(_LENGTH.size)
        if not fill(self.socket, memoryview(prefix), wait):
            return None
        (size,) = _LENGTH.unpack(prefix)
        if size > most_bytes:
            raise ConnectionError(f"received a frame of {size} bytes")
        frame = bytearray(size + _TAG_BYTES)
        fill(self.socket, memoryview(frame))
        body = bytes(memoryview(frame)[:size])
        if not hmac.compare_digest(self._received.tag(body), bytes(frame[size:])):
            raise ConnectionError("received a frame that was changed on its way")
        try:
            return decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise ConnectionError(f"received a malformed frame ({error})") from error

    def send_bytes(self, memory: Any, begin: int, end: int) -> None:
        """Send bytes of a memory.

        ``sendfile`` would save a copy here, but cost more at the receiver: it would copy from memory that is in no
        cache, page by page (measured with Linux 6.18).
        """
        with memoryview(memory) as view, view[begin:end] as part:
            try:
                self.socket.sendall(part)
            except BlockingIOError:
                raise TimeoutError("the peer receives nothing") from None


class _Frames:
    """Tags of the frames in one direction."""

    def __init__(self, key: bytes, role: bytes) -> None:
        self._key, self._role = key, role
        self._number = 0

    def tag(self, body: bytes) -> bytes:
        self._number += 1
        hasher = hashlib.blake2b(digest_size=_TAG_BYTES, key=self._key, person=self._role)
        hasher.update(_NUMBER.pack(self._number))
        hasher.update(body)
        return hasher.digest()


def dial(address: str, key: bytes, timeout_s: float, on_socket: Callable[[socket.socket], None]) -> Wire:
    """Connect to a copy server at "ip:port", and authenticate.

    ``on_socket`` gets the socket before it connects: another thread may ``cut`` it. Raises OSError, or CopyError if the
    server does not belong to the job.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout_s
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        on_socket(connection)
        connection.settimeout(timeout_s)
        connection.connect((host, int(port)))
        set_up(connection, max(0.001, deadline - time.monotonic()))
        greeting = _exactly(connection, GREETING_BYTES)
        if not greeting.startswith(MAGIC):
            raise CopyError(f"{address} is no copy server of this version")
        server_nonce, own_nonce = greeting[len(MAGIC) :], secrets.token_bytes(NONCE_BYTES)
        connection.sendall(MAGIC + own_nonce + proof(key, b"client", server_nonce, own_nonce))
        found = _exactly(connection, PROOF_BYTES)
        if not hmac.compare_digest(found, proof(key, b"server", server_nonce, own_nonce)):
            raise CopyError(f"the copy server at {address} does not belong to this job")
        set_up(connection, timeout_s)
        return Wire(connection, key, b"client", (server_nonce, own_nonce))
    except BaseException:
        connection.close()
        raise


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    fill(connection, memoryview(data), before=" before both ends had authenticated")
    return bytes(data)


def fill(connection: socket.socket, target: memoryview, wait: bool = False, before: str = "") -> bool:
    """Receive bytes until ``target`` is full. With ``wait`` the first may take long, and False means no bytes."""
    at = 0
    while at < len(target):
        try:
            found = connection.recv_into(target[at:], len(target) - at, socket.MSG_WAITALL)
        except BlockingIOError:
            if wait and at == 0:
                continue
            raise TimeoutError("the peer sends nothing") from None
        if not found:
            if wait and at == 0:
                return False
            raise ConnectionError(f"the peer has closed the connection{before}")
        at += found
    return True
