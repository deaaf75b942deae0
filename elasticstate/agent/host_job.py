"""HostJob: the facts that all parts of an agent share, once the agent has found the driver of its job."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

from elasticstate.agent.connection import DriverConnection
from elasticstate.agent.files import JobPlace, keep_s
from elasticstate.agent.worker import WorkerHandle, environment_of_workers
from elasticstate.agent.worker_output import Outputs
from elasticstate.commits import CommitDirectory
from elasticstate.core.ids import WorkerId
from elasticstate.net.messages import AgentWarning, JobSpec, Launch
from elasticstate.net.names import is_loopback, outward_address
from elasticstate.net.trust import storage_key
from elasticstate.options import Options, agent_variable
from elasticstate.options.kinds import split_address

_LOOK_INTERVAL_S = 0.01


class HostJob:
    """One job on one host."""

    def __init__(
        self,
        launch: Launch,
        spec: JobSpec,
        driver: DriverConnection,
        place: JobPlace,
        outputs: Outputs,
        handles: dict[WorkerId, WorkerHandle],
    ) -> None:
        """``handles``: the living workers; only ``Workers`` changes it."""
        self.launch = launch
        self.spec = spec
        self.driver = driver
        self.place = place
        self.outputs = outputs
        self.handles = handles
        self.local_address = launch.local_address or _seen_at(driver.local_address, spec.options)
        """Address at which other hosts reach this one."""
        self.key = storage_key(launch.token, spec.job_id)
        self._tasks: set[asyncio.Task[object]] = set()

    @property
    def options(self) -> Options:
        return self.spec.options

    def log(self, text: str) -> None:
        """Write a line to the agent's stderr."""
        self.outputs.complain(text)

    def warn(self, text: str) -> None:
        """Show a warning to the user, at the driver."""
        self.driver.send(AgentWarning(text))

    def begin(self, work: Coroutine[Any, Any, object]) -> None:
        """Start a task that nothing waits for. asyncio itself keeps only weak references to tasks."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def environment(self) -> dict[str, str]:
        """Return the environment of the workers, with the mark of this agent."""
        name, mark = agent_variable(self.place.mark)
        return {**environment_of_workers(self.launch.environment, self.spec.environment), name: mark}

    async def lock_host(self) -> CommitDirectory:
        """Return the commits of this host, with those that exist already, once the job's earlier agent here is gone.

        An earlier agent has ``--heartbeat-timeout`` to end; then it is killed with its workers. If the earlier agent
        reconnects before that, the driver refuses the new agent, and the new agent does not touch the earlier one.

        Raises OSError (TimeoutError: the earlier agent did not end).
        """
        refused = threading.Event()
        locking = asyncio.get_running_loop().run_in_executor(
            None,
            lambda: CommitDirectory(
                self.options.commit_dir,
                self.spec.job_id,
                self.launch.host,
                self.place.path,
                self.place.mark,
                self.options.heartbeat_timeout_s,
                keep_s(self.options.driver_timeout_s),
                lambda: refused.wait(_LOOK_INTERVAL_S),
            ),
        )
        driver_loss = asyncio.ensure_future(self.driver.lost())
        both: set[asyncio.Future[Any]] = {locking, driver_loss}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        refused.set()
        driver_loss.cancel()
        await asyncio.wait(both)
        return locking.result()


def _seen_at(address: str, options: Options) -> str:
    """Return the address at which other hosts reach this one. ``address``: that of its connection to the driver.

    An agent on the driver's host may dial in over the loopback interface, while other hosts cannot.
    """
    if options.listen is None or not is_loopback(address):
        return address
    listens_at, _ = split_address(options.listen)
    return address if is_loopback(listens_at) else outward_address() or address
