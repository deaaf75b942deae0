"""Gloo's threads rest before the last reference to a group is dropped, and before the interpreter ends.

When a collective has ended, the thread of the group that has run it still drops its tensors, for which it may need the
GIL. In torch 2.13 that goes wrong in two ways. The destructor of DDP's reducer waits for the threads of its group with
the GIL held, so both wait for ever. And while the interpreter finalizes, Python ends each other thread that asks for
the GIL: the process aborts, or waits for a lock that such a thread has held.

This module imports nothing of torch: ``watch_models`` works for a script that has not imported it yet, too.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from elasticstate._native import GlooSockets
from elasticstate.errors import UsageError

_DDP = "torch.nn.parallel.distributed"
_LONGEST_REST_S = 300.0  # until a collective ends that nobody has waited for
_PAUSES_S = (0.001, 0.05)

_are_watched = True


def rest(limit_s: float) -> bool:
    """Wait until no thread of a Gloo group runs a collective or cleans up. Return False if one does after this time."""
    deadline = time.monotonic() + limit_s
    pause_s, longest_s = _PAUSES_S
    while GlooSockets.busy():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, longest_s)
    return True


def watch_models() -> None:
    """Let the threads rest before a DistributedDataParallel is freed whose group is destroyed already."""
    if _DDP in sys.modules:
        _watch(sys.modules[_DDP])
    else:
        sys.meta_path.insert(0, _AfterImport())


def _watch(module: ModuleType) -> None:
    # torch has no public hook for the end of a group. This one is public, is called while a model is built, and never
    # while it trains.
    from torch.nn.modules.module import register_module_module_registration_hook

    ddp: type = module.DistributedDataParallel

    def registered(parent: Any, name: str, child: object) -> None:
        if name == "module" and isinstance(parent, ddp):
            if isinstance(child, ddp) and _is_lost(getattr(child, "process_group", None)):
                raise UsageError(
                    "DistributedDataParallel wraps one of a world that has ended, whose collectives fail. Keep the "
                    "module itself, and wrap it in each call of the function that is decorated with run: "
                    "ddp = DistributedDataParallel(model)."
                )
            weakref.finalize(parent, _before_drop, getattr(parent, "process_group", None)).atexit = False

    register_module_module_registration_hook(registered)


@contextmanager
def models_unwatched() -> Iterator[None]:
    """Free models at once within this context. The context of each world waits for the groups that it ends."""
    global _are_watched
    _are_watched = False
    try:
        yield
    finally:
        _are_watched = True


def _before_drop(group: Any) -> None:
    """Wait, if the model that is about to be freed has the last reference to its group."""
    if _are_watched and _is_lost(group):
        rest(_LONGEST_REST_S)


def _is_lost(group: Any) -> bool:
    """Return True if torch does not know the group, or does not know it any more."""
    from elasticstate.compat.process_groups import all_groups

    return group not in all_groups()


class _AfterImport:
    """Entry of ``sys.meta_path`` that calls ``_watch`` as soon as the module of DistributedDataParallel is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _DDP:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            execute = loader.exec_module

            def execute_and_watch(module: ModuleType) -> None:
                del loader.exec_module
                execute(module)
                _watch(module)

            loader.exec_module = execute_and_watch
        return spec
