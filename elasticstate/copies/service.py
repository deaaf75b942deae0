"""The agent's part of the copies: store, server and pusher of one host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from elasticstate.copies.pusher import Pusher, Targets
from elasticstate.copies.server import CopyConnection, CopyServer, Library, Notify, NotifyDropped
from elasticstate.copies.store import CopyStore, SealedSlot, SlotBuffers, Source
from elasticstate.copies.wire import Wire
from elasticstate.core.types import CommitId, CopyFigures, SlotId


class HostCopies:
    """The copies of one host. Methods return at once, except the constructor (files in memory) and ``close``."""

    def __init__(
        self,
        *,
        host: str,
        job_id: str,
        key: bytes,
        directory: int,
        slots: Mapping[int, SealedSlot],
        timeout_s: float,
        on_kept: Notify,
        on_dropped: NotifyDropped,
        on_damaged: Notify,
        log: Callable[[str], None],
        rate_bytes_per_s: float | None = None,
    ) -> None:
        """Adopt the copies that the previous agent of this host has kept.

        ``directory``: descriptor of the commit directory. ``slots``: files of each slot, may change. Callbacks, on any
        thread: ``on_kept`` when this host has a new copy, ``on_dropped`` when a copy is damaged, could not be made or
        was refused, ``on_damaged`` when a buffer of a slot is damaged, and ``log``. ``timeout_s``: for a peer that does
        not authenticate or sends nothing. ``rate_bytes_per_s``: most bytes to send per second; None: no limit.

        Raises OSError.
        """
        self._key, self._timeout_s, self._log = key, timeout_s, log
        self._on_kept = on_kept
        self._received_bytes = 0
        self._counting = threading.Lock()
        self.store = CopyStore(directory, job_id, key)
        self._library = Library(SlotBuffers(job_id, host, slots), self.store, on_dropped, on_damaged)
        self._pusher = Pusher(self._library, key, timeout_s, rate_bytes_per_s, on_kept, on_dropped, log)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="elasticstate-copies")
        self._forgetting: list[Future[Any]] = []  # that is not known to be done
        self._server: CopyServer | None = None

    def start(self, address: str) -> str:
        """Serve copies at this address. Return "address:port". Raises OSError."""
        self._server = CopyServer(address, self._key, self._timeout_s, self._serve, self._log)
        if self.store.unverified():
            self._threads.submit(self._library.verify_adopted)
        return self._server.address

    @property
    def address(self) -> str:
        """ "address:port" of the copy server; "" if it does not serve."""
        return self._server.address if self._server is not None else ""

    def _serve(self, connection: Wire) -> None:
        CopyConnection(connection, self._library, self._on_kept, self._count).serve()

    def _count(self, size_bytes: int) -> None:
        with self._counting:  # each connection has a thread
            self._received_bytes += size_bytes

    def figures(self) -> CopyFigures:
        """Return the memory of the copies, and the bytes that were sent and received so far."""
        return CopyFigures(self.store.size_bytes(), self._pusher.sent_bytes, self._received_bytes)

    def replicate(self, commit: CommitId, targets: Targets) -> None:
        """Keep copies of a commit of these slots, and send them to their targets. Cancels the previous order.

        A slot may have no target. ``on_kept`` or ``on_dropped`` follows for each slot, unless another order or
        ``stop_replication`` comes before; also for a copy that is kept already. Each target's agent reports its own
        copy.
        """
        self._pusher.replicate(commit, targets, self._forgetting)

    def stop_replication(self) -> None:
        """Cancel the order to replicate a commit. Copies that exist stay."""
        self._pusher.cancel()

    def forget(self, before: CommitId, besides: CommitId | None = None) -> None:
        """Remove all copies of commits older than ``before``, except those of ``besides``.

        Copies of commits older than ``before`` are refused from now on.
        """
        self._pusher.forget(before)
        with suppress(RuntimeError):  # closed: the driver's message was late
            begun = self._threads.submit(self.store.forget, before, besides)
            self._forgetting = [*(other for other in self._forgetting if not other.done()), begun]

    def kept(self) -> list[tuple[SlotId, CommitId]]:
        """Return slot and commit of each kept copy, of this host's slots and of others."""
        return self.store.kept()

    def open(self, slot: SlotId, commit: CommitId) -> Source:
        """Open a copy on this host whose checksum is correct: a kept one, or a buffer. Close it. Raises CopyError.

        Blocks while the copy is verified.
        """
        return self._library.open_verified(slot, commit, self._library.is_open)

    def share(self, slot: SlotId, commit: CommitId) -> tuple[int, tuple[int, int, int]] | None:
        """Return a new descriptor of a kept copy and the identity of its bytes: see ``CopyStore.share``."""
        return self.store.share(slot, commit)

    def move_to(self, directory: int) -> None:
        """Make new copies in another commit directory, because the present one has lost its name. Raises OSError."""
        self.store.move_to(directory)

    def close(self) -> None:
        """Close the port, end all threads, and leave the copies to the next agent of this host. Blocks."""
        self._library.close()
        self._pusher.close()
        if self._server is not None:
            self._server.close()
        self._threads.shutdown()
        self.store.close()
