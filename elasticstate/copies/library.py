"""All copies that one host can serve: the buffers of its slots, and the kept copies of its store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from elasticstate.copies.source import SlotBuffers, Source
from elasticstate.copies.store import CopyStore
from elasticstate.core.ids import CommitId, SlotId
from elasticstate.errors import CopyError

Notify = Callable[[SlotId, CommitId], None]
GoOn = Callable[[], bool]

_LOOK_INTERVAL_S = 0.5


class Library:
    """Opens copies, and verifies each content once before its first bytes are used. Safe on any thread.

    ``go_on`` is called again and again during a verification, which ends with CopyError when it returns False.
    """

    def __init__(self, buffers: SlotBuffers, store: CopyStore, on_dropped: Notify) -> None:
        """``on_dropped`` is called on any thread when a kept copy was damaged."""
        self.buffers, self.store = buffers, store
        self._on_dropped = on_dropped
        self._verifying = threading.Lock()  # one at a time: a verification uses several cores
        self._verified: dict[tuple[SlotId, int], tuple[int, int, int]] = {}  # content of buffers
        self._is_closed = False

    def close(self) -> None:
        """Interrupt verifications."""
        self._is_closed = True

    def is_open(self) -> bool:
        return not self._is_closed

    def open(self, slot: SlotId, commit: CommitId) -> Source:
        """Open a copy. Raises CopyError if this host has none. Its bytes are not verified."""
        source = self.store.open(slot, commit) or self.buffers.open(slot, commit)
        if source is None:
            raise CopyError(f"host {self.buffers.host} has no commit {commit} of slot {slot}")
        return source

    def open_verified(self, slot: SlotId, commit: CommitId, go_on: GoOn) -> Source:
        """Open a copy whose checksum is correct. Raises CopyError."""
        if (slot, commit) in self.store.unverified():
            self._verify_kept(slot, commit, go_on)
        source = self.open(slot, commit)
        try:
            if not source.is_fixed and self._verified.get(source.place) != source.sealed.content:
                self._verify_buffer(source, go_on)
        except BaseException:
            source.close()
            raise
        return source

    def _verify_kept(self, slot: SlotId, commit: CommitId, go_on: GoOn) -> None:
        with self._turn(go_on):
            if not self.store.verify(slot, commit, go_on):
                self._on_dropped(slot, commit)

    def _verify_buffer(self, source: Source, go_on: GoOn) -> None:
        with self._turn(go_on):
            if self._verified.get(source.place) == source.sealed.content:
                return
            is_intact = source.is_intact(go_on)
            source.check_unchanged()
            if not is_intact:
                raise CopyError(f"{source.sealed} is damaged: its checksum is wrong")
            self._verified[source.place] = source.sealed.content

    @contextmanager
    def _turn(self, go_on: GoOn) -> Iterator[None]:
        """Wait until no other verification runs."""
        while not self._verifying.acquire(timeout=_LOOK_INTERVAL_S):
            if not go_on():
                raise CopyError("this copy server closes")
        try:
            yield
        finally:
            self._verifying.release()

    def verify_adopted(self) -> None:
        """Verify the kept copies of the previous agent, and drop damaged ones."""
        with suppress(CopyError):  # this library closes
            for slot, commit in self.store.unverified():
                self._verify_kept(slot, commit, self.is_open)
