"""The copies of an agent's host (copies/service.py), with callbacks on the agent's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from elasticstate.agent.host_storage import HostStorage
from elasticstate.copies.library import Notify, NotifyDropped
from elasticstate.copies.service import HostCopies


def open_copies(
    storage: HostStorage,
    job_id: str,
    host: str,
    key: bytes,
    address: str,
    timeout_s: float,
    rate_bytes_per_s: int | None,
    on_kept: Notify,
    on_dropped: NotifyDropped,
    on_damaged: Notify,
    log: Callable[[str], None],
) -> HostCopies:
    """Adopt the copies that this host keeps, and serve them at ``address``, at any port. Raises OSError.

    Call it on the event loop: the callbacks run there.
    """
    loop = asyncio.get_running_loop()

    def on_loop(callback: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(partial(callback, *arguments))

        return call

    copies = HostCopies(
        host=host,
        job_id=job_id,
        key=key,
        directory=storage.directory.fd,
        slots=storage.slots(),
        timeout_s=timeout_s,
        on_kept=on_loop(on_kept),
        on_dropped=on_loop(on_dropped),
        on_damaged=on_loop(on_damaged),
        log=on_loop(log),
        rate_bytes_per_s=rate_bytes_per_s,
    )
    try:
        copies.start(address)
    except BaseException:
        copies.close()
        raise
    return copies
