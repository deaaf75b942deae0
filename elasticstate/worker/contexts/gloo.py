"""The Gloo context: the process groups of one generation, made and taken down; native/gloo_sockets.hpp cuts them.

Every group of a generation is noted at the one place where torch makes a group, those of user code's ``new_group`` and
of ``DeviceMesh`` too.
"""

from __future__ import annotations

import hashlib
import sys
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from elasticstate._native import GlooSockets
from elasticstate.errors import CollectiveError

_CUT_AFTER_S = 0.05  # when a generation is left; what has ended is cleared away sooner
_QUIET_TIMEOUT_S = 5.0  # for operations that were cut to end


class GlooContext:
    """All process groups of one generation. Made, used and left on the main thread; ``sever`` is for any thread.

    ``sockets`` is what the sentinel cuts, without Python.
    """

    def __init__(self) -> None:
        self.sockets = GlooSockets()
        self._timeout = timedelta()
        self._excepthook = sys.excepthook
        self._torch_helper: Any = None
        self._store: Store | None = None
        self._rank = 0
        self._own: list[tuple[tuple[int, ...], Any]] = []  # of ``subgroup``

    # ------------------------------------------------------------------------------------------------ main thread

    def watch_store(self, address: tuple[str, int]) -> None:
        """From now on ``sever`` also cuts this process's connections to the store at ``address``."""
        self.sockets.watch_store(*address)

    def create(
        self, store: Store, rank: int, size: int, *, init_timeout: timedelta, collective_timeout: timedelta
    ) -> None:
        """Make the default process group of the generation.

        ``init_timeout`` bounds the rendezvous; ``collective_timeout`` is every group's afterwards, those of user code
        included. Raises what torch raises when a peer is missing or the generation is severed meanwhile.
        """
        self._timeout, self._store, self._rank = collective_timeout, store, rank
        self._excepthook = sys.excepthook
        self._torch_helper = distributed_c10d._new_process_group_helper
        distributed_c10d._new_process_group_helper = self._noted_helper
        try:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=init_timeout)
        finally:
            sys.excepthook = self._excepthook  # each init_process_group wraps it once more
        distributed_c10d._set_pg_timeout(collective_timeout, dist.group.WORLD)

    def subgroup(self, ranks: tuple[int, ...]) -> Any:
        """A group of these ranks, ascending, made by them alone; it lasts until ``destroy``.

        Not by torch's ``new_group``: that counts the groups of this process, and names the next one after the count.
        User code would get groups of different names on different ranks, and hang.
        """
        assert self._store is not None, "there is a generation"
        times = sum(known == ranks for known, _ in self._own)
        name = f"elasticstate/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:32]}/{times}"  # ranks may be thousands
        if not self.sockets.begin_group(len(ranks)):
            raise CollectiveError("the generation has ended")
        try:
            group = dist.ProcessGroupGloo(
                PrefixStore(name, self._store), ranks.index(self._rank), len(ranks), self._timeout
            )
        finally:
            self.sockets.end_group()
        self._own.append((ranks, group))
        return group

    def destroy(self) -> None:
        """Take the groups down. Nothing of the generation is left afterwards: no thread, no descriptor."""
        self._be_quiet()
        self._own.clear()
        self._store = None
        if self._torch_helper is not None:
            distributed_c10d._new_process_group_helper = self._torch_helper
            self._torch_helper = None
        if dist.is_initialized():
            dist.destroy_process_group()
        # A group that failed to be made has been counted all the same, and the count is part of the next one's name.
        distributed_c10d._world.group_count = 0
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

    def _noted_helper(self, group_size: int, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("timeout") == distributed_c10d.default_pg_timeout:
            kwargs["timeout"] = self._timeout
        if not self.sockets.begin_group(group_size):
            raise CollectiveError("the generation has ended")
        try:
            return self._torch_helper(group_size, *args, **kwargs)
        finally:
            self.sockets.end_group()

    # ------------------------------------------------------------------------------------------------- any thread

    def sever(self) -> None:
        """Cut everything: whoever is inside a collective, an init or a store wait, or enters one, gets an error.

        Level, not edge: call it again and again until the generation has been left, sockets may appear meanwhile.
        """
        self.sockets.sever()

    def broken(self) -> bool:
        """The fact behind a failure: a pair of one of the groups has lost its connection, or all were cut here."""
        return self.sockets.broken()
