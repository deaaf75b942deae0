"""Program that uploads a copy, or the parts of it on one host: ``python -m elasticstate.durable.upload ORDER``.

The agent starts it for each order, as a process of its own: storage may hang in a call that nothing can interrupt, and
the libraries of object stores are large. Its stdin is not used, its stdout is the file with the staged commits, open
for reading, and its stderr is a pipe to the agent, which gets one line of JSON for each message.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from elasticstate.core.ids import CommitId
from elasticstate.durable.durable_storage import DurableStorage, open_storage
from elasticstate.durable.parts import cut, write_part
from elasticstate.durable.stored_copies import (
    MANIFEST,
    VERSION,
    DamagedCopyError,
    Manifest,
    ShardedCommitError,
    copy_names,
    description_of,
    encode,
    failure_of,
    read_manifest,
    read_parts,
    remove_incomplete,
    remove_old,
)

_PROGRESS_INTERVAL_S = 0.5
_NICENESS = 10  # training has precedence


class StagedPart(msgspec.Struct, frozen=True):
    """A commit in the staged file, which becomes a part of the copy."""

    number: int  # of the part, from 1 on
    digest: int  # of its shards; 0: a replicated state
    offset: int  # in the file
    bytes: int


class UploadOrder(msgspec.Struct, frozen=True):
    """Order to upload the parts of a copy that are staged on this host.

    The upload of all parts completes the copy. If other hosts have parts, too, each part gets a description instead,
    and a later order without parts completes the copy.
    """

    place: str  # path or URL of the storage
    folder: str
    keep: int
    job: str
    job_id: str
    commit: CommitId
    world_size: int
    total: int  # parts of the copy
    parts: tuple[StagedPart, ...] = ()
    earlier: tuple[str, ...] = ()  # copies that this job has saved, the newest last


class UploadMessage(msgspec.Struct, frozen=True):
    """A message of the program: progress, the end, or a failure."""

    bytes: int = 0
    is_saved: bool = False  # the order is carried out
    lost: str = ""  # what is wrong with the newest earlier copy of this job
    kind: str = ""  # of a failure; empty: no failure
    reason: str = ""
    warning: str = ""


def upload(
    order: UploadOrder, staged: memoryview, storage: DurableStorage, send: Callable[[UploadMessage], None]
) -> None:
    """Save the staged parts, and complete the copy if it has no others.

    After a failure, the next attempt at the latest removes the files of this one.

    Raises errors of the storage, ValueError for a commit that is none, ShardedCommitError, or DamagedCopyError if parts
    of other hosts are missing.
    """
    completes = len(order.parts) in (0, order.total)
    lost = _lost(storage, order) if completes else ""
    # The process of a failed attempt may have been killed. Copies up to the last saved one are left to remove_old: a
    # shared directory may show a host late that another one has completed a copy.
    warning = _tried(lambda: remove_incomplete(storage, max(order.earlier, default=""), order.folder))
    try:
        end = _save(order, staged, storage, send, completes)
    except BaseException:
        if completes:  # else other hosts still write there, and their errors would hide the reason
            with suppress(Exception):
                storage.remove(order.folder, MANIFEST)
        raise
    if completes:
        warning = _tried(lambda: remove_old(storage, order.keep, order.folder)) or warning
    send(msgspec.structs.replace(end, lost=lost, warning=warning))


def _tried(remove: Callable[[], None]) -> str:
    """Remove copies. Return what goes wrong: the present copy can be saved nevertheless."""
    try:
        remove()
    except Exception as error:
        return f"old copies cannot be removed: {failure_of(error)[1]}"
    return ""


def _save(
    order: UploadOrder,
    staged: memoryview,
    storage: DurableStorage,
    send: Callable[[UploadMessage], None],
    completes: bool,
) -> UploadMessage:
    """Write the parts, and their descriptions or the manifest. Return the last message."""
    sent_at, done = time.monotonic(), 0

    def progress(size: int) -> None:
        nonlocal sent_at, done
        done += size
        if time.monotonic() - sent_at >= _PROGRESS_INTERVAL_S:
            sent_at = time.monotonic()
            send(UploadMessage(done))

    parts = []
    for staged_part in order.parts:
        commit = staged[staged_part.offset : staged_part.offset + staged_part.bytes]
        if cut(commit).is_sharded != bool(staged_part.digest):
            what = "the whole state" if staged_part.digest else "only the shards of one worker"
            raise ShardedCommitError(f"commit {order.commit} has {what}")
        parts.append(write_part(storage, order.folder, staged_part.number, staged_part.digest, commit, progress))
    if not completes:
        for staged_part, part in zip(order.parts, parts, strict=True):
            storage.write(order.folder, description_of(staged_part.number), [encode(part)])
        return UploadMessage(done, is_saved=True)
    found = tuple(parts) or read_parts(storage, order.folder, order.total)
    manifest = Manifest(VERSION, order.job, order.job_id, order.commit, order.world_size, time.time(), found)
    storage.publish(order.folder, MANIFEST, encode(manifest))
    return UploadMessage(manifest.size_bytes, is_saved=True)


def _lost(storage: DurableStorage, order: UploadOrder) -> str:
    """Return what is wrong with the newest copy that this job has saved before; "" if it is complete."""
    if not order.earlier:
        return ""
    name = order.earlier[-1]
    try:
        if name not in copy_names(storage):
            return f"{name} is missing"
        read_manifest(storage, name)
    except DamagedCopyError as error:
        return f"{name}: {error}"
    return ""


def main() -> None:
    """Carry out the order that is the only argument."""
    order = msgspec.json.decode(sys.argv[1], type=UploadOrder)
    staged, messages = os.dup(1), os.dup(2)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)  # what libraries print
    os.dup2(nothing, 2)
    with suppress(OSError):
        os.nice(_NICENESS)

    def send(message: UploadMessage) -> None:
        os.write(messages, msgspec.json.encode(message) + b"\n")

    try:
        content = mmap.mmap(staged, 0, prot=mmap.PROT_READ) if order.parts else b""
        upload(order, memoryview(content), open_storage(order.place), send)
    except BaseException as error:
        kind, reason = failure_of(error)
        send(UploadMessage(kind=kind, reason=reason))
    os._exit(0)  # threads of a library may hang


if __name__ == "__main__":
    main()
