"""Store of the kept copies of one host: whole files of commits, which outlive workers, and the agent.

::

    <commit directory>/copies/    mode 0700, files 0600
        OWNER.GENERATION.TICK.part          a copy that is not complete; the next agent removes it
        OWNER.GENERATION.TICK.safetensors   the content, in the format of the buffers
        OWNER.GENERATION.TICK.seal          slot, commit, length and checksum of the content; written last

OWNER is the hexadecimal owner of the slot's commits (commits.owner_of). A copy exists when its seal file exists.
Descriptors stay open, so copies survive the loss of their names (see agent/host_storage.py) until this agent ends.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from elasticstate._native import checksum
from elasticstate.allocation import grow
from elasticstate.commits import owner_of
from elasticstate.copies.sealed import Sealed, check_authentic, read_header
from elasticstate.copies.source import Source
from elasticstate.core.ids import CommitId, SlotId
from elasticstate.errors import CopyError
from elasticstate.private import make_file, open_directory, open_file, read_file, write_file

DIRECTORY = "copies"
_PART, _DATA, _SEAL = ".part", ".safetensors", ".seal"
_MAC_BYTES = 16
_ALLOCATE_BYTES = 64 << 20  # one step of an allocation: a store that closes waits for one step


class _File(msgspec.Struct, frozen=True):
    """Content of a seal file, after a keyed checksum of it."""

    sealed: Sealed
    size_bytes: int


class IncomingCopy:
    """A copy that is being received or made. ``write`` appends to it; one thread at a time owns it."""

    def __init__(self, sealed: Sealed, size_bytes: int, fd: int) -> None:
        self.sealed, self.size_bytes, self.fd = sealed, size_bytes, fd
        self.offset = 0  # number of bytes so far
        self.found = 0  # CRC-32C of them
        self._lock = threading.Lock()
        self._turn = 0

    def take(self) -> int:
        """Become the owner: writes of the previous one fail from now on. Return what ``write`` wants."""
        with self._lock:
            self._turn += 1
            return self._turn

    def write(self, data: Any, turn: int) -> None:
        """Append bytes. Raises CopyError if another thread is the owner now."""
        with self._lock:
            self._check(turn)
            found = checksum(data, 0, len(data), self.found)
            at = 0
            while at < len(data):
                at += os.pwrite(self.fd, data[at:], self.offset + at)
            self.offset, self.found = self.offset + len(data), found

    def duplicate(self, turn: int) -> int:
        """Return a new descriptor of the file. Raises CopyError as ``write`` does."""
        with self._lock:
            self._check(turn)
            return os.dup(self.fd)

    def restart(self, turn: int) -> None:
        """Drop the bytes: their checksum is wrong."""
        with self._lock:
            self._check(turn)
            self.offset = self.found = 0

    def close(self) -> None:
        with self._lock:
            if self._turn >= 0:
                self._turn = -1
                os.close(self.fd)

    def _check(self, turn: int) -> None:
        if turn != self._turn:
            raise CopyError(f"{self.sealed} is received on another connection, or not wanted any more")


class _KeptCopy:
    def __init__(self, sealed: Sealed, fd: int, is_verified: bool) -> None:
        self.sealed, self.fd, self.is_verified = sealed, fd, is_verified


class CopyStore:
    """The kept copies of one host. All methods are safe on any thread, and may block for a file system in memory."""

    def __init__(self, directory: int, job_id: str, key: bytes) -> None:
        """``directory``: descriptor of the commit directory. Adopt the copies of the previous agent. Raises OSError."""
        self._job_id, self._key = job_id, key
        self._lock = threading.Lock()
        self._kept: dict[tuple[SlotId, CommitId], _KeptCopy] = {}
        self._incoming: dict[SlotId, IncomingCopy] = {}
        self._forgotten = CommitId(-1, 0)  # copies of older commits are not wanted
        self._is_closed = False
        self._parent = os.dup(directory)
        self._directory = _open_directory(directory)
        self._adopt()

    def move_to(self, directory: int) -> None:
        """Make new files in another commit directory, because the present one has lost its name. Raises OSError."""
        with self._lock:
            fd = _open_directory(directory)
            os.close(self._directory)
            os.close(self._parent)
            self._directory, self._parent = fd, os.dup(directory)

    def close(self) -> None:
        """Close all files. The next agent of this host adopts the copies."""
        with self._lock:
            self._is_closed = True
            for incoming in self._incoming.values():
                incoming.close()
            for kept in self._kept.values():
                os.close(kept.fd)
            self._incoming.clear()
            self._kept.clear()
            os.close(self._directory)
            os.close(self._parent)

    # ---------------------------------------------------------------------------------------------------- adoption

    def _adopt(self) -> None:
        names = set(os.listdir(self._directory))
        for name in sorted(names):
            stem = name.removesuffix(_SEAL)
            if name.endswith(_SEAL) and f"{stem}{_DATA}" in names:
                with suppress(OSError, ValueError, msgspec.MsgspecError):
                    self._adopt_copy(stem)
        kept = {self._stem(kept.sealed) for kept in self._kept.values()}
        for name in names:
            if name.rpartition(".")[0] not in kept or name.endswith(_PART):
                self._unlink(name)

    def _adopt_copy(self, stem: str) -> None:
        """Adopt one copy. Its bytes are verified later. Raises OSError, ValueError or MsgspecError."""
        data = read_file(self._directory, f"{stem}{_SEAL}")
        mac, body = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(body)):
            raise ValueError("this job has not written the seal file")
        file = msgspec.msgpack.decode(body, type=_File)
        if self._stem(file.sealed) != stem:
            raise ValueError("the seal file belongs to another copy")
        fd = open_file(self._directory, f"{stem}{_DATA}", os.O_RDWR)
        if os.fstat(fd).st_size != file.size_bytes:
            os.close(fd)
            raise ValueError("the content has another size")
        self._kept[file.sealed.slot, file.sealed.commit] = _KeptCopy(file.sealed, fd, False)

    def unverified(self) -> list[tuple[SlotId, CommitId]]:
        """Return the adopted copies whose bytes have not been verified."""
        with self._lock:
            return [key for key, kept in self._kept.items() if not kept.is_verified]

    def verify(self, slot: SlotId, commit: CommitId, go_on: Callable[[], bool]) -> bool:
        """Verify a copy once; drop it and return False if it is damaged. Raises CopyError: ``go_on`` returned False."""
        with self._lock:
            kept = self._kept.get((slot, commit))
            if kept is None or kept.is_verified:
                return kept is not None
            source = self._source(kept)
        try:
            if source.is_intact(go_on) and self._is_authentic(source.sealed, source.read):
                kept.is_verified = True
                return True
        finally:
            source.close()
        self.drop(slot, commit)
        return False

    def _is_authentic(self, sealed: Sealed, read: Callable[[int, int], bytes]) -> bool:
        try:
            check_authentic(sealed, self._owner(sealed.slot), self._key, read_header(read, sealed.length), read)
        except CopyError:
            return False
        return True

    # ----------------------------------------------------------------------------------------------------- reading

    def kept(self) -> list[tuple[SlotId, CommitId]]:
        with self._lock:
            return sorted(self._kept)

    def open(self, slot: SlotId, commit: CommitId) -> Source | None:
        """Open a copy; None if this host does not keep it. ``verify`` it before its bytes are used."""
        with self._lock:
            kept = self._kept.get((slot, commit))
            return None if kept is None else self._source(kept)

    def _source(self, kept: _KeptCopy) -> Source:
        return Source(kept.sealed, os.dup(kept.fd))

    # ----------------------------------------------------------------------------------------------------- writing

    def begin(self, sealed: Sealed, size_bytes: int, go_on: Callable[[], bool] = lambda: True) -> IncomingCopy | None:
        """Reserve the space of a copy, or continue an incomplete one. Return None if it is kept already.

        Raises CopyError if it is not wanted, or does not fit.
        """
        slot, commit = sealed.slot, sealed.commit
        with self._lock:
            self._check_wanted(sealed)
            kept = self._kept.get((slot, commit))
            if kept is not None and kept.sealed.content == sealed.content:
                return None
            incoming = self._incoming.get(slot)
            if incoming is not None and incoming.sealed == sealed and incoming.size_bytes == size_bytes:
                return incoming
            if incoming is not None and incoming.sealed.commit > commit:
                raise CopyError(f"{sealed} is older than commit {incoming.sealed.commit}, which arrives")
            self._abandon(slot)
            try:
                incoming = IncomingCopy(sealed, size_bytes, self._make_part(sealed))
            except OSError as error:
                raise CopyError(self._refusal(sealed, error)) from error
            self._incoming[slot] = incoming
            fd = os.dup(incoming.fd)
        try:
            _reserve(fd, sealed, size_bytes, go_on)
        except (OSError, CopyError) as error:
            with self._lock:
                if self._incoming.get(slot) is incoming:
                    self._abandon(slot)
            raise CopyError(self._refusal(sealed, error)) from error
        finally:
            os.close(fd)
        return incoming

    def _make_part(self, sealed: Sealed) -> int:
        if not os.fstat(self._directory).st_nlink:  # deleted, and the commit directory was not
            fd = _open_directory(self._parent)
            os.close(self._directory)
            self._directory = fd
        return make_file(self._directory, f"{self._stem(sealed)}{_PART}")

    def finish(self, incoming: IncomingCopy, turn: int) -> None:
        """Verify a complete copy, and make it visible. Raises CopyError; then the copy has no bytes again."""
        sealed, source = incoming.sealed, Source(incoming.sealed, incoming.duplicate(turn))
        is_good = incoming.offset == sealed.length and incoming.found == sealed.checksum
        is_kept = False
        try:
            if not is_good or not self._is_authentic(sealed, source.read):
                incoming.restart(turn)
                raise CopyError(f"{sealed}: the checksum is wrong")
            with self._lock:
                self._check_wanted(sealed)
                if self._incoming.get(sealed.slot) is not incoming:
                    raise CopyError(f"{sealed} is not wanted any more")
                self._publish(sealed, incoming.size_bytes)
                self._kept[sealed.slot, sealed.commit] = _KeptCopy(sealed, source.fd, True)
                is_kept = True
                del self._incoming[sealed.slot]
                incoming.close()
        except OSError as error:
            self.abandon(incoming)
            raise CopyError(self._refusal(sealed, error)) from error
        finally:
            if not is_kept:
                source.close()

    def _publish(self, sealed: Sealed, size_bytes: int) -> None:
        self._drop(sealed.slot, sealed.commit)
        stem, directory = self._stem(sealed), self._directory
        os.replace(f"{stem}{_PART}", f"{stem}{_DATA}", src_dir_fd=directory, dst_dir_fd=directory)
        body = msgspec.msgpack.encode(_File(sealed, size_bytes))
        write_file(directory, f"{stem}{_SEAL}", self._mac(body) + body)

    # ---------------------------------------------------------------------------------------------------- removing

    def abandon(self, incoming: IncomingCopy) -> None:
        """Remove an incomplete copy."""
        with self._lock:
            if self._incoming.get(incoming.sealed.slot) is incoming:
                self._abandon(incoming.sealed.slot)

    def drop(self, slot: SlotId, commit: CommitId) -> bool:
        """Remove a copy. Return False if this host does not keep it."""
        with self._lock:
            return self._drop(slot, commit)

    def forget(self, before: CommitId) -> list[tuple[SlotId, CommitId]]:
        """Remove all copies of older commits, and refuse them from now on. Return those removed."""
        with self._lock:
            self._forgotten = max(self._forgotten, before)
            for slot in [slot for slot, found in self._incoming.items() if found.sealed.commit < before]:
                self._abandon(slot)
            return [key for key in sorted(self._kept) if key[1] < before and self._drop(*key)]

    def _drop(self, slot: SlotId, commit: CommitId) -> bool:
        kept = self._kept.pop((slot, commit), None)
        if kept is None:
            return False
        os.close(kept.fd)
        for suffix in (_SEAL, _DATA):  # the seal first: a file without a seal is no copy
            self._unlink(f"{self._stem(kept.sealed)}{suffix}")
        return True

    def _abandon(self, slot: SlotId) -> None:
        incoming = self._incoming.pop(slot, None)
        if incoming is not None:
            incoming.close()
            self._unlink(f"{self._stem(incoming.sealed)}{_PART}")

    # ------------------------------------------------------------------------------------------------------- small

    def _check_wanted(self, sealed: Sealed) -> None:
        if self._is_closed:
            raise CopyError("this copy store is closed")
        if sealed.commit < self._forgotten:
            raise CopyError(f"{sealed} is not wanted: the job keeps commit {self._forgotten}")

    def _refusal(self, sealed: Sealed, error: Exception) -> str:
        if not isinstance(error, OSError) or error.errno != errno.ENOSPC:
            return f"{sealed} cannot be kept: {error}"
        return f"{sealed} cannot be kept: its {sealed.length} bytes do not fit into the commit directory of this host"

    def _unlink(self, name: str) -> None:
        with suppress(OSError):  # the directory has lost its name
            os.unlink(name, dir_fd=self._directory)

    def _owner(self, slot: SlotId) -> bytes:
        return owner_of(self._job_id, slot.host, slot.slot)

    def _stem(self, sealed: Sealed) -> str:
        return f"{self._owner(sealed.slot).hex()}.{sealed.commit.generation}.{sealed.commit.tick}"

    def _mac(self, body: bytes) -> bytes:
        return hashlib.blake2b(body, digest_size=_MAC_BYTES, key=self._key, person=b"kept copy").digest()


def _open_directory(parent: int) -> int:
    """Return a descriptor of the subdirectory for copies. Create it if it does not exist. Raises OSError."""
    with suppress(FileExistsError):
        os.mkdir(DIRECTORY, 0o700, dir_fd=parent)
        os.chmod(DIRECTORY, 0o700, dir_fd=parent)  # the umask may have taken the owner's access away
    return open_directory(DIRECTORY, parent)


def _reserve(fd: int, sealed: Sealed, size_bytes: int, go_on: Callable[[], bool]) -> None:
    """Allocate the sealed bytes. Raises OSError, or CopyError if ``go_on`` returns False."""
    if not 0 < sealed.length <= size_bytes:
        raise CopyError(f"it has {sealed.length} of {size_bytes} bytes")
    for end in range(_ALLOCATE_BYTES, sealed.length + _ALLOCATE_BYTES, _ALLOCATE_BYTES):
        if not go_on():
            raise CopyError("this copy store closes")
        grow(fd, min(end, sealed.length))
    os.ftruncate(fd, size_bytes)  # beyond the seal: a hole, which no process reads
