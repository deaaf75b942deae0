"""Notice that this host is to be left: by a signal to its agent, or by a command that is asked again and again."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterable, Mapping

from elasticstate.config import inherited_environment, socket_variable
from elasticstate.net import messages
from elasticstate.net.launch import Launch
from elasticstate.processes import Answer, ask, signal_name

HOST_VARIABLE = "ELASTICSTATE_HOST"
"""In which the command finds the name of the host."""
_LONGEST_REASON = 200
_NOTICE, _NO_NOTICE = 0, 1  # exit codes of the command


class Preemption:
    """From the first notice on, nobody is asked any more. The driver is told of it, once it knows this agent."""

    def __init__(self, send: Callable[[messages.AgentNotice | messages.AgentWarning], None]) -> None:
        """SIGTERM is a notice, as long as the job has not said what else is one."""
        self._send = send
        self._reason = ""  # who gave notice, and why
        self._has_begun = False
        self._warned: set[str] = set()
        self._asking: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._listen([signal.SIGTERM])

    def begin(self, how: messages.Preemption, launch: Launch, socket_path: str) -> None:
        """The agent serves, and knows the job. A signal that is none of its notices has its usual effect."""
        self._has_begun = True
        self.tell()
        if signal.SIGTERM not in how.signals:
            self._loop.remove_signal_handler(signal.SIGTERM)
        self._listen(how.signals)
        if how.command is not None and not self._reason:
            environment = {**inherited_environment(), **dict(launch.environment), HOST_VARIABLE: launch.host}
            environment |= [socket_variable(socket_path)]  # marked: it is found and ended if this agent is killed
            self._asking = asyncio.ensure_future(self._ask(how.command, how, environment, launch.directory))

    def tell(self) -> None:
        """Tell the driver, if there was a notice: also one that may not have heard of it."""
        if self._has_begun and self._reason:
            self._send(messages.AgentNotice(self._reason))

    async def close(self) -> None:
        """Nobody is asked any more, and who was being asked has ended."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})

    def _listen(self, signals: Iterable[int]) -> None:
        for number in signals:
            self._loop.add_signal_handler(number, self._take, f"{signal_name(number)} to its agent")

    def _take(self, reason: str) -> None:
        if not self._reason:
            self._reason = reason
            if self._asking is not None:
                self._asking.cancel()
            self.tell()

    async def _ask(
        self, command: str, how: messages.Preemption, environment: Mapping[str, str], directory: str
    ) -> None:
        while True:
            try:
                answer = await ask(command, how.timeout_s, environment, directory)
            except TimeoutError:
                fault = f"took longer than --preemption-timeout of {how.timeout_s:g} s"
            except (OSError, ValueError) as error:
                fault = f"cannot be run: {error}"
            else:
                if answer.exit_code == _NOTICE:
                    self._take(_first_line(answer.stdout) or f"{command} exited with 0")
                    return
                fault = "" if answer.exit_code == _NO_NOTICE else _how(answer)
            if fault:
                self._warn_once(command, fault, how.interval_s)
            await asyncio.sleep(how.interval_s)

    def _warn_once(self, command: str, fault: str, interval_s: float) -> None:
        kind = fault.partition(":")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            self._send(
                messages.AgentWarning(
                    f"--preemption-command {command!r} {fault}; it is asked again every {interval_s:g} s"
                )
            )


def _first_line(text: str) -> str:
    line = text.lstrip().partition("\n")[0].strip()
    return "".join(c if c.isprintable() else "?" for c in line[:_LONGEST_REASON])


def _how(answer: Answer) -> str:
    code = answer.exit_code
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with {code}"
    last_line = answer.stderr.rstrip().rpartition("\n")[2]
    return f"{how}: {_first_line(last_line) or 'without a word on stderr'}"
