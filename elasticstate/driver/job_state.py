"""JobState: the state of a job that the parts of its driver share."""

from __future__ import annotations

import time

from elasticstate.core import types as t
from elasticstate.core.line import is_sharded
from elasticstate.core.membership import new_membership, step
from elasticstate.core.policy import Policy
from elasticstate.core.reattach import reattach
from elasticstate.driver.copy_totals import CopyTotals
from elasticstate.driver.durable_figures import DurableFigures
from elasticstate.driver.reattach import Reattachment
from elasticstate.driver.report import Outcome


class JobState:
    """The core's state, why the core acts or waits, and the outcome of the job. Times: the event loop's clock."""

    def __init__(self, policy: Policy, now: float) -> None:
        self.membership = new_membership(policy, now)
        self.reason = ""
        self.outcome: Outcome | None = None  # None: the job is not over
        self.stopped: Outcome | None = None  # the outcome of a job that is being stopped
        self.commit_bytes = 0  # size of a commit of the largest worker; of shards, in the last world that reported it
        self._sized_in = 0  # the generation that reported it
        self.stores: dict[str, str] = {}  # by host: address of the store for the next world of plain workers
        self.copy_servers: dict[str, str] = {}  # by host: address of the copy server
        self.stepped_at = now
        self.committed_at: float | None = None  # when this driver received the newest commit
        self.durable = DurableFigures()
        self.copies = CopyTotals()
        self._policy = policy

    def step(self, event: t.Event, now: float) -> tuple[t.Effect, ...]:
        """Pass an event to the core. Return the effects."""
        self.stepped_at = now
        newest = self.membership.ledger.highest
        self.membership, effects, self.reason = step(self.membership, event, now)
        if self.membership.ledger.highest != newest:
            self.committed_at = now
        return effects

    def record_commit_size(self, size_bytes: int) -> None:
        """Record the size of a worker's commit. Each world has shards of another size."""
        if is_sharded(self.membership) and self._sized_in != self.membership.generation:
            self.commit_bytes = 0
        self._sized_in = self.membership.generation
        self.commit_bytes = max(self.commit_bytes, size_bytes)

    def size_for_newcomers(self) -> int:
        """Return the size of a commit in a world of all living workers, as far as it is known. Shards are taken to be
        distributed evenly."""
        m = self.membership
        if m.world is None or not is_sharded(m):
            return self.commit_bytes
        return -(-self.commit_bytes * m.world.size // max(m.world.size, sum(m.living.values())))

    def reattach(self, reattachment: Reattachment, now: float) -> tuple[t.Effect, ...]:
        """Let the core continue the job of an earlier driver. Return the effects."""
        self.stepped_at = now
        self.membership, effects, self.reason = reattach(self._policy, reattachment.remains((now, time.time())), now)
        return effects
