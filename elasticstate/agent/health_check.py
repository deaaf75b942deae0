"""The health check of this host: a command that the driver asks for, beside the workers."""

from __future__ import annotations

import asyncio

from elasticstate.agent.host_job import HostJob
from elasticstate.failures import how_it_ended
from elasticstate.net import messages
from elasticstate.processes import CLEANUP_S, Answer, CommandTimedOut, as_command, ask, last_line, remedy_for


class HealthCheck:
    """Runs ``--health-check`` and reports the result, at most one at a time.

    The driver gets an answer even if the command cannot be killed, as one that waits for a driver of a broken device.
    """

    def __init__(self, job: HostJob) -> None:
        self._job = job
        self._reporting: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[Answer] | None = None  # may live on when its result has been reported

    def begin(self) -> None:
        """Run the check. If one runs, perhaps for the driver before, its result is the answer."""
        if self._reporting is None or self._reporting.done():
            self._reporting = asyncio.ensure_future(self._report())

    async def close(self) -> None:
        """Stop the command, and wait for its end if it can be killed."""
        running = {task for task in (self._reporting, self._asking) if task is not None and not task.done()}
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=CLEANUP_S)

    async def _report(self) -> None:
        command = self._job.options.health_check
        fault = "" if command is None else await self._fault_found_by(command)
        self._job.driver.send(messages.HealthChecked(self._job.launch.host, fault))

    async def _fault_found_by(self, command: str) -> str:
        """Return why the host is not well, or ""."""
        limit_s, directory = self._job.options.health_check_timeout_s, self._job.launch.directory
        if self._asking is not None and not self._asking.done():
            return "the command of the last check cannot be killed"
        run, environment = as_command(command, directory), self._job.environment_of_commands()
        asking = asyncio.ensure_future(ask(run, limit_s, environment, directory, whole_session=True, in_one=True))
        self._asking = asking
        await asyncio.wait({asking}, timeout=limit_s + CLEANUP_S)
        if not asking.done():
            asking.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody else reads it
            return f"took longer than {limit_s:g} s, and cannot be killed"
        try:
            code, output, _ = asking.result()
        except CommandTimedOut as error:
            line = last_line(error.answer.stdout)
            return f"took longer than {limit_s:g} s{line and ': '}{line}"
        except (OSError, ValueError) as error:
            remedy = remedy_for(command if "/" in command else f"./{command}", directory)
            return f"cannot be run: {error}{remedy and '. '}{remedy}"
        if code == 0:
            return ""
        line = last_line(output)
        return line if line and code > 0 else f"{how_it_ended(code)}{line and ': '}{line}"
