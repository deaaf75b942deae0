"""Gloo backend: sockets between all pairs of a group, which native/gloo_sockets.hpp finds and cuts without Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from elasticstate._native import count_failed_collectives, measure_waits
from elasticstate.compat.process_groups import set_default_group_timeout
from elasticstate.log import logger
from elasticstate.net.messages import FromWorkerBody
from elasticstate.options import WorkerEnvironment
from elasticstate.worker.contexts import addresses
from elasticstate.worker.contexts.context import Fault, Rendezvous
from elasticstate.worker.contexts.gloo_groups import GlooGroups
from elasticstate.worker.contexts.groups import TorchGroups


class GlooBackend:
    """The Gloo backend (see context.Backend). None of its objects outlives a generation."""

    _counts_failures = False

    def prepare(self, environment: WorkerEnvironment, send: Callable[[FromWorkerBody], None]) -> None:
        if not measure_waits():
            logger.warning(
                "this build of torch does not permit to measure waits in collectives, so no straggler is named"
            )
        addresses.use_for_gloo(environment.local_address)

        self._counts_failures = count_failed_collectives()

    def context(self) -> GlooContext:
        return GlooContext(self._counts_failures)


class GlooContext:
    """The Gloo groups of one generation. See context.Context."""

    severs_in_python = False
    raises_when_cut = True

    def __init__(self, counts_failures: bool = False) -> None:
        """``counts_failures``: ``_native.count_failed_collectives`` has returned True."""
        self._counts_failures = counts_failures
        self._gloo = GlooGroups()
        self.sockets = self._gloo.sockets
        self._groups = TorchGroups(self.sockets.begin_group, self.sockets.end_group)
        self._rendezvous: Rendezvous | None = None

    # ------------------------------------------------------------------------------------------------------ main thread

    def watch_store(self, address: tuple[str, int]) -> None:
        self.sockets.watch_store(*address)

    def create(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        addresses.announce(rendezvous)
        with addresses.explained(rendezvous):
            self._groups.create(
                "gloo",
                rendezvous.collective_timeout,
                store=rendezvous.store,
                rank=rendezvous.rank,
                world_size=rendezvous.size,
                timeout=rendezvous.init_timeout,
            )
        set_default_group_timeout(rendezvous.collective_timeout)

    def subgroup(self, ranks: tuple[int, ...]) -> Any:
        assert self._rendezvous is not None, "there is a generation"
        return self._gloo.subgroup(self._rendezvous, ranks)

    def retire(self) -> Callable[[], None]:
        """See context.Context. Gloo closes one connection after another, and waits up to 10 ms for each."""
        self._gloo.be_quiet()
        groups = [*self._groups.retire(), *self._gloo.take()]
        self._rendezvous = None
        self.sockets.forget()
        return groups.clear

    def destroy(self, by_plan: bool = False) -> None:
        self._gloo.be_quiet()
        self._gloo.clear()
        self._rendezvous = None
        self._groups.destroy()
        self.sockets.forget()

    def has_failed(self) -> bool:
        return self.sockets.failed()

    def may_have_failed(self) -> bool:
        return not self._counts_failures and self.sockets.lost()

    def classify(self, error: BaseException) -> Fault:
        return Fault.GENERATION if isinstance(error, dist.DistError) else Fault.UNKNOWN

    def usable(self) -> bool:
        return True

    # ------------------------------------------------------------------------------------------------------- any thread

    def sever(self) -> None:
        self.sockets.sever()

    def own_failure(self) -> str:
        return ""  # a collective that fails raises an error

    def broken(self) -> bool:
        """Return True if a pair in one of the groups has lost its connection, or this process has cut all of them."""
        return self.sockets.broken()
