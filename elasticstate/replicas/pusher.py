"""Replication of commits: an agent keeps copies of its slots' commits, and sends them to agents of other hosts.

One thread does both, outside the training path. It copies the buffer as soon as the worker has sealed the commit, while
the worker trains. If the worker overwrites the buffer meanwhile, the copy is dropped, and the driver orders a commit
that is still to come, for which workers wait. Only a complete copy is sent: it does not change, so a broken connection
continues where it was.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from elasticstate.core.ids import CommitId, SlotId
from elasticstate.core.types import CopyFigures
from elasticstate.errors import CopyError
from elasticstate.replicas import wire
from elasticstate.replicas.replica_server import Library, Notify, NotifyDropped, ReplicaConnection, ReplicaServer
from elasticstate.replicas.store import ReplicaStore, SealedSlot, SlotBuffers, Source, copied_parts
from elasticstate.replicas.wire import Wire

_BURST_S = 0.05  # bytes of this time may be sent at once


class Rate:
    """Limit of the bytes that an agent sends per second: a token bucket.

    One thread uses it; any thread may read ``passed_bytes``.
    """

    def __init__(self, bytes_per_s: float | None, largest_bytes: int) -> None:
        """``bytes_per_s``: None for no limit. ``largest_bytes``: the largest piece to send at once."""
        self._bytes_per_s = bytes_per_s
        burst = largest_bytes if bytes_per_s is None else bytes_per_s * _BURST_S
        self.piece_bytes = max(1, min(largest_bytes, int(burst)))
        self.passed_bytes = 0  # so far
        self._free_at = 0.0  # when the bytes so far are paid for

    def wait(self, size_bytes: int, pause: Callable[[float], bool]) -> bool:
        """Wait until this many bytes may be sent. Return False if ``pause(seconds)`` has returned True, to cancel."""
        if self._bytes_per_s is not None:
            now = time.monotonic()
            begin = max(self._free_at, now)
            self._free_at = begin + size_bytes / self._bytes_per_s
            if begin > now and pause(begin - now):
                return False
        self.passed_bytes += size_bytes
        return True


_LOOK_INTERVAL_S = 0.002
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_UNREACHABLE_S = 30.0  # after that time, a target is given up
_SEND_BYTES = 4 << 20
_PIN_BYTES_PER_S = 500 << 20  # at least: of copies in memory, while workers wait
_PIN_NS = 10_000_000
_LONGEST_PIN_NS = 1_000_000_000
_NO_COMMIT = CommitId(-1, 0)


class Target(msgspec.Struct, frozen=True, array_like=True):
    """A host that is to keep a copy, and the "ip:port" of its copy server."""

    host: str
    address: str


Targets = Mapping[int, Sequence[Target]]
"""Targets of each slot of this host whose commit is to be kept here, too."""


class _NotAccepted(CopyError):
    """The target does not want this copy, or has no place for it."""


class _Order:
    """``after``: begin when these are done, as they free the memory for the copies."""

    def __init__(self, commit: CommitId, targets: Targets, after: Sequence[Future[Any]]) -> None:
        self.commit, self.targets, self.after = commit, targets, after
        self.cancelled = threading.Event()


class _Delivery:
    """The copy of one slot on its way to one target."""

    def __init__(self, slot: SlotId, target: Target) -> None:
        self.slot, self.target = slot, target
        self.pause_s = _FIRST_PAUSE_S
        self.due = 0.0
        self.fails_since = 0.0  # when the first attempt failed since bytes have arrived; 0: none


@dataclass(eq=False, kw_only=True)
class HostReplicas:
    """The copies of one host: their store, their server, and a thread that carries out the newest order.

    Methods return at once, except the constructor (files in memory), ``open`` and ``close``. The constructor takes over
    the copies that the previous agent of this host has kept. It raises OSError.
    """

    host: str
    job_id: str
    key: bytes
    directory: int  # descriptor of the commit directory
    slots: Mapping[int, SealedSlot]  # the files of each slot, may change
    timeout_s: float  # for a peer that does not authenticate or sends nothing
    # Callbacks, on any thread: when this host has a new copy; when a copy is damaged, could not be made or was refused;
    # and when a buffer of a slot is damaged.
    on_kept: Notify
    on_dropped: NotifyDropped
    on_damaged: Notify
    log: Callable[[str], None]
    rate_bytes_per_s: float | None = None  # most bytes to send per second; None: no limit

    def __post_init__(self) -> None:
        self._received_bytes = 0
        self._counting = threading.Lock()
        self.store = ReplicaStore(self.directory, self.job_id, self.key)
        buffers = SlotBuffers(self.job_id, self.host, self.slots)
        self._library = Library(buffers, self.store, self.on_dropped, self.on_damaged)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="elasticstate-copies")
        self._forgetting: list[Future[Any]] = []  # that is not known to be done
        self._server: ReplicaServer | None = None
        self._rate = Rate(self.rate_bytes_per_s, _SEND_BYTES)
        self._changed = threading.Condition()
        self._next: _Order | None = None
        self._current: _Order | None = None
        self._socket: socket.socket | None = None
        self._is_closed = False
        self._pusher: threading.Thread | None = None

    def start(self, address: str) -> str:
        """Serve copies at this address. Return "address:port". Raises OSError."""
        self._server = ReplicaServer(address, self.key, self.timeout_s, self._serve, self.log)
        if self.store.unverified():
            self._threads.submit(self._library.verify_taken_over)
        return self._server.address

    @property
    def address(self) -> str:
        """ "address:port" of the copy server; "" if it does not serve."""
        return self._server.address if self._server is not None else ""

    def _serve(self, connection: Wire) -> None:
        ReplicaConnection(connection, self._library, self.on_kept, self._count).serve()

    def _count(self, size_bytes: int) -> None:
        with self._counting:  # each connection has a thread
            self._received_bytes += size_bytes

    def figures(self) -> CopyFigures:
        """Return the memory of the copies, and the bytes that were sent and received so far."""
        return CopyFigures(self.store.size_bytes(), self._rate.passed_bytes, self._received_bytes)

    def replicate(self, commit: CommitId, targets: Targets) -> None:
        """Keep copies of a commit of these slots, and send them to their targets. Cancels the previous order.

        A slot may have no target. ``on_kept`` or ``on_dropped`` follows for each slot, unless another order or
        ``stop_replication`` comes before; also for a copy that is kept already. Each target's agent reports its own
        copy.
        """
        with self._changed:
            if self._is_closed:
                return
            self._cancel()
            self._next = _Order(commit, targets, self._forgetting)
            self._changed.notify()
            if self._pusher is None:
                self._pusher = threading.Thread(target=self._run, name="elasticstate-copies-pusher", daemon=True)
                self._pusher.start()

    def stop_replication(self) -> None:
        """Cancel the order to replicate a commit. Copies that exist stay."""
        with self._changed:
            self._cancel()

    def forget(self, before: CommitId, besides: CommitId | None = None) -> None:
        """Remove all copies of commits older than ``before``, except those of ``besides``.

        Copies of commits older than ``before`` are refused from now on, and an order about one is cancelled.
        """
        with self._changed:
            if self._next is not None and self._next.commit < before:
                self._next = None
            if self._current is not None and self._current.commit < before:
                self._cancel_current()
        with suppress(RuntimeError):  # closed: the driver's message was late
            begun = self._threads.submit(self.store.forget, before, besides)
            self._forgetting = [*(other for other in self._forgetting if not other.done()), begun]

    def open(self, slot: SlotId, commit: CommitId) -> Source:
        """Open a copy on this host whose checksum is correct: a kept one, or a buffer. Close it. Raises CopyError.

        Blocks while the copy is verified.
        """
        return self._library.open_verified(slot, commit, self._library.is_open)

    def close(self) -> None:
        """Close the port, end all threads, and leave the copies to the next agent of this host. Blocks."""
        self._library.close()
        with self._changed:
            self._is_closed = True
            self._cancel()
            self._changed.notify()
        if self._pusher is not None:
            self._pusher.join()
        if self._server is not None:
            self._server.close()
        self._threads.shutdown()
        self.store.close()

    def _cancel(self) -> None:
        self._next = None
        self._cancel_current()

    def _cancel_current(self) -> None:
        if self._current is not None:
            self._current.cancelled.set()
        if self._socket is not None:
            wire.cut(self._socket)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._is_closed)
                order, self._current, self._next = self._next, self._next, None
            if order is None:
                return
            self._carry_out(order)

    def _carry_out(self, order: _Order) -> None:
        slots = [SlotId(self._library.buffers.host, slot) for slot in sorted(order.targets)]
        wait(order.after)
        self._pin(slots, order)
        kept = [slot for slot in slots if self._keep(slot, order)]
        deliveries = [_Delivery(slot, target) for slot in kept for target in order.targets[slot.slot]]
        while deliveries and not order.cancelled.is_set():
            next_one = min(deliveries, key=lambda delivery: delivery.due)
            if order.cancelled.wait(max(0.0, next_one.due - time.monotonic())):
                return
            if self._deliver(next_one, order):
                deliveries.remove(next_one)

    # ------------------------------------------------------------------------------------------- copies on this host

    def _pin(self, slots: list[SlotId], order: _Order) -> None:
        """Let the workers wait with the next commit but one, if the driver has ordered a commit that was still to come:
        earlier attempts have failed, because the workers commit more often than copies of all slots take.

        The wait is bounded by the time in which all slots can be copied in memory, and by a second. No copy rests on
        it: if it is too short, the seal is gone at the end, and the copy is dropped.
        """
        buffers, kept = self._library.buffers, self._library.store.kept()
        pending = [slot for slot in slots if (slot, order.commit) not in kept]
        pending = [slot for slot in pending if (buffers.newest(slot) or _NO_COMMIT) < order.commit]

        def until_ns(length: int) -> int:
            wait_ns = _PIN_NS + len(slots) * length * 1_000_000_000 // _PIN_BYTES_PER_S
            return time.monotonic_ns() + min(wait_ns, _LONGEST_PIN_NS)

        while pending and not order.cancelled.wait(_LOOK_INTERVAL_S):
            late = [slot for slot in pending if not buffers.pin(slot, order.commit, until_ns)]
            pending = [slot for slot in late if (buffers.newest(slot) or _NO_COMMIT) < order.commit]

    def _keep(self, slot: SlotId, order: _Order) -> bool:
        """Keep a copy of a slot's commit in the store. Return False if that is not possible."""
        try:
            if (slot, order.commit) not in self._library.store.kept():
                with closing(self._sealed(slot, order)) as source:
                    self._copy(source, order)
            self.on_kept(slot, order.commit)
        except (CopyError, OSError) as error:
            if not order.cancelled.is_set():
                self.log(f"commit {order.commit} of slot {slot} is not replicated: {error}")
                self.on_dropped(slot.host, slot, order.commit, str(error))
            return False
        finally:
            self._library.buffers.unpin(slot)
        return True

    def _sealed(self, slot: SlotId, order: _Order) -> Source:
        """Wait until the worker of a slot has sealed the commit, and open its buffer. Raises CopyError."""
        buffers = self._library.buffers
        while True:
            newest = buffers.newest(slot)
            source = buffers.open(slot, order.commit)
            if source is not None:
                return source
            if newest is not None and newest >= order.commit:
                raise CopyError("its worker has written newer commits to both buffers")
            if order.cancelled.wait(_LOOK_INTERVAL_S):
                raise CopyError("the order is cancelled")

    def _copy(self, source: Source, order: _Order) -> None:
        """Copy a buffer into the store. Raises CopyError, OSError."""
        store, sealed = self._library.store, source.sealed

        def go_on() -> bool:
            return not order.cancelled.is_set()

        incoming = store.begin(sealed, copied_parts(source.header()).size_bytes, go_on)
        if incoming is None:
            return
        try:
            with incoming.owned(lambda: None, go_on):
                incoming.restart()
                while incoming.missing_bytes:
                    if not go_on():
                        raise CopyError("the order is cancelled")
                    incoming.write(source.part(incoming.offset, wire.PIECE_BYTES))
                source.check_unchanged()
                if not incoming.is_good():
                    self._library.verify_buffer(source, go_on)
                store.finish(incoming)
        except BaseException:
            store.abandon(incoming)
            raise

    # -------------------------------------------------------------------------------------------- copies elsewhere

    def _deliver(self, delivery: _Delivery, order: _Order) -> bool:
        """Send a copy to its target. Return False if it has to be tried again later.

        A target that refuses the copy, or is unreachable for long, is reported: it may have no memory for the copy.
        """
        try:
            connection = wire.dial(delivery.target.address, self.key, self.timeout_s, self._use)
            with closing(connection):
                self._push(connection, delivery, order)
        except (OSError, CopyError) as error:
            if order.cancelled.is_set():
                return False
            target = f"{delivery.target.host} ({delivery.target.address})"
            if delivery.pause_s == _FIRST_PAUSE_S:
                self.log(f"commit {order.commit} of slot {delivery.slot} cannot be sent to host {target}: {error}")
            now = time.monotonic()
            delivery.fails_since = delivery.fails_since or now
            if isinstance(error, _NotAccepted) or now - delivery.fails_since > _UNREACHABLE_S:
                self.on_dropped(delivery.target.host, delivery.slot, order.commit, f"host {target}: {error}")
                return True
            delivery.due = now + delivery.pause_s
            delivery.pause_s = min(2 * delivery.pause_s, _LONGEST_PAUSE_S)
            return False
        finally:
            with self._changed:
                self._socket = None
        return True

    def _use(self, connection: socket.socket) -> None:
        """Let an order that is cancelled end its calls on the connection."""
        with self._changed:
            if self._current is None or self._current.cancelled.is_set():
                raise CopyError("the order is cancelled")
            self._socket = connection

    def _push(self, connection: Wire, delivery: _Delivery, order: _Order) -> None:
        open_copy = self._library.open_verified if delivery.fails_since else self._library.open_new
        try:
            source = open_copy(delivery.slot, order.commit, lambda: not order.cancelled.is_set())
        except CopyError as error:
            raise _NotAccepted(str(error)) from error  # it is damaged, and there is no other to send
        with closing(source):
            connection.send(wire.PushReplica(source.sealed, len(source.memory)))
            try:
                wanted = connection.receive(wire.ReplicaWanted)
            except CopyError as error:
                raise _NotAccepted(str(error)) from error
            if wanted.is_kept:
                return
            offset = wanted.offset
            while offset < source.sealed.length:
                size = min(self._rate.piece_bytes, source.sealed.length - offset)
                if not self._rate.wait(size, order.cancelled.wait) or order.cancelled.is_set():
                    raise CopyError("the order is cancelled")
                connection.send_bytes(source.memory, offset, offset + size)
                offset += size
                delivery.fails_since = 0.0
            connection.receive(wire.ReplicaComplete)
