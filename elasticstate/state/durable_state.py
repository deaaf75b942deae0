"""The state of a job from its newest durable copy, for the root of a world in which no worker holds a commit."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from elasticstate.core.types import CommitId, DurableSource
from elasticstate.durable.copies import DamagedCopyError, IncompleteCopyError, Manifest
from elasticstate.durable.part_reader import PartReader
from elasticstate.durable.reader import StorageHangsError, StoredCopies
from elasticstate.errors import CollectiveError, StateError, StateLostError
from elasticstate.log import logger
from elasticstate.state.buffer import LENGTH_BYTES
from elasticstate.state.committer import Committer
from elasticstate.state.layout import Frame, parse_header
from elasticstate.state.snapshot import Incoming, Snapshot
from elasticstate.state.values import Captured

_ANY_SIZE = 1 << 62  # the header describes a buffer, which may be longer than its commit


def resume(committer: Committer, source: DurableSource) -> None:
    """Make the newest intact copy the live state, as a commit that is older than all of the present generation.

    Without any copy the live state stays as it is: the job begins.

    Raises:
        StateLostError: there is no intact copy, but the job has committed.
        StateError: the storage cannot be read. A job never begins anew because its storage does not answer.
    """
    session, started = committer.session, time.monotonic()

    def check() -> None:
        session.check()
        session.progress()

    def load(targets: Callable[[], Captured]) -> Incoming | None:
        found = _read_newest(committer.snapshot, source, check)
        return committer.snapshot.load_incoming(targets()) if found else None

    committer.settle()
    if committer.receive(CommitId(session.generation - 1, 1), load):
        session.record_sync(committer.commit_bytes, time.monotonic() - started)


def _read_newest(snapshot: Snapshot, source: DurableSource, check: Callable[[], None]) -> bool:
    """Read the newest intact copy into the older buffer of a snapshot. Return False if the job may begin without."""
    try:
        copies = StoredCopies(source.place, source.timeout_s, check)
        damaged = 0
        for name in copies.names():
            error = _read(snapshot, copies, name)
            if error is None:
                return True
            damaged += not isinstance(error, IncompleteCopyError)
            logger.warning("durable copy %s cannot be used: %s", name, error)
    except (StateError, CollectiveError):
        raise
    except Exception as error:  # of the storage, or of its library
        reason = str(error) if isinstance(error, StorageHangsError) else f"{type(error).__name__}: {error}"
        raise StateError(
            f"--durable-dir {source.place} cannot be read: {reason}. Repair the storage, or name another one."
        ) from error
    if damaged:
        raise StateLostError(
            f"--durable-dir {source.place}: all copies are damaged ({damaged}), see the warnings. Repair one, or name "
            "an empty directory to begin anew."
        )
    if source.is_required:
        raise StateLostError(f"No worker holds a commit any more, and --durable-dir {source.place} has no copy.")
    return False


def _read(snapshot: Snapshot, copies: StoredCopies, name: str) -> DamagedCopyError | None:
    """Read one copy. Return the reason why it cannot be used, or None."""
    try:
        manifest = copies.manifest(name)
        _fill(snapshot, copies, name, manifest)
    except FileNotFoundError as error:
        return DamagedCopyError(str(error))
    except DamagedCopyError as error:
        return error
    logger.warning("resumed from durable copy %s: commit %s of job %s", name, manifest.commit, manifest.job)
    return None


def _fill(snapshot: Snapshot, copies: StoredCopies, name: str, manifest: Manifest) -> None:
    reader = PartReader(copies, name, manifest.parts[0])
    frame = _frame(reader.head, manifest.parts[0].data_bytes)
    random = reader.head[frame.random : frame.tensors]
    length = int.from_bytes(random[:LENGTH_BYTES], "little")
    header = msgspec.msgpack.encode((frame.layout, reader.length - frame.objects, frame.sharding))
    place = snapshot.incoming(header, random[LENGTH_BYTES : LENGTH_BYTES + length])
    reader.read_into([(frame.tensors, place.numpy().data)])


def _frame(head: bytes, data_bytes: int) -> Frame:
    try:
        frame, _ = parse_header(memoryview(head), _ANY_SIZE)
    except ValueError as error:
        raise DamagedCopyError(f"the header is invalid: {error}") from None
    if (frame.tensors, frame.objects - frame.tensors) != (len(head), data_bytes):
        raise DamagedCopyError("the header does not describe the files")
    return frame
