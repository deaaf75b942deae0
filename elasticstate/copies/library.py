"""All copies that one host can serve: the buffers of its slots, and the kept copies of its store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf

from elasticstate.copies.source import SlotBuffers, Source
from elasticstate.copies.store import CopyStore
from elasticstate.core.ids import CommitId, SlotId
from elasticstate.errors import CopyError

Notify = Callable[[SlotId, CommitId], None]
NotifyDropped = Callable[[str, SlotId, CommitId, str], None]
"""Called with the host that has no copy, the slot, the commit, and the reason."""
GoOn = Callable[[], bool]

_LOOK_INTERVAL_S = 0.5
_TRUST_S = 10.0  # without a read; afterwards, a copy is verified again

_Content = tuple[SlotId, CommitId, bool, tuple[int, int, int]]


class Library:
    """Opens copies, and verifies each before its first bytes are used. Safe on any thread.

    Memory may be damaged at any time, also after an earlier verification. So the first reader of a new world lets a
    copy be verified again, and all readers together once.

    ``go_on`` is called again and again during a verification, which ends with CopyError when it returns False.
    """

    def __init__(self, buffers: SlotBuffers, store: CopyStore, on_dropped: NotifyDropped, on_damaged: Notify) -> None:
        """``on_dropped`` is called on any thread when a kept copy was damaged, ``on_damaged`` for a buffer."""
        self.buffers, self.store = buffers, store
        self._on_dropped, self._on_damaged = on_dropped, on_damaged
        self._verifying = threading.Lock()  # one at a time: a verification uses several cores
        self._read_at: dict[_Content, float] = {}  # verified contents
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

    def open_new(self, slot: SlotId, commit: CommitId, go_on: GoOn) -> Source:
        """Open a copy that was verified when it was made. One of the previous agent is verified. Raises CopyError."""
        is_adopted = (slot, commit) in self.store.unverified()
        return self.open_verified(slot, commit, go_on) if is_adopted else self.open(slot, commit)

    def open_verified(self, slot: SlotId, commit: CommitId, go_on: GoOn) -> Source:
        """Open a copy whose checksum is correct. Raises CopyError."""
        while True:
            source = self.open(slot, commit)
            try:
                if self._is_trusted(source) or self._verify(source, go_on):
                    return source
            except BaseException:
                source.close()
                raise
            source.close()  # a kept copy was damaged: perhaps the buffer is not

    def _is_trusted(self, source: Source) -> bool:
        key, now = _content_of(source), time.monotonic()
        if now - self._read_at.get(key, -inf) > _TRUST_S:
            return False
        self._read_at[key] = now
        return True

    def _verify(self, source: Source, go_on: GoOn) -> bool:
        with self._turn(go_on):
            if self._is_trusted(source):
                return True
            if source.is_fixed:
                is_good = self._verify_kept(source.sealed.slot, source.sealed.commit, go_on)
            else:
                self._verify_buffer(source, go_on)
                is_good = True
            now = time.monotonic()
            self._read_at = {key: at for key, at in list(self._read_at.items()) if now - at <= _TRUST_S}
            if is_good:
                self._read_at[_content_of(source)] = now
            return is_good

    def _verify_kept(self, slot: SlotId, commit: CommitId, go_on: GoOn) -> bool:
        is_good = self.store.verify(slot, commit, go_on)
        if not is_good:
            self._on_dropped(self.buffers.host, slot, commit, "it is damaged: its checksum is wrong")
        return is_good

    def _verify_buffer(self, source: Source, go_on: GoOn) -> None:
        is_intact = source.is_intact(go_on)
        source.check_unchanged()
        if not is_intact:
            self._on_damaged(source.sealed.slot, source.sealed.commit)
            raise CopyError(f"{source.sealed} is damaged: its checksum is wrong")

    def verify_buffer(self, source: Source, go_on: GoOn) -> None:
        """Raise CopyError if a buffer is damaged, or has changed since it was opened."""
        with self._turn(go_on):
            self._verify_buffer(source, go_on)

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
                with self._turn(self.is_open):
                    self._verify_kept(slot, commit, self.is_open)


def _content_of(source: Source) -> _Content:
    return source.sealed.slot, source.sealed.commit, source.is_fixed, source.sealed.content
