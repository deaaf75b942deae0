"""From one generation to the next: say READY, get a world, make its process group; and leave it again."""

from __future__ import annotations

import gc
import time
import traceback
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from elasticstate.config import WorkerEnvironment
from elasticstate.net import messages
from elasticstate.net.runs import from_runs
from elasticstate.worker import world
from elasticstate.worker.contexts.context import Backend, Context, Rendezvous
from elasticstate.worker.sentinel import Sentinel

_SLICE = timedelta(seconds=0.25)


class Regrouper:
    """Takes one worker from world to world. Used on the main thread only."""

    def __init__(self, environment: WorkerEnvironment, sentinel: Sentinel, backend: Backend) -> None:
        self._environment = environment
        self._sentinel = sentinel
        self._backend = backend
        self._context = backend.context()
        self._server: TCPStore | None = None  # of this worker; rank 0's is used by all
        self._store: Store | None = None

    @property
    def context(self) -> Context:
        return self._context

    def enter(self) -> world.WorldView:
        """READY → WORLD → process group. Raises what torch raises, or CollectiveError, when the generation fails."""
        if self._server is None:
            self._server = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        message = self._sentinel.ready(f"{self._environment.local_address}:{self._server.port}")
        self._context = self._backend.context()
        self._sentinel.enter(message, self._context)
        self._sentinel.check()
        view = _view(message)
        world.enter(view)
        store = self._connect(view, message)
        self._sentinel.check()
        name = f"{message.job}/{message.generation}"
        self._context.create(
            Rendezvous(
                store=PrefixStore(name, store),
                name=name,
                worker=str(self._environment.worker),
                rank=view.rank,
                size=view.size,
                init_timeout=timedelta(seconds=min(message.regroup_timeout_s, message.collective_timeout_s)),
                collective_timeout=timedelta(seconds=message.collective_timeout_s),
                check=self._sentinel.check,
            )
        )
        self._sentinel.check()
        return view

    def leave(self) -> None:
        """Take the generation's groups and store down; afterwards nothing of it is left in this process."""
        self._context.destroy()
        if isinstance(self._store, TCPStore) and self._store is self._server:
            self._server = None  # used: its keys go with it
        self._store = None
        self._sentinel.left()
        gc.collect()

    def _connect(self, view: world.WorldView, message: messages.WorldMessage) -> TCPStore:
        """The store of rank 0, asked for in slices: between two of them the end of the generation is looked at."""
        self._context.watch_store(store_address(view))
        if view.rank == 0:
            assert self._server is not None
            self._store = self._server
            return self._server
        deadline = time.monotonic() + message.regroup_timeout_s
        while True:
            try:
                store = TCPStore(
                    view.store_host, view.store_port, is_master=False, wait_for_workers=False, timeout=_SLICE
                )
            except RuntimeError:
                self._sentinel.check()
                if time.monotonic() >= deadline:
                    raise
                continue
            store.set_timeout(timedelta(seconds=message.regroup_timeout_s))
            self._store = store
            return store


def store_address(view: world.WorldView) -> tuple[str, int]:
    """Where this worker's connection to the store ends: rank 0's own is the one that TCPStore makes to its server, at
    0.0.0.0, which is the loopback interface."""
    return ("127.0.0.1" if view.rank == 0 else view.store_host), view.store_port


def _view(message: messages.WorldMessage) -> world.WorldView:
    host, port = message.store.rsplit(":", 1)
    return world.WorldView(
        message.generation,
        message.placement,
        message.size,
        message.root,
        from_runs(message.lacking),
        host,
        int(port),
        message.verify_sync,
        message.fresh,
    )


def let_go(error: BaseException) -> None:
    """Drop all that an exception keeps alive: the frames of its whole chain, and what hangs on it.

    ``clear_frames`` of the outermost traceback is not enough: ``raise X from e`` keeps e's frames, and with them the
    DDP wrapper, its buckets and the dead process group.
    """
    for link in chain(error):
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
        link.__cause__ = link.__context__ = None
        link.__dict__.clear()


def chain(error: BaseException) -> list[BaseException]:
    """The exception, its causes and contexts, and theirs."""
    found: list[BaseException] = []
    ahead: list[BaseException | None] = [error]
    while ahead:
        link = ahead.pop()
        if link is None or any(link is known for known in found):
            continue
        found.append(link)
        ahead += [link.__cause__, link.__context__]
        ahead += getattr(link, "exceptions", ())  # of an ExceptionGroup
    return found
