"""Copies of commits of other workers of the host, which a newcomer makes into its own buffers (see peer.py).

A newcomer that has adopted a commit loads the next one into its live state already while the group of the next world is
created. If that world never trains, the adopted commit is restored, as after each failure.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from elasticstate.core.types import CommitId
from elasticstate.log import logger
from elasticstate.state.loading import Incoming
from elasticstate.state.peer import PeerCommit, PeerReader, Peers
from elasticstate.state.snapshot import Snapshot
from elasticstate.state.values import Captured


class PeerCopies:
    """A newcomer's copies. Each is made into a snapshot, which the caller then seals by ``seal_incoming``."""

    def __init__(self, peers: Peers) -> None:
        self._reader = PeerReader(peers)
        self.can_read = True
        """False after an error."""
        self.seconds_ahead = 0.0
        """Duration of the copy made ahead that the last ``load`` used; 0 if it used none."""
        self._ahead: _ReadAhead | None = None

    def copy_newest(self, snapshot: Snapshot, worker_key: str) -> CommitId | None:
        """Copy the newest commit of another worker. Return its id; None if there is none, or none that is whole.

        It is newer than the snapshot's own. A commit with attached values is not copied: it would count as one of this
        worker's own shards.
        """
        try:
            found = self._reader.newest()
        except OSError as error:
            logger.warning("the commits of other workers of this host cannot be read: %s", error)
            self.can_read, found = False, None
        if found is None or found[1].has_attached:
            return None
        commit, source = found
        if snapshot.newest is not None and commit <= snapshot.newest:
            return None
        return commit if source.is_intact() and source.copy_to(snapshot, worker_key, commit.generation) else None

    def read_ahead(
        self, root_slot: int, snapshot: Snapshot, worker_key: str, generation: int, live: Captured | None
    ) -> None:
        """Begin to copy the newest commit of the root, for a world that is about to form.

        ``live``: values into which it may be loaded at once; None: they must not change yet.
        """
        self.wait()
        source = self._reader.newest_of(root_slot)
        self._ahead = _ReadAhead(source, snapshot, worker_key, generation, live) if source is not None else None

    def wait(self) -> bool:
        """Wait until the copy that ``read_ahead`` has begun is complete. Return False if none was begun."""
        if self._ahead is not None:
            self._ahead.wait()
        return self._ahead is not None

    def wait_for(self, root_slot: int, commit: CommitId, check: Callable[[], None]) -> PeerCommit | None:
        """Wait until the root has sealed this commit: see PeerReader.wait_for."""
        return self._reader.wait_for(root_slot, commit, check)

    def load(
        self,
        source: PeerCommit,
        snapshot: Snapshot,
        worker_key: str,
        generation: int,
        targets: Callable[[], Captured],
    ) -> Incoming | None:
        """Copy a commit and load it, unless that was done ahead. Return None if its owner has overwritten it.

        ``targets``: returns the live values into which it is loaded, after it was copied.
        """
        self.wait()
        ahead, self._ahead = self._ahead, None
        self.seconds_ahead = 0.0
        if ahead is not None and ahead.has(source):
            self.seconds_ahead = ahead.seconds
            return ahead.incoming or snapshot.load_incoming(targets())
        return snapshot.load_incoming(targets()) if source.copy_to(snapshot, worker_key, generation) else None

    def close(self) -> None:
        """Unmap the memory of the other workers."""
        self._reader.close()


class _ReadAhead:
    """Copy of the root's newest commit by a thread, while the main thread creates the process group of the next world.

    At the switch the root only stamps that commit anew, so the copy has the content that the newcomer needs.
    """

    def __init__(
        self, source: PeerCommit, snapshot: Snapshot, worker_key: str, generation: int, live: Captured | None
    ) -> None:
        self._source = source
        self._is_whole = False
        self.incoming: Incoming | None = None  # after ``wait``, if the copy is whole and was loaded
        self.seconds = 0.0  # duration of the copy
        self._thread = threading.Thread(
            target=self._copy, args=(snapshot, worker_key, generation, live), name="elasticstate-read-ahead"
        )
        self._thread.start()

    def _copy(self, snapshot: Snapshot, worker_key: str, generation: int, live: Captured | None) -> None:
        started = time.monotonic()
        try:
            self._is_whole = self._source.copy_to(snapshot, worker_key, generation)
            if self._is_whole and live is not None:
                self.incoming = snapshot.load_incoming(live)
        except Exception as error:  # the main thread copies again, and raises the error if it is still there
            logger.debug("the root's commit was not copied ahead: %s", error)
        self.seconds = time.monotonic() - started

    def wait(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def has(self, commit: PeerCommit) -> bool:
        """Return True if the copy is whole, and has the content of this commit. Call it after ``wait``."""
        return self._is_whole and commit.content == self._source.content
