"""Faults as data, for train.py: kind, point, step and rank. Each fault fires once per job.

More faults may follow while the job runs: each line of a file is one. The test that writes the file replaces it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

import elasticstate as elastic
from elasticstate.options import worker_environment
from elasticstate.state.peer import PeerReader
from elasticstate.state.session import Channel
from elasticstate.worker import contexts
from elasticstate.worker.contexts import Context, Rendezvous
from elasticstate.worker.loop import Regrouper

BUSY_S = 6.0
POINTS = ("import", "step", "backward", "new_group", "callback", "gate", "init", "store", "sync", "leave")
SHARDED = ("commit-bytes", "seal", "reshard", "damage")  # see tests/multihost/scripts/sharded_faults.py


@dataclass(frozen=True)
class Fault:
    """A fault: ``kill@30:rank=1``, ``raise@30:rank=all``, ``kill@init:generation=2`` or ``exit0@step=40:rank=0``."""

    what: str  # kill | raise | exit0 | exit3 | segv | abort | oom | gil | spin | deadlock | busy | wait
    point: str
    step: int | None
    rank: int | None
    generation: int | None
    times: int

    @staticmethod
    def parse(text: str) -> Fault:
        head, *rest = text.split(":")
        what, _, where = head.partition("@")
        fields = dict(item.split("=") for item in rest)
        step = int(where) if where.isdigit() else int(fields["step"]) if "step" in fields else None
        point = "step" if where.isdigit() else where
        if point not in (*POINTS, *SHARDED):
            raise ValueError(f"no such point: {point}")
        rank = fields.get("rank")
        return Fault(
            what,
            point,
            step,
            None if rank in (None, "all") else int(rank),
            int(fields["generation"]) if "generation" in fields else None,
            int(fields.get("times", 1)),
        )


def hold_the_gil_for_ever() -> None:
    """Wait for a lock without releasing the GIL, like a faulty extension. No signal handler of Python can run."""
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(128)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


class Faults:
    """Faults of one worker. Files in ``directory`` make each fault fire once (``times``) per job, as proof, too."""

    def __init__(self, faults: list[Fault], directory: Path, more: Path | None = None) -> None:
        """``more``: the file with further faults."""
        self._first = faults
        self._directory = directory
        self._file = more
        self._version = (0, 0)
        self._faults = list(enumerate(faults))

    def have(self, point: str) -> bool:
        """Return True if a fault at this point is possible, now or earlier."""
        self._read()
        return any(fault.point == point for _, fault in self._faults)

    def _read(self) -> None:
        if self._file is None or not self._file.exists():
            return
        status = self._file.stat()
        if self._version != (version := (status.st_ino, status.st_size)):
            self._version = version
            later = [Fault.parse(line) for line in self._file.read_text().splitlines()]
            self._faults = list(enumerate([*self._first, *later]))

    def at(self, point: str, *, rank: int | None = None, step: int | None = None) -> None:
        fault = self.taken(point, rank=rank, step=step)
        if fault is not None:
            self.fire(fault)

    def taken(self, point: str, *, rank: int | None = None, step: int | None = None) -> Fault | None:
        """Return the fault that strikes here, after it has been recorded. The caller fires it."""
        self._read()
        for number, fault in self._faults:
            if fault.point != point or (fault.step is not None and step != fault.step):
                continue
            if fault.rank is not None and rank != fault.rank:
                continue
            if fault.generation is not None and fault.generation != elastic.generation():
                continue
            if self._take_lock(number, fault, rank):
                return fault
        return None

    def _take_lock(self, number: int, fault: Fault, rank: int | None) -> bool:
        everybody = fault.rank is None and fault.point in ("step", "backward")
        for turn in range(fault.times):
            who = f"-rank{rank}" if everybody else ""
            try:
                os.close(os.open(self._directory / f"fired-{number}-{turn}{who}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            return True
        return False

    def fire(self, fault: Fault) -> None:
        sys.stdout.flush()
        match fault.what:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "segv":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "abort":
                os.abort()
            case "oom":
                Path(os.environ["OOM_GROUP"], "cgroup.procs").write_text(str(os.getpid()))
                hoard = [bytearray(os.urandom(1 << 20)) for _ in range(1 << 10)]
                sys.exit(f"{len(hoard)} MB, and not killed")
            case "gil":
                hold_the_gil_for_ever()
            case "spin":
                while True:
                    pass
            case "deadlock":
                lock = threading.Lock()
                lock.acquire()
                lock.acquire()
            case "busy":
                ctypes.PyDLL(None).usleep(int(BUSY_S / 2 * 1e6))  # holds the GIL
                until = time.monotonic() + BUSY_S / 2
                while time.monotonic() < until:
                    pass
            case "wait":
                while (self._directory / "wait").exists():
                    time.sleep(0.01)
            case "exit0":
                os._exit(0)
            case "exit3":
                sys.exit(3)
            case "raise":
                raise ValueError(f"a bug of the user's at {fault.point}")

    def arm(self) -> None:
        """Install the faults that strike inside elasticstate and torch."""
        environment = worker_environment()
        kind: Any = type(contexts.choose("auto" if environment is None else environment.backend).context())
        create = kind.create

        def watched_create(context: Context, rendezvous: Rendezvous) -> None:
            watched = _Watched(rendezvous.store, lambda point: self.at(point, rank=rendezvous.rank))
            create(context, dataclasses.replace(rendezvous, store=watched))

        if self._file is not None or any(fault.point in ("init", "store") for fault in self._first):
            kind.create = watched_create
        self._before(Channel, "broadcast", "sync")
        self._before(PeerReader, "wait_for", "sync")
        self._before(Regrouper, "leave", "leave")

    def _before(self, owner: type, method: str, point: str) -> None:
        original = getattr(owner, method)

        def struck(*args: Any, **named: Any) -> Any:
            with contextlib.suppress(elastic.NotInWorldError):  # a worker leaves before its first world
                self.at(point, rank=elastic.rank())
            return original(*args, **named)

        setattr(owner, method, struck)


class _Watched(dist.Store):
    """Store that calls ``tell`` before (``store``) and after (``init``) its user publishes an address."""

    def __init__(self, store: dist.Store, tell: Any) -> None:
        super().__init__()
        self._store = store
        self._tell = tell

    def set(self, key: str, value: Any) -> None:
        self._tell("store")
        self._store.set(key, value)
        self._tell("init")

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._store.multi_get(keys)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._store.wait(keys, *timeout)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)
