"""What must be true of a whole job, seen from above: commits, results, and what the core knows of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticstate.core import types as t
from elasticstate.core.membership import Transition
from elasticstate.core.records import Waiting

if TYPE_CHECKING:
    from tests.simulation.job import Job


class Judge:
    """Of one job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.heard: dict[t.SlotId, t.CommitId] = {}  # what the core has been told is in memory, and is still there
        self.waits_since: float | None = None  # for what is in memory
        self.given_up = t.CommitId(0, 0)  # what was made up to here may be lost

    def see(self, transition: Transition) -> None:
        """What the core has said."""
        phase, reason = transition.next.phase, transition.reason
        self.job.reached["memory awaited"] += "whose memory holds the newest commit" in reason
        self.job.reached["lease waited for"] += "out of reach, have given up" in reason
        self.job.reached["state out of reach"] += "may hold the only commits" in reason
        waits = isinstance(phase, Waiting) and phase.memory_since is not None
        if not waits and self.job.end is None:
            self.waits_since = None
        elif waits and self.waits_since is None:
            self.waits_since = self.job.now

    def restart(self) -> None:
        """Another core, which has been told nothing yet."""
        self.heard = {}
        self.waits_since = None

    def forget(self, host: str) -> None:
        """What was in memory on this host."""
        self.heard = {seat: commit for seat, commit in self.heard.items() if seat.host != host}

    def hear(self, event: t.Event) -> None:
        """What the core is told."""
        match event:
            case (
                t.Heartbeat(worker, commit=commit)
                | t.CommitSealed(worker, commit)
                | t.WorkerReady(worker, commit=commit)
            ):
                known = self.job.m.workers.get(worker) is not None
                if known and commit is not None and worker.seat in self.job.memory:
                    self.heard[worker.seat] = commit
            case t.AgentJoined(host, commits):
                self.forget(host)
                self.heard.update((t.SlotId(host, slot), commit) for slot, commit in commits)

    def _has_waited(self) -> bool:
        """Whether the core has waited for what is in memory as long as it must."""
        limit_s = self.job.policy.regroup_timeout_s
        return self.waits_since is not None and self.job.now >= self.waits_since + limit_s

    def nothing_made_is_lost(self, world: t.World) -> None:
        """I3: what all members of a generation have sealed is in the next world, if it is still in anybody's memory,
        and the core has heard of it; unless it was waited for, for the regroup time-out."""
        made = max(
            (c for g, group in self.job.groups.items() if g < world.generation and (c := group.made())), default=None
        )
        root = world.members[world.root].worker
        if root not in self.job.workers or self.job.workers[root].exit is not None:
            return  # it has died, and the core cannot know yet
        held = self.job.memory[root.seat].commit
        if made is None or made <= self.given_up or (held is not None and held[0] >= made):
            self.job.reached["nothing lost"] += made is not None
            return
        holders = [
            seat
            for seat, commit in self.heard.items()
            if commit >= made
            and (m := self.job.memory[seat].commit)
            and m[0] >= made
            and not self.job.m.hosts[seat.host].leaving
        ]
        assert not holders or self._has_waited(), f"a commit of all is lost: {made}, in the memory of {holders}"
        self.given_up = max(self.given_up, made)
        self.job.reached["given up"] += bool(holders)

    def leaver_holds_nothing_back(self, leaver: t.WorkerId) -> None:
        """I15: whoever leaves has no commit that is newer than what those who stay have."""
        worker = self.job.workers.get(leaver)
        stay = [w for w in self.job.workers.values() if w.id != leaver and w.exit is None and not w.sentinel.leave]
        if worker is not None and 0 < worker.sentinel.generation < self.job.m.generation:
            return  # it was out of reach when a newer world was made: what only it has was decided against
        if worker is None or worker.commit is None or self.job.exits or self.job.lost or self.job.reach.cuts:
            return  # or a death that the core cannot know of yet
        held = [w.commit[0] for w in stay if w.commit is not None]
        if held:
            assert max(held) >= worker.commit[0], "I15: the leaver takes a commit with it"
            self.job.reached["I15"] += 1

    def end(self, end: t.EndJob) -> None:
        """I11: equal results. I3: the state is lost only when it is."""
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
            away = [worker for worker in holders if worker.host in job.reach]
            members = [placement.worker for placement in job.m.world.members] if job.m.world is not None else []
            assert not set(away).intersection(members), f"{reason}; but with {away}, out of reach"
            holders = [worker for worker in holders if worker not in away]
            assert all(worker in job.m.workers and job.m.workers[worker].gone for worker in holders), reason
            left = [seat for seat in self.heard if job.memory[seat].commit and not job.m.hosts[seat.host].leaving]
            assert not left or self._has_waited(), f"{reason}; but in memory of {left}"
