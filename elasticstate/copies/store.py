"""Store of the kept copies of one host: whole files of commits, which outlive workers, and the agent.

::

    <commit directory>/copies/    mode 0700, files 0600
        NUMBER.part                         a copy that is not complete, or spare; the next agent removes it
        OWNER.GENERATION.TICK.safetensors   a copy, in the format of the buffers
        OWNER.GENERATION.TICK.seal          its slot, commit, length and checksum; written last

OWNER is the hexadecimal owner of the slot's commits (commits.owner_of). A copy exists when its seal file exists.
Descriptors stay open, so copies survive the loss of their names (see agent/host_storage.py) until this agent ends.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import threading
from contextlib import closing, suppress
from functools import partial

import msgspec

from elasticstate.commits import owner_of
from elasticstate.copies.incoming import GoOn, IncomingCopy
from elasticstate.copies.sealed import ReadBytes, Sealed, check_authentic, read_header
from elasticstate.copies.source import Source
from elasticstate.copies.store_file import StoreFile
from elasticstate.core.ids import CommitId, SlotId
from elasticstate.errors import CopyError
from elasticstate.private import make_file, open_directory, open_file, read_file, write_file

DIRECTORY = "copies"
_PART, _DATA, _SEAL = ".part", ".safetensors", ".seal"
_MAC_BYTES = 16

Key = tuple[SlotId, CommitId]


class _SealFile(msgspec.Struct, frozen=True):
    """Content of a seal file, after a keyed checksum of it."""

    sealed: Sealed
    size_bytes: int


class _KeptCopy:
    def __init__(self, sealed: Sealed, file: StoreFile, is_verified: bool) -> None:
        self.sealed, self.file, self.is_verified = sealed, file, is_verified


class CopyStore:
    """The kept copies of one host. All methods are safe on any thread, and may block for a file system in memory."""

    def __init__(self, directory: int, job_id: str, key: bytes) -> None:
        """``directory``: descriptor of the commit directory. Adopt the copies of the previous agent. Raises OSError."""
        self._job_id, self._key = job_id, key
        self._lock = threading.Lock()
        self._kept: dict[Key, _KeptCopy] = {}
        self._incoming: dict[SlotId, IncomingCopy] = {}
        self._spare: list[StoreFile] = []
        self._forgotten = CommitId(-1, 0)  # copies of older commits are not wanted
        self._number = 0  # of files, for their names
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
            self._release_spare()

    def close(self) -> None:
        """Close all files. The next agent of this host adopts the copies. No other thread uses the store."""
        with self._lock:
            self._is_closed = True
            for slot in list(self._incoming):
                self._abandon(slot)
            self._release_spare()
            for kept in self._kept.values():
                kept.file.close()
            self._kept.clear()
            os.close(self._directory)
            os.close(self._parent)

    # ---------------------------------------------------------------------------------------------------- adoption

    def _adopt(self) -> None:
        names = set(os.listdir(self._directory))
        for name in sorted(names):
            if name.endswith(_SEAL):
                with suppress(OSError, ValueError, msgspec.MsgspecError):
                    self._adopt_copy(name.removesuffix(_SEAL))
        stems = {self._stem(kept.sealed) for kept in self._kept.values()}
        for name in names - {f"{stem}{suffix}" for stem in stems for suffix in (_SEAL, _DATA)}:
            self._unlink(name)

    def _adopt_copy(self, stem: str) -> None:
        """Adopt one copy. Its bytes are verified later. Raises OSError, ValueError or MsgspecError."""
        data = read_file(self._directory, f"{stem}{_SEAL}")
        mac, body = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(body)):
            raise ValueError("this job has not written the seal file")
        found = msgspec.msgpack.decode(body, type=_SealFile)
        if self._stem(found.sealed) != stem:
            raise ValueError("the seal file belongs to another copy")
        file = StoreFile(f"{stem}{_DATA}", open_file(self._directory, f"{stem}{_DATA}", os.O_RDWR))
        file.is_shared = True  # perhaps: a worker of this host may have it from the previous agent
        if file.size_bytes != found.size_bytes:
            file.close()
            raise ValueError("the content has another size")
        self._kept[found.sealed.slot, found.sealed.commit] = _KeptCopy(found.sealed, file, False)

    def unverified(self) -> list[Key]:
        """Return the adopted copies whose bytes have not been verified."""
        with self._lock:
            return [key for key, kept in self._kept.items() if not kept.is_verified]

    def verify(self, slot: SlotId, commit: CommitId, go_on: GoOn) -> bool:
        """Verify a copy once. Return False if it is damaged; then it is dropped.

        Raises CopyError when ``go_on`` has returned False.
        """
        source = self.open(slot, commit)
        if source is None:
            return True
        with closing(source):
            is_good = source.is_intact(go_on) and self._is_authentic(source.sealed, source.read)
            with self._lock:
                kept = self._kept.get((slot, commit))
                if kept is not None and kept.sealed is source.sealed:
                    kept.is_verified = True
                    if not is_good:
                        self._drop(slot, commit, recycles=False)
        return is_good

    def _is_authentic(self, sealed: Sealed, read: ReadBytes) -> bool:
        try:
            check_authentic(sealed, self._owner(sealed.slot), self._key, read_header(read, sealed.length), read)
        except CopyError:
            return False
        return True

    # ----------------------------------------------------------------------------------------------------- reading

    def kept(self) -> list[Key]:
        with self._lock:
            return sorted(self._kept)

    def size_bytes(self) -> int:
        """Return the memory of all files: of kept and of incomplete copies, and of those for the next copies."""
        with self._lock:
            kept = [copy.file for copy in self._kept.values()]
            incoming = [copy.file for copy in self._incoming.values()]
            return sum(file.size_bytes for file in (*kept, *incoming, *self._spare))

    def open(self, slot: SlotId, commit: CommitId) -> Source | None:
        """Open a copy; None if this host does not keep it. ``verify`` it before its bytes are used."""
        with self._lock:
            kept = self._kept.get((slot, commit))
            if kept is None:
                return None
            memory = kept.file.memory()
            kept.file.readers += 1
            return Source(kept.sealed, memory, partial(self._end_reading, kept.file))

    def share(self, slot: SlotId, commit: CommitId) -> tuple[int, tuple[int, int, int]] | None:
        """Return a descriptor of a copy, for a process that reads it, and ``Sealed.content``. Close the descriptor.

        None: this host does not keep the copy, or has not verified it. The bytes of this file never change afterwards:
        a later copy gets another file. Raises OSError.
        """
        with self._lock:
            kept = self._kept.get((slot, commit))
            if kept is None or not kept.is_verified:
                return None
            kept.file.is_shared = True
            return os.open(f"/proc/self/fd/{kept.file.fd}", os.O_RDONLY | os.O_CLOEXEC), kept.sealed.content

    def _end_reading(self, file: StoreFile) -> None:
        with self._lock:
            file.readers -= 1

    # ----------------------------------------------------------------------------------------------------- writing

    def begin(self, sealed: Sealed, size_bytes: int, go_on: GoOn = lambda: True) -> IncomingCopy | None:
        """Reserve the space of a copy, or continue an incomplete one. Return None if it is kept already.

        Raises CopyError if it is not wanted, or does not fit.
        """
        with self._lock:
            self._check_wanted(sealed)
            kept = self._kept.get((sealed.slot, sealed.commit))
            if kept is not None and kept.sealed.content == sealed.content:
                return None
            incoming = self._incoming.get(sealed.slot)
            if incoming is not None and (incoming.sealed, incoming.size_bytes) == (sealed, size_bytes):
                return incoming
            self._abandon(sealed.slot)
            if not 0 < sealed.length <= size_bytes:
                raise CopyError(f"{sealed} cannot be kept: it has {sealed.length} of {size_bytes} bytes")
            try:
                file = self._take_spare(sealed.length) or self._make_file()
            except OSError as error:
                raise CopyError(self._refusal(sealed, error)) from error
            incoming = self._incoming[sealed.slot] = IncomingCopy(sealed, size_bytes, file)
        with incoming.owned(lambda: None, go_on):
            try:
                self._reserve(incoming, go_on)
            except (OSError, CopyError) as error:
                self.abandon(incoming)
                raise CopyError(self._refusal(sealed, error)) from error
        return incoming

    def _reserve(self, incoming: IncomingCopy, go_on: GoOn) -> None:
        """Allocate the file. Raises OSError or CopyError."""
        length = incoming.sealed.length
        try:
            incoming.file.reserve(length, incoming.size_bytes, go_on)
        except OSError:
            if not self.release_spare():
                raise
            incoming.file.reserve(length, incoming.size_bytes, go_on)

    def _take_spare(self, length: int) -> StoreFile | None:
        """Return the spare file that is nearest in size."""
        nearest = min(self._spare, key=lambda file: abs(file.size_bytes - length), default=None)
        if nearest is not None:
            self._spare.remove(nearest)
        return nearest

    def _make_file(self) -> StoreFile:
        if not os.fstat(self._directory).st_nlink:  # deleted, and the commit directory was not
            fd = _open_directory(self._parent)
            os.close(self._directory)
            self._directory = fd
        name = self._new_name()
        return StoreFile(name, make_file(self._directory, name))

    def _new_name(self) -> str:
        self._number += 1
        return f"{self._number}{_PART}"

    def finish(self, incoming: IncomingCopy) -> None:
        """Verify a complete copy, and make it visible. The caller owns it.

        Raises CopyError; if the checksum is wrong, the copy has no bytes again.
        """
        sealed, memory = incoming.sealed, incoming.file.memory()

        def read(offset: int, length: int) -> bytes:
            return bytes(memory[offset : offset + length])

        if not incoming.is_good() or not self._is_authentic(sealed, read):
            incoming.restart()
            raise CopyError(f"{sealed}: the checksum is wrong")
        with self._lock:
            self._check_wanted(sealed)
            incoming.check_wanted()
            self._drop(sealed.slot, sealed.commit)  # the same commit with another content
            try:
                self._publish(sealed, incoming.file)
            except OSError as error:
                self._abandon(sealed.slot)
                raise CopyError(self._refusal(sealed, error)) from error
            self._kept[sealed.slot, sealed.commit] = _KeptCopy(sealed, incoming.file, True)
            del self._incoming[sealed.slot]

    def _publish(self, sealed: Sealed, file: StoreFile) -> None:
        """Give the files of a copy their names: a crash leaves no copy, or the whole copy. Raises OSError."""
        stem = self._stem(sealed)
        self._rename(file, f"{stem}{_DATA}")
        body = msgspec.msgpack.encode(_SealFile(sealed, file.size_bytes))
        write_file(self._directory, f"{stem}{_SEAL}", self._mac(body) + body)

    def _rename(self, file: StoreFile, name: str) -> None:
        os.replace(file.name, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        file.name = name

    # ---------------------------------------------------------------------------------------------------- removing

    def abandon(self, incoming: IncomingCopy) -> None:
        """Remove an incomplete copy."""
        with self._lock:
            if self._incoming.get(incoming.sealed.slot) is incoming:
                self._abandon(incoming.sealed.slot)

    def forget(self, before: CommitId, besides: CommitId | None = None) -> list[Key]:
        """Remove all copies of older commits except ``besides``, and refuse older ones from now on.

        Return those removed.
        """
        with self._lock:
            self._forgotten = max(self._forgotten, before)
            for slot in [slot for slot, found in self._incoming.items() if found.sealed.commit < before]:
                self._abandon(slot)
            removed = [key for key in sorted(self._kept) if key[1] < before and key[1] != besides]
            for key in removed:
                self._drop(*key)
            return removed

    def release_spare(self) -> bool:
        """Free the memory of spare files. Return False if there was none."""
        with self._lock:
            return self._release_spare()

    def _release_spare(self) -> bool:
        had_spare = bool(self._spare)
        for file in self._spare:
            self._remove(file)
        self._spare.clear()
        return had_spare

    def _drop(self, slot: SlotId, commit: CommitId, recycles: bool = True) -> None:
        kept = self._kept.pop((slot, commit), None)
        if kept is None:
            return
        self._unlink(f"{self._stem(kept.sealed)}{_SEAL}")  # first: a file without a seal is no copy
        is_read = kept.file.readers or kept.file.is_shared
        if recycles and not is_read and len(self._spare) < len(self._kept):
            with suppress(OSError):  # the directory has lost its name
                self._rename(kept.file, self._new_name())
                self._spare.append(kept.file)
                return
        self._remove(kept.file)

    def _abandon(self, slot: SlotId) -> None:
        incoming = self._incoming.pop(slot, None)
        if incoming is not None:
            self._unlink(incoming.file.name)
            incoming.abandon()

    def _remove(self, file: StoreFile) -> None:
        self._unlink(file.name)
        file.close()

    # ------------------------------------------------------------------------------------------------------- small

    def _check_wanted(self, sealed: Sealed) -> None:
        if self._is_closed:
            raise CopyError("this copy store is closed")
        if sealed.commit < self._forgotten:
            raise CopyError(f"{sealed} is not wanted: the job keeps no copies of commits older than {self._forgotten}")

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
