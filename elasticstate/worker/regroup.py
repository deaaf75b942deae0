"""Regroup: send READY, receive a world, create its process group, and leave it at the end of the generation."""

from __future__ import annotations

import gc
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta

from elasticstate import present_world
from elasticstate.compat import aliases
from elasticstate.compat.stores import PrefixStore, Store, TCPStore
from elasticstate.error_chain import error_chain
from elasticstate.errors import CollectiveError
from elasticstate.net import messages
from elasticstate.net.runs import from_runs
from elasticstate.options import WorkerEnvironment
from elasticstate.worker.contexts import addresses
from elasticstate.worker.contexts.context import Backend, Context, Rendezvous
from elasticstate.worker.sentinel import Sentinel

_SLICE = timedelta(seconds=0.25)


class Regrouper:
    """Transitions of one worker from world to world. Used on the main thread only."""

    def __init__(self, environment: WorkerEnvironment, sentinel: Sentinel, backend: Backend) -> None:
        self._environment = environment
        self._sentinel = sentinel
        self._backend = backend
        self._context = backend.context()
        self._server: TCPStore | None = None  # this worker's own; all members use the one of rank 0
        self._store: Store | None = None
        self._rendezvous: Rendezvous | None = None
        self._retiring: threading.Thread | None = None  # destroys the groups of the last generation

    @property
    def context(self) -> Context:
        return self._context

    def enter(
        self,
        behind: bool = False,
        names: int = 0,
        has_shards: bool = False,
        prepare: Callable[[present_world.WorldView], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> present_world.WorldView:
        """Enter the next world: READY → WORLD → process group.

        Raises torch's errors, or CollectiveError, when the generation fails.

        ``behind``: this worker ended ticks without training in the last generation. ``names`` and ``has_shards``: see
        messages.Ready. ``prepare`` is called with the world before its process group is created, ``meanwhile`` after
        READY, while the other members may still leave the last world.
        """
        if self._server is None:
            self._server = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        address = f"{self._environment.local_address}:{self._server.port}"
        message = self._sentinel.ready(address, behind, names, has_shards, meanwhile)
        self._context = self._backend.context()
        self._sentinel.enter(message, self._context)
        self._sentinel.check()
        view = _view(message)
        present_world.enter(view)
        if prepare is not None:
            prepare(view)
        store = self._connect(view, message)
        self._sentinel.check()
        name = f"{message.job}/{message.generation}"
        self._rendezvous = Rendezvous(
            store=PrefixStore(name, store),
            name=name,
            worker=str(self._environment.worker),
            rank=view.rank,
            size=view.size,
            init_timeout=timedelta(seconds=min(message.regroup_timeout_s, message.collective_timeout_s)),
            collective_timeout=timedelta(seconds=message.collective_timeout_s),
            check=self._sentinel.check,
            address=self._environment.local_address,
        )
        self._context.create(self._rendezvous)
        self._sentinel.check()
        self._sentinel.formed()
        return view

    def cause_of(self, error: str) -> str:
        """Return the text of the error of another member that has caused this one, if it is known; else ``error``."""
        if self._rendezvous is None or self._sentinel.trains:
            return error
        return addresses.cause_of(self._rendezvous, error) or error

    def leave(self, by_plan: bool = False, is_last: bool = False) -> None:
        """Destroy the generation's groups and store, so that nothing of the generation remains in this process.

        ``by_plan``: all members leave at the same tick. Then the groups are destroyed beside the next generation, until
        this worker leaves that one. ``is_last``: all members have passed the exit gate.
        """
        if self._retiring is not None:
            self._retiring.join()
            self._retiring = None
        aliases.release_works()
        if by_plan:
            # No daemon: the interpreter must not end while the thread is inside a destructor of torch.
            self._retiring = threading.Thread(target=self._context.retire(), name="elasticstate-retire", daemon=False)
            self._retiring.start()
        else:
            self._context.destroy(by_plan=is_last)
        if isinstance(self._store, TCPStore) and self._store is self._server:
            self._server = None  # its keys belong to this generation, so it cannot be used again
        self._store = self._rendezvous = None
        self._sentinel.leave()
        gc.collect()

    def _connect(self, view: present_world.WorldView, message: messages.WorldMessage) -> TCPStore:
        """Connect to the store of rank 0 in short attempts, and check between them whether the generation has ended."""
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
            except RuntimeError as error:
                self._sentinel.check()
                if time.monotonic() >= deadline:
                    raise CollectiveError(
                        f"{self._environment.worker} at {self._environment.local_address} cannot connect to rank 0 at "
                        f"{view.store_host}, port {view.store_port}, within --regroup-timeout of "
                        f"{message.regroup_timeout_s:g} s: {error}. {addresses.HOSTS}"
                    ) from None
                continue
            store.set_timeout(timedelta(seconds=message.regroup_timeout_s))
            self._store = store
            return store


def store_address(view: present_world.WorldView) -> tuple[str, int]:
    """Return the remote address of this worker's connection to the store.

    Rank 0 connects to its own server, which listens at 0.0.0.0, over the loopback interface, as TCPStore does.
    """
    return ("127.0.0.1" if view.rank == 0 else view.store_host), view.store_port


def _view(message: messages.WorldMessage) -> present_world.WorldView:
    host, port = message.store.rsplit(":", 1)
    return present_world.WorldView(
        message.generation,
        message.placement,
        message.size,
        message.root,
        from_runs(message.lacking),
        host,
        int(port),
        message.verify_sync,
        message.records_ticks,
        message.fresh,
        from_runs(message.near),
        message.root_slot,
        message.line,
        message.sources,
        message.durable,
        message.one_copy,
        message.follows,
        message.local_place,
    )


def release_exception(error: BaseException) -> None:
    """Release all objects that an exception keeps alive: the frames of its whole chain, and its attributes.

    ``clear_frames`` of the outermost traceback is not enough: ``raise X from e`` keeps e's frames. These keep the DDP
    wrapper, its buckets and the dead process group alive.
    """
    for link in error_chain(error):
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
        link.__cause__ = link.__context__ = None
        link.__dict__.clear()
