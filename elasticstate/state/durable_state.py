"""The state of a job from its newest intact durable copy, for a world in which no worker holds a usable commit.

The root looks for the copy. A copy of a replicated state it reads alone, and the usual sync follows. A copy of a
sharded state is verified by all ranks, each a share of it; then each rank reads what it needs (see reshard.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from elasticstate.core.ids import CommitId
from elasticstate.core.types import DurableSource
from elasticstate.durable.parts import PartReader
from elasticstate.durable.stored_copies import (
    DamagedCopyError,
    IncompleteCopyError,
    Manifest,
    StorageHangsError,
    StoredCopies,
    UntrustedCopyError,
)
from elasticstate.errors import CollectiveError, StateError, StateLostError
from elasticstate.log import logger
from elasticstate.private import PlantedFileError
from elasticstate.state.committer import Committer
from elasticstate.state.reshard import StoredParts, frame_of
from elasticstate.state.session import Session, channel_of_all
from elasticstate.state.snapshot import Incoming, Snapshot, private_in, transfer_header
from elasticstate.state.values import Captured


class _Candidate(msgspec.Struct, frozen=True):
    """Message of the root: verify this copy of a sharded state. Without a name: there is none to verify."""

    name: str = ""
    manifest: Manifest | None = None


class Resume:
    """Start of this world from the newest intact copy. All ranks call ``run``.

    A copy of a replicated state becomes the root's live state, as a commit that is older than all of the present
    generation. From one of a sharded state, ``Committer.start_from_line`` and ``attach`` read.

    Raises:
        StateLostError: there is no intact copy, but the job has committed.
        StateError: the storage cannot be read. A job never begins anew because its storage does not answer.
    """

    def __init__(self, committer: Committer, source: DurableSource) -> None:
        self._committer, self._source = committer, source
        self._session: Session = committer.session
        self._channel = channel_of_all(self._session, self._session.view.root) if self._session.view.size > 1 else None
        self._started = time.monotonic()

    def _check(self) -> None:
        self._session.check()
        self._session.progress()

    def run(self) -> None:
        self._committer.settle()
        if self._session.view.rank != self._session.view.root:
            self._follow()
            return
        found = self._find()
        if not isinstance(found, StoredParts):
            self._send(_Candidate())
        else:
            self._committer.stored = found
        if found is None and self._source.is_required:
            raise StateLostError(
                f"No worker holds a commit any more, and --durable-dir {self._source.place} has no copy."
            )

    def _find(self) -> StoredParts | bool | None:
        """As the root: return the newest intact copy if it is sharded, True after reading a replicated one, or None if
        the job may begin without."""
        copies = self._open()
        with self._errors_of_storage(of_copy=False):
            names = copies.names()
        damaged, refused = 0, ""
        for name in names:
            try:
                with self._errors_of_storage():
                    manifest = copies.manifest(name)
                if self._source.is_sharded and not manifest.is_sharded:
                    continue  # it was saved before any value was attached
                parts = StoredParts(copies, name, manifest) if manifest.is_sharded else None
                if parts is not None:
                    self._verify(parts)
                else:
                    self._receive(copies, name, manifest)
            except DamagedCopyError as error:
                if isinstance(error, UntrustedCopyError):
                    refused = refused or str(error)
                else:
                    damaged += not isinstance(error, IncompleteCopyError)
                logger.warning("durable copy %s cannot be used: %s", name, error)
                continue
            logger.warning("resumed from durable copy %s: commit %s of job %s", name, manifest.commit, manifest.job)
            return parts or True
        if refused:
            raise StateError(
                f"--durable-dir {self._source.place}: no copy is left that this user has written: {refused}. "
                "Or name another directory to begin anew."
            )
        if damaged:
            raise StateLostError(
                f"--durable-dir {self._source.place}: all copies are damaged ({damaged}), see the warnings. Repair "
                "one, or name an empty directory to begin anew."
            )
        return None

    def _open(self) -> StoredCopies:
        with self._errors_of_storage(of_copy=False):
            return StoredCopies(self._source.place, self._source.timeout_s, self._check)

    @contextmanager
    def _errors_of_storage(self, of_copy: bool = True) -> Iterator[None]:
        """Raise StateError for an error that does not say that a copy is damaged. ``of_copy``: a missing file does."""
        try:
            yield
        except (StateError, CollectiveError, DamagedCopyError):
            raise
        except Exception as error:  # of the storage, or of its library
            if of_copy and isinstance(error, FileNotFoundError):
                raise DamagedCopyError(str(error)) from error
            if of_copy and isinstance(error, PlantedFileError):
                raise UntrustedCopyError(str(error)) from error
            reason = str(error) if isinstance(error, StorageHangsError) else f"{type(error).__name__}: {error}"
            raise StateError(
                f"--durable-dir {self._source.place} cannot be read: {reason}. Repair the storage, or name another one."
            ) from error

    def _verify(self, parts: StoredParts) -> None:
        """As the root: let all ranks verify a copy. Raises DamagedCopyError, and StateError if it cannot be read."""
        self._send(_Candidate(parts.name, parts.manifest))
        if reason := self._verified(parts):
            raise DamagedCopyError(reason)

    def _verified(self, parts: StoredParts) -> str:
        """Verify this rank's share. Return what is wrong with the copy on the first rank that has found something."""
        session, reason = self._session, ""
        try:
            with self._errors_of_storage():
                parts.verify(session.view.rank, session.view.size)
        except DamagedCopyError as error:
            reason = str(error)
        if self._channel is None:
            return reason
        found = map(msgspec.msgpack.decode, self._channel.messages_of_all(msgspec.msgpack.encode(reason)))
        return next((str(text) for text in found if text), "")

    def _follow(self) -> None:
        """As another rank than the root: verify what the root has found, until that is intact or there is none."""
        assert self._channel is not None, "there are several ranks"
        copies: StoredCopies | None = None
        while (candidate := msgspec.msgpack.decode(self._channel.receive(), type=_Candidate)).manifest is not None:
            copies = copies or self._open()
            parts = StoredParts(copies, candidate.name, candidate.manifest)
            if not self._verified(parts):
                self._committer.stored = parts
                return

    def _send(self, candidate: _Candidate) -> None:
        if self._channel is not None:
            self._channel.send(msgspec.msgpack.encode(candidate))

    def _receive(self, copies: StoredCopies, name: str, manifest: Manifest) -> None:
        """As the root: make a copy the live state. Raises DamagedCopyError, and StateError if it cannot be read."""
        committer = self._committer

        def load(targets: Callable[[], Captured]) -> Incoming:
            with self._errors_of_storage():
                _fill(committer.snapshot, copies, name, manifest)
            return committer.snapshot.load_incoming(targets())

        committer.receive(CommitId(self._session.generation - 1, 1), load)
        self._session.record_sync(committer.snapshot.size_bytes, time.monotonic() - self._started)


def _fill(snapshot: Snapshot, copies: StoredCopies, name: str, manifest: Manifest) -> None:
    """Read a commit into the older buffer of a snapshot."""
    reader = PartReader(copies, name, manifest.parts[0])
    frame = frame_of(reader.head, manifest.parts[0].data_bytes)
    header = transfer_header(frame, reader.length)
    place = snapshot.incoming(header, private_in(reader.head[frame.random : frame.tensors]))
    reader.read_into([(frame.tensors, place.numpy().data)])
