"""Service: an agent's service for its driver, and its behaviour without one."""

from __future__ import annotations

import asyncio
import signal
from typing import NamedTuple

from elasticstate.agent.driver_connection import DriverConnection
from elasticstate.agent.driver_messages import DriverMessages
from elasticstate.agent.host_report import HostReporter
from elasticstate.agent.job_place import JobPlace
from elasticstate.agent.output import Outputs
from elasticstate.agent.preemption import PreemptionWatch
from elasticstate.agent.supervisor import Supervisor
from elasticstate.agent.workers import Workers
from elasticstate.net.control import Refused
from elasticstate.net.messages import Shutdown
from elasticstate.threads import in_thread


class ServiceEnd(NamedTuple):
    """End of an agent's service. ``keeps_commits``: the commits stay for the next agent of this host."""

    status: int
    keeps_commits: bool = False


class Service:
    """The phases *serve* and *orphan* of an agent (see agent.py)."""

    def __init__(
        self,
        driver: DriverConnection,
        driver_timeout_s: float,
        messages: DriverMessages,
        workers: Workers,
        supervisor: Supervisor,
        reporter: HostReporter,
        preemption: PreemptionWatch,
        outputs: Outputs,
        place: JobPlace,
        killed: asyncio.Event,
    ) -> None:
        """``killed``: set when the user wants this agent to end at once."""
        self._driver = driver
        self._driver_timeout_s = driver_timeout_s
        self._messages = messages
        self._workers = workers
        self._supervisor = supervisor
        self._reporter = reporter
        self._preemption = preemption
        self._outputs = outputs
        self._place = place
        self._killed = killed

    async def run(self) -> ServiceEnd:
        """Serve until the driver sends Shutdown, refuses this agent, or is away for too long, or the user ends it.

        In the last case the commits stay, as those of an agent that is killed: other hosts may have none as new.
        """
        serving, killed = asyncio.ensure_future(self._serve_drivers()), asyncio.ensure_future(self._killed.wait())
        await asyncio.wait({serving, killed}, return_when=asyncio.FIRST_COMPLETED)
        killed.cancel()
        if serving.done():
            return serving.result()
        serving.cancel()
        await asyncio.wait({serving})
        await self._workers.stop_all(kill=True)
        return ServiceEnd(128 + signal.SIGINT, keeps_commits=True)

    async def _serve_drivers(self) -> ServiceEnd:
        end = None
        while end is None:
            try:
                await self._serve()
            except ConnectionError as error:  # noqa: PERF203
                self._outputs.complain(f"lost the driver: {error}")
                self._messages.release_hold()
                end = await self._reconnect()
            else:
                return ServiceEnd(0)
        return end

    async def _serve(self) -> None:
        """Carry out the driver's messages until Shutdown; then stop the workers.

        Raises ConnectionError when the driver is lost.
        """
        while not isinstance(message := await self._driver.receive(), Shutdown):
            self._messages.carry_out(message)
        await self._workers.stop_all()

    async def _reconnect(self) -> ServiceEnd | None:
        """Let training continue while the agent reconnects to a driver. Return None when connected.

        An agent without workers waits as well: the next driver may need its retained commits and exit reports.
        """
        try:
            await self._driver.establish(self._driver_timeout_s)
        except Refused as refusal:
            self._outputs.complain(f"stopping the workers: {refusal}")
            await self._workers.stop_all()
            return ServiceEnd(1, keeps_commits=not refusal.is_stopped)
        except ConnectionError as error:
            self._outputs.complain(
                f"stopping the workers: no driver within --driver-timeout of {self._driver_timeout_s:g} s ({error})"
            )
            await self._workers.stop_all()
            await in_thread(self._place.remove_job)
            return ServiceEnd(1)
        await self._workers.all_started()
        self.send_host_report()
        self._preemption.report()
        self._outputs.report_again()
        self._supervisor.send_stamps()  # the lease is renewed before the driver publishes a new world
        return None

    def send_host_report(self) -> None:
        """Send the first message to a driver that has accepted this agent."""
        now = asyncio.get_running_loop().time()
        self._driver.send(self._reporter.host_report(self._workers.handles, now))
