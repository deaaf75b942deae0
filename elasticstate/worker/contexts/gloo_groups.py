"""Gloo groups of one generation, which native/gloo_sockets.hpp finds and cuts without Python.

With the gloo backend these are all groups, with the nccl backend those for CPU tensors.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

import torch.distributed as dist

from elasticstate._native import GlooSockets
from elasticstate.compat.stores import PrefixStore
from elasticstate.errors import CollectiveError
from elasticstate.worker.contexts.addresses import explained
from elasticstate.worker.contexts.context import Rendezvous

_CUT_AFTER_S = 0.05  # on leaving a generation, cut operations that take longer; ended ones are cleared sooner
_QUIET_TIMEOUT_S = 5.0  # maximum time until cut operations end


class GlooGroups:
    """Sockets of the groups, and the groups that torch does not manage. Main thread only, except ``sockets``."""

    def __init__(self) -> None:
        self.sockets = GlooSockets()
        self._own: list[tuple[tuple[int, ...], Any]] = []

    def subgroup(self, at: Rendezvous, ranks: tuple[int, ...]) -> Any:
        """Create a group of these ranks without torch's ``new_group``.

        ``new_group`` counts the groups of this process, and names the next one after the count. User code would get
        groups with different names on different ranks, and hang.
        """
        times = sum(known == ranks for known, _ in self._own)
        name = f"elasticstate/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:32]}/{times}"  # ranks may be thousands
        if not self.sockets.begin_group(len(ranks)):
            raise CollectiveError("the generation has ended")
        try:
            with explained(at):
                group = dist.ProcessGroupGloo(
                    PrefixStore(name, at.store), ranks.index(at.rank), len(ranks), at.collective_timeout
                )
        finally:
            self.sockets.end_group()
        self._own.append((ranks, group))
        return group

    def be_quiet(self) -> None:
        """Wait until no operation is running, including the cleanup of failed operations.

        That cleanup takes the GIL on a thread of the group. The code that drops the last reference to the group waits
        for that thread, and may hold the GIL, as DDP's does: a deadlock in torch 2.13.
        """
        begun = time.monotonic()
        while self.sockets.busy() and (waited_s := time.monotonic() - begun) < _QUIET_TIMEOUT_S:
            if waited_s > _CUT_AFTER_S:
                self.sockets.sever()
            time.sleep(0.001)

    def take(self) -> list[Any]:
        """Return the groups that torch does not manage, and keep none."""
        groups = [group for _, group in self._own]
        self._own.clear()
        return groups

    def clear(self) -> None:
        """Drop the groups that torch does not manage."""
        self._own.clear()
