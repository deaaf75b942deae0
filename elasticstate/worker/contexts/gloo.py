"""Gloo: sockets between all pairs of a group, which native/gloo_sockets.hpp finds and cuts without Python."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from elasticstate._native import GlooSockets
from elasticstate.config import WorkerEnvironment
from elasticstate.errors import CollectiveError
from elasticstate.net.messages import FromWorkerBody
from elasticstate.worker.contexts.context import Fault, Rendezvous
from elasticstate.worker.contexts.groups import TorchGroups

_CUT_AFTER_S = 0.05  # when a generation is left; what has ended is cleared away sooner
_QUIET_TIMEOUT_S = 5.0  # for operations that were cut to end


class Gloo:
    """The backend (see context.Backend): nothing lasts longer than a generation."""

    def prepare(self, environment: WorkerEnvironment, say: Callable[[FromWorkerBody], None]) -> None: ...

    def context(self) -> GlooContext:
        return GlooContext()


class GlooContext:
    """See context.Context."""

    severs_in_python = False

    def __init__(self) -> None:
        self.sockets = GlooSockets()
        self._groups = TorchGroups(self.sockets.begin_group, self.sockets.end_group)
        self._rendezvous: Rendezvous | None = None
        self._own: list[tuple[tuple[int, ...], Any]] = []  # of ``subgroup``

    # ------------------------------------------------------------------------------------------------ main thread

    def watch_store(self, address: tuple[str, int]) -> None:
        self.sockets.watch_store(*address)

    def create(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._groups.create(
            "gloo",
            rendezvous.collective_timeout,
            store=rendezvous.store,
            rank=rendezvous.rank,
            world_size=rendezvous.size,
            timeout=rendezvous.init_timeout,
        )
        distributed_c10d._set_pg_timeout(rendezvous.collective_timeout, dist.group.WORLD)

    def subgroup(self, ranks: tuple[int, ...]) -> Any:
        """Not by torch's ``new_group``: that counts the groups of this process, and names the next one after the count.
        User code would get groups of different names on different ranks, and hang.
        """
        at = self._rendezvous
        assert at is not None, "there is a generation"
        times = sum(known == ranks for known, _ in self._own)
        name = f"elasticstate/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:32]}/{times}"  # ranks may be thousands
        if not self.sockets.begin_group(len(ranks)):
            raise CollectiveError("the generation has ended")
        try:
            group = dist.ProcessGroupGloo(
                PrefixStore(name, at.store), ranks.index(at.rank), len(ranks), at.collective_timeout
            )
        finally:
            self.sockets.end_group()
        self._own.append((ranks, group))
        return group

    def destroy(self) -> None:
        self._be_quiet()
        self._own.clear()
        self._rendezvous = None
        self._groups.destroy()
        self.sockets.forget()

    def _be_quiet(self) -> None:
        """Let no operation be under way, not even one that has failed and is being cleared away.

        That takes the GIL on a thread of the group, and whoever drops the last reference to the group, which may be
        DDP's with the GIL held, waits for that thread: a deadlock in torch 2.13.
        """
        begun = time.monotonic()
        while self.sockets.busy() and (waited_s := time.monotonic() - begun) < _QUIET_TIMEOUT_S:
            if waited_s > _CUT_AFTER_S:
                self.sockets.sever()
            time.sleep(0.001)

    def classify(self, error: BaseException) -> Fault:
        return Fault.GENERATION if isinstance(error, dist.DistError) else Fault.UNKNOWN

    def usable(self) -> bool:
        return True

    # ------------------------------------------------------------------------------------------------- any thread

    def sever(self) -> None:
        self.sockets.sever()

    def broken(self) -> bool:
        """A pair of one of the groups has lost its connection, or all were cut here."""
        return self.sockets.broken()
