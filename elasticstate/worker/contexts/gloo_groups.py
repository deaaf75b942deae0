"""The Gloo groups of one generation, which native/gloo_sockets.hpp finds and cuts without Python: all of them, or those
for the tensors in the memory of the CPU."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from elasticstate._native import GlooSockets
from elasticstate.errors import CollectiveError
from elasticstate.worker.contexts.context import Rendezvous

_CUT_AFTER_S = 0.05  # when a generation is left; what has ended is cleared away sooner
_QUIET_TIMEOUT_S = 5.0  # for operations that were cut to end


class GlooGroups:
    """Their sockets, and the groups that are not torch's. On the main thread, but for ``sockets``."""

    def __init__(self) -> None:
        self.sockets = GlooSockets()
        self._own: list[tuple[tuple[int, ...], Any]] = []

    def subgroup(self, at: Rendezvous, ranks: tuple[int, ...]) -> Any:
        """Not by torch's ``new_group``: that counts the groups of this process, and names the next one after the count.
        User code would get groups of different names on different ranks, and hang.
        """
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

    def be_quiet(self) -> None:
        """Let no operation be under way, not even one that has failed and is being cleared away.

        That takes the GIL on a thread of the group, and whoever drops the last reference to the group, which may be
        DDP's with the GIL held, waits for that thread: a deadlock in torch 2.13.
        """
        begun = time.monotonic()
        while self.sockets.busy() and (waited_s := time.monotonic() - begun) < _QUIET_TIMEOUT_S:
            if waited_s > _CUT_AFTER_S:
                self.sockets.sever()
            time.sleep(0.001)

    def clear(self) -> None:
        """Drop what is not torch's."""
        self._own.clear()
