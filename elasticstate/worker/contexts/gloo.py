"""Gloo backend: sockets between all pairs of a group, which native/gloo_sockets.hpp finds and cuts without Python.

Also here: the groups that torch creates, with any backend.
"""

from __future__ import annotations

import hashlib
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from elasticstate._native import GlooSockets, count_failed_collectives, measure_waits
from elasticstate.compat import process_groups
from elasticstate.compat.process_groups import PrefixStore, set_default_group_timeout
from elasticstate.errors import CollectiveError
from elasticstate.log import logger
from elasticstate.net.messages import FromWorkerBody
from elasticstate.options import WorkerEnvironment
from elasticstate.worker.contexts import Context, Fault, Rendezvous, addresses

_CUT_AFTER_S = 0.05  # on leaving a generation, cut operations that take longer; ended ones are cleared sooner
_QUIET_TIMEOUT_S = 5.0  # maximum time until cut operations end


class TorchGroups:
    """The groups that torch creates in one generation, from ``create`` to ``destroy``. Main thread only.

    These are the default group and those of user code's ``new_group``, ``split_group`` and ``DeviceMesh``. They get the
    world's timeout. ``begin(size)`` is called before the creation of a group (False stops it), ``end()`` afterwards.
    """

    def __init__(self, begin: Callable[[int], bool], end: Callable[[], None]) -> None:
        self._begin = begin
        self._end = end
        self._timeout = timedelta()
        self._made: list[weakref.ref[Any]] = []
        self._restore_creation: Callable[[], None] | None = None

    def create(self, backend: str, collective_timeout: timedelta, **options: Any) -> None:
        """Call ``init_process_group(backend, **options)``. Later groups get the timeout ``collective_timeout``."""
        self._timeout = collective_timeout
        excepthook = sys.excepthook
        self._restore_creation = process_groups.replace_group_creation(self._create_registered)
        try:
            dist.init_process_group(backend, **options)
        finally:
            sys.excepthook = excepthook  # each init_process_group wraps it again

    def destroy(self) -> None:
        """Destroy the groups, if any were created."""
        if self._restore_creation is not None:
            self._restore_creation()
            self._restore_creation = None
        if dist.is_initialized():
            process_groups.destroy_groups(logger.error)
        process_groups.reset_group_count()
        self._made.clear()

    def all(self) -> set[Any]:
        """Return all groups that live, on any thread. torch does not list those of ``ProcessGroup.split_group``."""
        made = (reference() for reference in self._made.copy())
        return {*process_groups.all_groups(), *(group for group in made if group is not None)}

    def retire(self) -> list[Any]:
        """Take all groups out of use. Whoever drops the returned list destroys the groups, on any thread."""
        groups = process_groups.all_groups()
        self.destroy()
        return groups

    def _create_registered(
        self, create: Callable[..., Any], size: int, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        if kwargs.get("timeout") in process_groups.DEFAULT_TIMEOUTS:
            kwargs["timeout"] = self._timeout
        if not self._begin(size):
            raise CollectiveError("the generation has ended")
        try:
            made = create(*args, **kwargs)
            group = made[0] if isinstance(made, tuple) else made
            if isinstance(group, dist.ProcessGroup):
                self._made.append(weakref.ref(group))
            return made
        finally:
            self._end()


class GlooGroups:
    """The Gloo groups of one generation that torch does not manage. Main thread only, except ``sockets``.

    With the gloo backend these are all groups, with the nccl backend those for CPU tensors.
    """

    def __init__(self, sockets: GlooSockets) -> None:
        self.sockets = sockets
        self._own: list[tuple[tuple[int, ...], Any]] = []

    def subgroup(self, at: Rendezvous, ranks: tuple[int, ...]) -> Any:
        """Create a group of these ranks without torch's ``new_group``, which names groups by a count: those of user
        code would get different names on different ranks, and hang."""
        times = sum(known == ranks for known, _ in self._own)
        name = f"elasticstate/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:32]}/{times}"  # ranks may be thousands
        if not self.sockets.begin_group(len(ranks)):
            raise CollectiveError("the generation has ended")
        try:
            with addresses.explained(at):
                group = dist.ProcessGroupGloo(
                    PrefixStore(name, at.store), ranks.index(at.rank), len(ranks), at.collective_timeout
                )
        finally:
            self.sockets.end_group()
        self._own.append((ranks, group))
        return group

    def be_quiet(self) -> None:
        """Wait until no operation is running, including the cleanup of failed operations: see gloo_rest.py."""
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


class GlooBackend:
    """The Gloo backend (see contexts.Backend). None of its objects outlives a generation."""

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


class GlooContext(Context):
    """The Gloo groups of one generation. See contexts.Context."""

    def __init__(self, counts_failures: bool = False) -> None:
        """``counts_failures``: ``_native.count_failed_collectives`` has returned True."""
        super().__init__()
        self._counts_failures = counts_failures
        self._gloo = GlooGroups(self.sockets)
        self._groups = TorchGroups(self._begin_group, self._end_group)
        self._rendezvous: Rendezvous | None = None

    # ------------------------------------------------------------------------------------------------------ main thread

    def create(self, rendezvous: Rendezvous) -> None:
        self._create(rendezvous, "gloo")

    def _create(self, rendezvous: Rendezvous, backend: str, **options: Any) -> None:
        self._rendezvous = rendezvous
        addresses.announce(rendezvous)
        with addresses.explained(rendezvous):
            self._groups.create(
                backend,
                rendezvous.collective_timeout,
                store=rendezvous.store,
                rank=rendezvous.rank,
                world_size=rendezvous.size,
                timeout=rendezvous.init_timeout,
                **options,
            )
        set_default_group_timeout(rendezvous.collective_timeout)

    def _begin_group(self, size: int) -> bool:
        return self.sockets.begin_group(size)

    def _end_group(self) -> None:
        self.sockets.end_group()

    def subgroup(self, ranks: tuple[int, ...]) -> Any:
        """Return a Gloo group. With NCCL, too: only CPU tensors are sent in it."""
        assert self._rendezvous is not None, "there is a generation"
        return self._gloo.subgroup(self._rendezvous, ranks)

    def retire(self) -> Callable[[], None]:
        """See contexts.Context. Gloo closes one connection after another, and waits up to 10 ms for each."""
        self._gloo.be_quiet()
        groups = [*self._groups.retire(), *self._gloo.take()]
        self._rendezvous = None
        self.sockets.forget()
        return groups.clear

    def destroy(self, by_plan: bool = False) -> None:
        self._gloo.be_quiet()
        self._gloo.take()
        self._rendezvous = None
        self._groups.destroy()
        self.sockets.forget()

    def has_failed(self) -> bool:
        return self.sockets.failed()

    def may_have_failed(self) -> bool:
        return self.sockets.failed() or (not self._counts_failures and self.sockets.lost())

    def classify(self, error: BaseException) -> Fault:
        return Fault.GENERATION if isinstance(error, dist.DistError) else Fault.UNKNOWN

    # ------------------------------------------------------------------------------------------------------- any thread

    def sever(self) -> None:
        self.sockets.sever()

    def broken(self) -> bool:
        """Return True if a pair in one of the groups has lost its connection, or this process has cut all of them."""
        return self.sockets.broken()
