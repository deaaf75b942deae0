"""Lock on a host: an agent takes it after the job's earlier agent on this host is gone."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from elasticstate.agent.driver_connection import DriverConnection
from elasticstate.agent.stale_files import keep_s
from elasticstate.commits import CommitDirectory
from elasticstate.net import messages

_LOOK_INTERVAL_S = 0.01


async def lock_host(
    spec: messages.JobSpec, host: str, job_directory: str, mark: str, driver: DriverConnection
) -> CommitDirectory:
    """Return the commits of this host, including those that exist already.

    An earlier agent has ``--heartbeat-timeout`` to end; then it is killed with its workers. If the earlier agent
    reconnects before that, the driver refuses the new agent, and the new agent does not touch the earlier one.

    Raises OSError (TimeoutError: the earlier agent did not end).
    """
    refused = threading.Event()
    locking = asyncio.get_running_loop().run_in_executor(
        None,
        lambda: CommitDirectory(
            spec.options.commit_dir,
            spec.job_id,
            host,
            job_directory,
            mark,
            spec.options.heartbeat_timeout_s,
            keep_s(spec.options.driver_timeout_s),
            lambda: refused.wait(_LOOK_INTERVAL_S),
        ),
    )
    driver_loss = asyncio.ensure_future(driver.lost())
    both: set[asyncio.Future[Any]] = {locking, driver_loss}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    refused.set()
    driver_loss.cancel()
    await asyncio.wait(both)
    return locking.result()
