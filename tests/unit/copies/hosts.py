"""One host for tests: a directory for commits, slots with workers, and the agent's part of the copies."""

from __future__ import annotations

import os
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType

from elasticstate.copies.pusher import Target
from elasticstate.copies.service import HostCopies
from elasticstate.core.ids import CommitId, SlotId
from tests.unit.copies.made import JOB, KEY, Worker


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
            self.copies = HostCopies(
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
