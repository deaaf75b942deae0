"""Preemption notices of this host: a signal to its agent, or a command that is run again and again."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterable

from elasticstate.agent.host_job import HostJob
from elasticstate.failures import how_it_ended, signal_name
from elasticstate.net import messages
from elasticstate.processes import Answer, as_command, ask, first_line, last_line, remedy_for

_NOTICE, _NO_NOTICE = 0, 1  # exit codes of the command


class PreemptionWatch:
    """Watches for a preemption notice. After the first notice the command is not run again.

    The driver receives the notice as soon as it has accepted this agent.
    """

    def __init__(self, job: HostJob) -> None:
        """Treat SIGTERM as a notice until ``begin``."""
        self._job = job
        self._reason = ""  # source and reason of the notice
        self._has_begun = False
        self._warned: set[str] = set()
        self._asking: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._listen([signal.SIGTERM])

    def begin(self) -> None:
        """Start to watch with the job's options. A signal that is not among them gets its usual effect back."""
        self._has_begun = True
        self.report()
        options = self._job.options
        if signal.SIGTERM not in options.preemption_signals:
            self._loop.remove_signal_handler(signal.SIGTERM)
        self._listen(options.preemption_signals)
        if options.preemption_command is not None and not self._reason:
            self._asking = asyncio.ensure_future(self._ask(options.preemption_command))

    def report(self) -> None:
        """Send the notice to the driver, if there was one; also to a driver that may not have received it."""
        if self._has_begun and self._reason:
            self._job.driver.send(messages.HostDraining(self._job.launch.host, self._reason))

    async def close(self) -> None:
        """Stop the command, and wait for its end."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})

    def _listen(self, signals: Iterable[int]) -> None:
        for number in signals:
            self._loop.add_signal_handler(number, self.signalled, number)

    def signalled(self, number: int) -> None:
        """Record a signal to this agent as the notice."""
        self._record(f"{signal_name(number)} to its agent")

    def _record(self, reason: str) -> None:
        if not self._reason:
            self._reason = reason
            if self._asking is not None:
                self._asking.cancel()
            self.report()

    async def _ask(self, command: str) -> None:
        options, directory = self._job.options, self._job.launch.directory
        environment = self._job.environment_of_commands()
        while True:
            try:
                answer = await ask(as_command(command, directory), options.preemption_timeout_s, environment, directory)
            except TimeoutError:
                fault = f"took longer than {options.preemption_timeout_s:g} s"
            except (OSError, ValueError) as error:
                remedy = remedy_for(command if "/" in command else f"./{command}", directory)
                fault = f"cannot be run: {error}{remedy and '. '}{remedy}"
            else:
                if answer.exit_code == _NOTICE:
                    self._record(first_line(answer.stdout) or f"{command} {how_it_ended(_NOTICE)}")
                    return
                fault = "" if answer.exit_code == _NO_NOTICE else _fault_of(answer)
            kind = fault.partition(":")[0]
            if fault and kind not in self._warned:
                self._warned.add(kind)
                again = f"it runs again every {options.preemption_interval_s:g} s"
                self._job.warn(f"--preemption-command {command!r} {fault}; {again}")
            await asyncio.sleep(options.preemption_interval_s)


def _fault_of(answer: Answer) -> str:
    return f"{how_it_ended(answer.exit_code)}: {last_line(answer.stderr) or 'nothing on stderr'}"
