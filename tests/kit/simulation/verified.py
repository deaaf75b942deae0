"""The event file of a simulated job, which ``elasticrun verify`` checks while it is written."""

from __future__ import annotations

from typing import Any

from elasticstate.core import types as t
from elasticstate.core.accounting import figures_of
from elasticstate.core.policy import Policy
from elasticstate.core.state import Membership
from elasticstate.history.event_files import Event
from elasticstate.history.verify import JobCheck


class Verified:
    """Writer of the events of one job. Raises AssertionError if a check of them does not hold."""

    def __init__(self, policy: Policy) -> None:
        self.lines: list[Event] = []
        self._check = JobCheck()
        self._epoch = 1
        sizes = {"np": policy.np, "min_np": policy.min_np, "max_np": policy.max_np, "np_multiple": policy.np_multiple}
        self._add("job_started", 0.0, 0, pid=1, command=["train"], **sizes)

    def see(self, now: float, effect: t.Effect, m: Membership) -> None:
        """Write the event of an effect that is carried out. ``m``: the state after the step."""
        if isinstance(effect, t.Note):
            fields = dict(effect.fields)
            self._add(effect.event, now, fields.pop("generation"), **fields)
        elif isinstance(effect, t.EndJob):
            status, figures = "succeeded" if effect.succeeded else "failed", figures_of(m, now).fields()
            self._add("generation_finished", now, m.generation, **m.ledger.account.until(now).fields())
            self._add("job_finished", now, m.generation, driver=self._epoch, status=status, **figures)

    def restarted(self, now: float, epoch: int, m: Membership) -> None:
        """Write that a new driver has reattached, in the state ``m``."""
        self._epoch = epoch
        self._add("driver_restarted", now, m.generation, epoch=epoch, back=[], lost=[])

    def memory_is_damaged(self) -> None:
        """Allow that a planned change loses a commit."""
        self._check._may_lose = True

    def _add(self, name: str, now: float, generation: object, **fields: Any) -> None:
        line = {"time": now, "event": name, "job": "job", "generation": generation, **fields}
        self.lines.append(Event(line, "", len(self.lines) + 1))
        self._check.add(self.lines[-1])
        if self._check.violations:
            story = "\n".join(str(dict(line)) for line in self.lines)
            raise AssertionError(f"{story}\n{self._check.violations}")
