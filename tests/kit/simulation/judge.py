"""Properties of a whole job, checked from the outside: commits, results, and the reports the core received of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticstate.core import types as t
from elasticstate.core.reattach import Remains
from elasticstate.core.state import Waiting
from elasticstate.core.step import Transition

if TYPE_CHECKING:
    from tests.kit.simulation.job import Job


class Judge:
    """Judge of one job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.reported: dict[
            t.SlotId, t.CommitId
        ] = {}  # retained commits that the core has received and that still exist
        self.waits_since: float | None = None  # since when the core waits for a retained commit
        self.given_up = t.CommitId(0, 0)  # commits up to this one may be lost

    def see(self, transition: Transition) -> None:
        """Record a transition of the core."""
        phase, reason = transition.next.phase, transition.reason
        self.job.reached["retained commit awaited"] += "which retains the newest commit" in reason
        self.job.reached["lease waited for"] += "until the workers on unreachable hosts have stopped" in reason
        self.job.reached["state on unreachable hosts"] += "may hold the only commits" in reason
        waits = isinstance(phase, Waiting) and phase.retained_since is not None
        if not waits and self.job.end is None:
            self.waits_since = None
        elif waits and self.waits_since is None:
            self.waits_since = self.job.now

    def restart(self, remains: Remains) -> None:
        """Start again with a new core, which has received no event yet. It knows who was in the newest world, so it
        counts with the commits of members that it does not reach."""
        members = [placement.worker for placement in remains.world.members] if remains.world is not None else []
        away = {worker.slot_id for worker in members if worker.host in remains.lost}
        held = {slot_id: retained.commit for slot_id, retained in self.job.retained.items() if slot_id in away}
        self.reported = {slot_id: commit[0] for slot_id, commit in held.items() if commit is not None}
        self.waits_since = None

    def forget(self, host: str) -> None:
        """Forget the retained commits of this host."""
        self.reported = {slot_id: commit for slot_id, commit in self.reported.items() if slot_id.host != host}

    def record(self, event: t.Event) -> None:
        """Record an event that the core receives."""
        match event:
            case t.FromWorker(worker, t.Stamp(commit=commit) | t.CommitSealed(commit) | t.Ready(commit=commit)):
                known = self.job.m.workers.get(worker) is not None
                if known and commit is not None and worker.slot_id in self.job.retained:
                    self.reported[worker.slot_id] = commit
            case t.AgentJoined(host, commits):
                self.forget(host)
                self.reported.update((t.SlotId(host, slot), commit) for slot, commit in commits)

    def _has_waited(self) -> bool:
        """Return True if the core has waited for a retained commit for the regroup time-out."""
        limit_s = self.job.policy.regroup_timeout_s
        return self.waits_since is not None and self.job.now >= self.waits_since + limit_s

    def nothing_made_is_lost(self, world: t.World) -> None:
        """Check I3: a commit that all members of a generation have sealed is in the next world, if a slot still holds
        the commit and the core has received a report of it, unless the core has waited for the regroup time-out."""
        made = max(
            (c for g, group in self.job.groups.items() if g < world.generation and (c := group.made())), default=None
        )
        root = world.members[world.root].worker
        if root not in self.job.workers or self.job.workers[root].exit is not None:
            return  # the root has died, and the core cannot know it yet
        held = self.job.retained[root.slot_id].commit
        if made is None or made <= self.given_up or (held is not None and held[0] >= made):
            self.job.reached["nothing lost"] += made is not None
            return
        holders = [
            slot_id
            for slot_id, commit in self.reported.items()
            if commit >= made
            and (m := self.job.retained[slot_id].commit)
            and m[0] >= made
            and not self.job.m.hosts[slot_id.host].draining
        ]
        assert not holders or self._has_waited(), f"a commit of all is lost: {made}, retained by {holders}"
        self.given_up = max(self.given_up, made)
        self.job.reached["given up"] += bool(holders)

    def draining_worker_holds_nothing_back(self, draining_worker: t.WorkerId) -> None:
        """Check I15: a draining worker that leaves has no commit newer than the commits of the staying workers."""
        worker = self.job.workers.get(draining_worker)
        stay = [
            w for w in self.job.workers.values() if w.id != draining_worker and w.exit is None and not w.sentinel.leave
        ]
        if worker is not None and 0 < worker.sentinel.generation < self.job.m.generation:
            return  # unreachable when a newer world was made: commits of this worker alone do not count any more
        if worker is None or worker.commit is None or self.job.exits or self.job.lost or self.job.partition.cuts:
            return  # no commit, or a death that the core cannot know of yet
        if self.job.m.ledger.links.cut:
            return  # it may be the only one behind a cut link
        held = [w.commit[0] for w in stay if w.commit is not None]
        if held:
            assert max(held) >= worker.commit[0], "I15: the drained worker takes a commit with it"
            self.job.reached["I15"] += 1

    def end(self, end: t.EndJob) -> None:
        """Check I11, equal results, and I3: the core reports a lost state only if no commit is left."""
        job = self.job
        if end.succeeded:
            contents = {worker.content for worker in job.workers.values() if worker.passed_gate}
            assert len(contents) <= 1, f"I11: different results {contents}"
            assert all(content.batches == job.script.batches for content in contents)
            return
        assert end.root_cause is not None
        reason = end.root_cause.reason
        if "StateLostError" in reason:
            holders = [w.id for w in job.workers.values() if w.exit is None and not w.frozen and w.commit is not None]
            away = [worker for worker in holders if worker.host in job.partition]
            members = [placement.worker for placement in job.m.world.members] if job.m.world is not None else []
            assert not set(away).intersection(members), f"{reason}; but with {away}, which are unreachable"
            holders = [worker for worker in holders if worker not in away]
            assert all(worker in job.m.workers and job.m.workers[worker].gone for worker in holders), reason
            left = [
                slot_id
                for slot_id in self.reported
                if job.retained[slot_id].commit and not job.m.hosts[slot_id.host].draining
            ]
            assert not left or self._has_waited(), f"{reason}; but retained by {left}"
