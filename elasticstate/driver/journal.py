"""Journal: the events of a job, as they go to the event file and the log."""

from __future__ import annotations

from typing import Any

from elasticstate.core.types import WorkerId
from elasticstate.driver.job_state import JobState
from elasticstate.driver.report import Report
from elasticstate.net.messages import Exited


class Journal:
    """Writer of events, with the facts that the core does not keep: process ids, and the errors that ended workers."""

    def __init__(self, report: Report, state: JobState) -> None:
        self._report = report
        self._state = state
        self._agents: dict[str, int | None] = {}  # process ids, by host
        self._workers: dict[str, int] = {}  # process ids, by the names of workers in the event file
        self._exits: dict[str, Exited] = {}  # of workers whose exit the core has not reported yet

    def agent_joined(self, host: str, pid: int | None) -> None:
        self._agents[host] = pid

    def worker_lives(self, worker: WorkerId, pid: int) -> None:
        self._workers[str(worker)] = pid

    def worker_exited(self, exited: Exited) -> None:
        self._workers[str(exited.worker)], self._exits[str(exited.worker)] = exited.pid, exited

    def core_event(self, name: str, fields: dict[str, Any]) -> None:
        """Write an event of the core, with the time of the core's last step."""
        if name == "agent_joined":
            fields["pid"] = self._agents.get(fields["host"])
        elif name == "worker_exited":
            exited = self._exits.pop(fields["worker"], None)
            fields["pid"] = self._workers.pop(fields["worker"], None)
            fields["error"], fields["time_ns"] = (exited.error, exited.time_ns) if exited is not None else ("", 0)
        self._report.event(name, fields, self._state.stepped_at)

    def event(self, name: str, **fields: object) -> None:
        """Write an event of the driver."""
        self._report.event(name, {"generation": self._state.membership.generation, **fields})

    def warn(self, text: str) -> None:
        self.event("warning", text=text)

    def agent_warning(self, host: str, text: str) -> None:
        """Write a warning of an agent, unless another agent has sent the same one."""
        self._report.warn_once(host, text, self._state.membership.generation)
