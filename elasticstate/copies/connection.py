"""Serving of one authenticated connection: the requests of a worker or an agent of the job, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing

from elasticstate.copies import wire
from elasticstate.copies.library import Library, Notify
from elasticstate.copies.wire import Wire
from elasticstate.errors import CopyError

_SIGN_INTERVAL_S = 0.5


class CopyConnection:
    """The server's end of a connection. ``serve`` runs on a thread of its own until the connection ends."""

    def __init__(self, connection: Wire, library: Library, on_kept: Notify, on_received: Callable[[int], None]) -> None:
        """``on_kept`` is called when a copy has arrived, ``on_received`` with the bytes of each part of it."""
        self._wire = connection
        self._library = library
        self._on_kept = on_kept
        self._on_received = on_received
        self._next_sign = 0.0  # when the peer needs another sign of life

    def serve(self) -> None:
        """Serve requests. Raises OSError when the connection breaks."""
        while (request := self._wire.receive_request(wait=True)) is not None:
            self._next_sign = time.monotonic() + _SIGN_INTERVAL_S
            reason = self._answer(request)
            if reason:
                self._wire.send(wire.RequestRefused(reason))

    def _answer(self, request: wire.Request) -> str:
        """Answer a request. Return why it is refused, or ""."""
        try:
            self._carry_out(request)
        except CopyError as error:
            return str(error)
        return ""

    def _carry_out(self, request: wire.Request) -> None:
        match request:
            case wire.OpenCopy():
                with closing(self._library.open_verified(request.slot, request.commit, self._go_on)) as source:
                    header = source.header()
                    source.check_unchanged()
                    self._wire.send(wire.CopyOpened(source.sealed, header))
            case wire.FetchBytes():
                self._fetch(request)
            case wire.ReadRanges():
                self._read(request)
            case wire.PushCopy():
                self._receive(request)

    def _go_on(self) -> bool:
        """Let the peer wait for the reply longer than for a silent server. Return False when the server closes."""
        now = time.monotonic()
        if now >= self._next_sign:
            self._next_sign = now + _SIGN_INTERVAL_S
            self._wire.send(wire.ReplyFollows())
        return self._library.is_open()

    def _fetch(self, request: wire.FetchBytes) -> None:
        with closing(self._library.open_verified(request.slot, request.commit, self._go_on)) as source:
            source.check_ranges(request.ranges)
            if sum(length for _, length in request.ranges) > wire.MAX_FETCH_BYTES:
                raise CopyError("the request is for too many bytes")
            data = b"".join(source.read(offset, length) for offset, length in request.ranges)
            source.check_unchanged()
            self._wire.send(wire.FetchedBytes(data))

    def _read(self, request: wire.ReadRanges) -> None:
        """Send ranges. The peer compares checksums: it detects damage on the way, and bytes that a worker overwrites
        between the two passes over them.
        """
        with closing(self._library.open_verified(request.slot, request.commit, self._go_on)) as source:
            source.check_ranges(request.ranges)
            self._wire.send(wire.RangesFollow())
            found = 0
            for offset, length in request.ranges:
                for at in range(offset, offset + length, wire.PIECE_BYTES):
                    end = min(at + wire.PIECE_BYTES, offset + length)
                    found = source.checksum(at, end, found)
                    self._wire.send_bytes(source.memory, at, end)
            reason = ""
            try:
                source.check_unchanged()
            except CopyError as error:
                reason = str(error)
            self._wire.send(wire.RangesEnd(found, reason))

    def _receive(self, request: wire.PushCopy) -> None:
        sealed, store = request.sealed, self._library.store
        incoming = store.begin(sealed, request.size_bytes, self._go_on)
        if incoming is None:
            self._on_kept(sealed.slot, sealed.commit)  # again: the driver may be a new one
            self._wire.send(wire.CopyWanted(0, is_kept=True))
            return
        with incoming.owned(self._wire.cut, self._go_on):
            self._wire.send(wire.CopyWanted(incoming.offset))
            try:
                received = memoryview(bytearray(wire.PIECE_BYTES))  # stays in a cache
                while part := received[: incoming.missing_bytes]:
                    self._wire.fill(part)
                    self._on_received(len(part))
                    incoming.write(part)
            except CopyError as error:
                # The peer is sending: a refusal between its bytes has no meaning to it.
                raise ConnectionError(str(error)) from error
            store.finish(incoming)
        self._on_kept(sealed.slot, sealed.commit)
        self._wire.send(wire.CopyComplete())
