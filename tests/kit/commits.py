"""Commits made without torch, and hosts that keep copies of them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType

from elasticstate._native import ControlPage, checksum
from elasticstate.commits import commit_tag, header_digest, owner_of, part_tag
from elasticstate.core.ids import CommitId, SlotId
from elasticstate.replicas.pusher import HostReplicas, Target
from elasticstate.replicas.store import ReplicaStore, Sealed

KEY = b"k" * 32
JOB = "job"
HEADER_BYTES = 4096
RANDOM_BYTES = 64
SPARE_BYTES = 512  # of the buffer, after the sealed bytes


def content(tensors: bytes, objects: bytes = b"objects") -> tuple[bytes, int]:
    """Return the bytes of a buffer that holds these tensors, and the number of sealed bytes."""
    end = RANDOM_BYTES + len(tensors)
    places = {
        "__metadata__": {"format": "pt"},
        "elasticstate.random": {"dtype": "U8", "shape": [RANDOM_BYTES], "data_offsets": [0, RANDOM_BYTES]},
        "x": {"dtype": "U8", "shape": [len(tensors)], "data_offsets": [RANDOM_BYTES, end]},
        "elasticstate.objects": {
            "dtype": "U8",
            "shape": [len(objects) + SPARE_BYTES],
            "data_offsets": [end, end + len(objects) + SPARE_BYTES],
        },
    }
    text = json.dumps(places).encode().ljust(HEADER_BYTES - 8)
    header = len(text).to_bytes(8, "little") + text
    sealed = header + bytes(RANDOM_BYTES) + tensors + objects
    return sealed + bytes(SPARE_BYTES), len(sealed)


def seal_of(slot: SlotId, commit: CommitId, data: bytes, length: int, index: int = 0, job: str = JOB) -> Sealed:
    """Return the seal that a worker of this job writes for this content."""
    header, sealed = data[:HEADER_BYTES], data[:length]
    objects = HEADER_BYTES + json.loads(header[8:])["elasticstate.objects"]["data_offsets"][0]
    rest = part_tag(KEY, data[HEADER_BYTES : HEADER_BYTES + RANDOM_BYTES], data[objects:length])
    crc = checksum(sealed, 0, length)
    owner = owner_of(job, slot.host, slot.slot)
    tag = commit_tag(KEY, owner, index, commit, length, crc, part_tag(KEY, header), rest)
    return Sealed(slot, commit, index, header_digest(header), length, crc, tag)


def put(store: ReplicaStore, slot: SlotId, commit: CommitId, tensors: bytes, most_bytes: int | None = None) -> bytes:
    """Put a copy into the store, or only its first bytes. Return the sealed bytes."""
    data, length = content(tensors)
    incoming = store.begin(seal_of(slot, commit, data, length), len(data))
    if incoming is not None:
        with incoming.owned(lambda: None, lambda: True):
            while incoming.missing_bytes:
                if most_bytes is not None and incoming.offset >= most_bytes:
                    return data[:length]
                incoming.write(memoryview(data)[incoming.offset : min(incoming.offset + 1000, length)])
            store.finish(incoming)
    return data[:length]


class Worker:
    """The files of one slot, and what its worker does with them."""

    def __init__(self, host: str, slot: int = 0) -> None:
        self.slot = SlotId(host, slot)
        self.page = ControlPage(None)
        self.buffers = [os.memfd_create(f"buffer-{index}") for index in (0, 1)]
        self.owner = owner_of(JOB, host, slot)
        self._next = 0

    def close(self) -> None:
        for fd in self.buffers:
            os.close(fd)

    def duplicate(self, index: int) -> int:
        return os.dup(self.buffers[index])

    def commit(self, commit: CommitId, tensors: bytes) -> bytes:
        """Write a commit into the older buffer, as a worker does. Return the whole buffer."""
        index, self._next = self._next, 1 - self._next
        data, length = content(tensors)
        self.page.unseal(index)
        os.pwrite(self.buffers[index], data, 0)
        sealed = seal_of(self.slot, commit, data, length, index)
        self.page.seal(index, self.owner, *commit, sealed.layout, length, sealed.checksum, sealed.tag)
        return data[:length]


class Host:
    """One host of a job."""

    def __init__(
        self, name: str, directory: Path, key: bytes = KEY, timeout_s: float = 10.0, rate: float | None = None
    ) -> None:
        self.name = name
        self.path = directory / name
        self.path.mkdir(mode=0o700, exist_ok=True)
        self.slots: dict[int, Worker] = {}
        self.reports: SimpleQueue[tuple[str, SlotId, CommitId]] = SimpleQueue()
        self.reasons: list[tuple[str, str]] = []  # of dropped copies: the host without the copy, and why
        self.log: list[str] = []
        fd = os.open(self.path, os.O_RDONLY)
        try:
            self.copies = HostReplicas(
                host=name,
                job_id=JOB,
                key=key,
                directory=fd,
                slots=self.slots,
                timeout_s=timeout_s,
                on_kept=lambda slot, commit: self.reports.put(("kept", slot, commit)),
                on_dropped=lambda keeper, slot, commit, reason: self._dropped(keeper, slot, commit, reason),
                on_damaged=lambda slot, commit: self.reports.put(("damaged", slot, commit)),
                log=self.log.append,
                rate_bytes_per_s=rate,
            )
        finally:
            os.close(fd)
        self.address = self.copies.start("127.0.0.1")
        self.target = Target(name, self.address)

    def _dropped(self, keeper: str, slot: SlotId, commit: CommitId, reason: str) -> None:
        self.reasons.append((keeper, reason))
        self.reports.put(("dropped", slot, commit))

    @staticmethod
    def slot_of(name: str) -> SlotId:
        return SlotId(name, 0)

    def worker(self, slot: int = 0) -> Worker:
        self.slots[slot] = Worker(self.name, slot)
        return self.slots[slot]

    def is_read(self) -> bool:
        """Return True if the server has not noticed the end of a reading yet: such a file is not used again."""
        store = self.copies.store
        return any(kept.file.readers for kept in store._kept.values())

    def report(self) -> tuple[str, SlotId, CommitId]:
        """Wait for the next report to the driver."""
        try:
            return self.reports.get(timeout=30)
        except Empty:
            raise AssertionError(f"host {self.name} reports nothing; its log: {self.log}") from None

    def kept_file(self) -> Path:
        """Return the file of the only kept copy."""
        (path,) = (self.path / "copies").glob("*.safetensors")
        return path

    def files(self) -> list[str]:
        return sorted(os.listdir(self.path / "copies"))

    def __enter__(self) -> Host:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self.copies.close()
        for worker in self.slots.values():
            worker.close()


def wait_until(condition: Callable[[], bool], what: str = "") -> None:
    """Wait until the condition is true."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"not after 30 s: {what}"
        time.sleep(0.002)
