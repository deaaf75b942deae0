"""Program that uploads one copy: ``python -m elasticstate.durable.upload ORDER``.

The agent starts it for each copy, as a process of its own: storage may hang in a call that nothing can interrupt, and
the libraries of object stores are large. Its stdin is not used, its stdout is the staged commit, open for reading, and
its stderr is a pipe to the agent, which gets one line of JSON for each message.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from elasticstate.core.types import CommitId
from elasticstate.durable.copies import (
    MANIFEST,
    VERSION,
    DamagedCopyError,
    Manifest,
    copy_names,
    encode_manifest,
    read_manifest,
    remove_old,
)
from elasticstate.durable.failure import ShardedCommitError, failure_of
from elasticstate.durable.parts import cut, write_part
from elasticstate.durable.storage import CopyStorage, open_storage

_PROGRESS_INTERVAL_S = 0.5
_NICENESS = 10  # training has precedence


class UploadOrder(msgspec.Struct, frozen=True):
    """Order to upload a staged commit."""

    place: str  # path or URL of the storage
    folder: str
    keep: int
    job: str
    job_id: str
    commit: CommitId
    world_size: int
    size_bytes: int  # of the staged commit
    earlier: tuple[str, ...] = ()  # copies that this job has saved, the newest last


class UploadMessage(msgspec.Struct, frozen=True):
    """A message of the program: progress, the end, or a failure."""

    bytes: int = 0
    is_saved: bool = False
    lost: str = ""  # what is wrong with the newest earlier copy of this job
    kind: str = ""  # of a failure; empty: no failure
    reason: str = ""
    warning: str = ""


def upload(order: UploadOrder, commit: memoryview, storage: CopyStorage, send: Callable[[UploadMessage], None]) -> None:
    """Save a commit as a copy, and remove old copies. Raises errors of the storage, or ShardedCommitError."""
    if cut(commit).is_sharded:
        raise ShardedCommitError(f"commit {order.commit} has only the shards of one worker")
    lost = _lost(storage, order)
    sent_at, done = time.monotonic(), 0

    def progress(size: int) -> None:
        nonlocal sent_at, done
        done += size
        if time.monotonic() - sent_at >= _PROGRESS_INTERVAL_S:
            sent_at = time.monotonic()
            send(UploadMessage(done))

    part = write_part(storage, order.folder, 1, 0, commit, progress)
    manifest = Manifest(VERSION, order.job, order.job_id, order.commit, order.world_size, time.time(), (part,))
    storage.publish(order.folder, MANIFEST, encode_manifest(manifest))
    warning = ""
    try:
        remove_old(storage, order.keep, order.folder)
    except Exception as error:  # the copy is saved nevertheless
        warning = f"old copies cannot be removed: {failure_of(error)[1]}"
    send(UploadMessage(manifest.size_bytes, is_saved=True, lost=lost, warning=warning))


def _lost(storage: CopyStorage, order: UploadOrder) -> str:
    """Return what is wrong with the newest copy that this job has saved before; "" if it is complete."""
    if not order.earlier:
        return ""
    name = order.earlier[-1]
    try:
        if name not in copy_names(storage):
            return f"{name} is missing"
        read_manifest(storage, name)
    except (DamagedCopyError, FileNotFoundError) as error:
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
        commit = memoryview(mmap.mmap(staged, order.size_bytes, prot=mmap.PROT_READ))
        upload(order, commit, open_storage(order.place), send)
    except BaseException as error:
        kind, reason = failure_of(error)
        send(UploadMessage(kind=kind, reason=reason))
    os._exit(0)  # threads of a library may hang


if __name__ == "__main__":
    main()
