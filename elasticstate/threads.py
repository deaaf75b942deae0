"""For event loops: threads for calls that may block (file system, resolver, kernel), and common times of looks."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from queue import SimpleQueue
from typing import TypeVar

from elasticstate.compat.libraries import start_thread

T = TypeVar("T")

_idle: list[SimpleQueue[Callable[[], None]]] = []  # one queue for each thread that waits for a call


async def in_thread(call: Callable[..., T], *arguments: object) -> T:
    """Run ``call(*arguments)`` in a thread; return its result or raise its error.

    Unlike with ``asyncio.to_thread``, neither the end of the event loop nor that of the process waits for the thread. A
    call that hangs delays only its caller: the next call gets another thread.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            value = call(*arguments)
        except BaseException as error:
            set_answer(lambda error=error: answer.set_exception(error))  # type: ignore[misc]
        else:
            set_answer(lambda: answer.set_result(value))

    def set_answer(setter: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: None if answer.done() else setter())

    try:
        _idle.pop().put(run)  # to a waiting thread, which on busy cores Linux runs before a new one
    except IndexError:
        start_thread(_serve, run)
    return await answer


@asynccontextmanager
async def scratch_directory(prefix: str, base: str | None) -> AsyncIterator[str]:
    """Make a directory in ``base``, and remove it in the end with all files. Raises OSError if it cannot be made."""
    path = await in_thread(lambda: tempfile.mkdtemp(prefix=prefix, dir=base))
    try:
        yield path
    finally:
        await in_thread(lambda: shutil.rmtree(path, ignore_errors=True))


async def next_beat(interval_s: float) -> None:
    """Sleep until the event loop's clock is at a multiple of the interval: at least half of it, so that no look comes
    twice. Looks that come together wake up the process only once."""
    wait_s = interval_s - asyncio.get_running_loop().time() % interval_s
    await asyncio.sleep(wait_s if wait_s >= interval_s / 2 else wait_s + interval_s)


def _serve(run: Callable[[], None]) -> None:
    calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
    while True:
        run()
        del run  # do not keep the objects that it refers to
        _idle.append(calls)
        run = calls.get()
