"""Taking a host: not before an agent of the job that was here before is gone."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from elasticstate.agent.contact import Contact
from elasticstate.agent.leftovers import keep_s
from elasticstate.commits import CommitDirectory
from elasticstate.net import messages

_LOOK_INTERVAL_S = 0.01


async def claim(
    spec: messages.JobSpec, host: str, job_directory: str, socket_path: str, driver: Contact
) -> CommitDirectory:
    """The commits of this host, those that are there already included.

    An agent that was here before is given ``--heartbeat-timeout`` to end, and is then killed with its workers. It may
    be in touch again before: then the driver refuses this one, which leaves it alone.

    Raises OSError (TimeoutError: the other one stays).
    """
    refused = threading.Event()
    claiming = asyncio.get_running_loop().run_in_executor(
        None,
        lambda: CommitDirectory(
            spec.commit_dir,
            spec.job_id,
            host,
            job_directory,
            socket_path,
            spec.heartbeat_timeout_s,
            keep_s(spec.driver_timeout_s),
            lambda: refused.wait(_LOOK_INTERVAL_S),
        ),
    )
    losing = asyncio.ensure_future(driver.lost())
    both: set[asyncio.Future[Any]] = {claiming, losing}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    refused.set()
    losing.cancel()
    await asyncio.wait(both)
    return claiming.result()
