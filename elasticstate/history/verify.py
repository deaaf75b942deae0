"""Checks of a job's events against the rules of the protocol, as far as the events show them.

Each check is one that no job can break without a fault of elasticstate. A driver that is killed may leave no events of
its last moments: then the worlds and figures are still checked, and workers and hosts from their next events on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, NamedTuple

from elasticstate.core import event_file
from elasticstate.core.ids import SlotId
from elasticstate.core.types import listed
from elasticstate.history.event_files import Event, runs_of
from elasticstate.history.job_history import placed, worker_id

Phase = Literal["started", "ready", "member", "unresponsive", "exited", "lost"]

# The driver writes these beside the steps of the core: they may name a generation shortly before its world_formed.
_BESIDES_STEPS = {"warning", "durable_copy", "replication", "output_blocked", "output_resumed", "sync", "record_kept"}
_ROUNDING_S = 1e-6  # of each time of an account
_CLOCK_S = 0.01  # by which times of the file may differ from those of the core


class Violation(NamedTuple):
    """A check that does not hold. ``text``: what is wrong, with the values."""

    line: int
    text: str


@dataclass(slots=True)
class JobCheck:
    """Checks of one run of a job. Call ``add`` for each event, then ``close``."""

    events: int = 0
    generation: int | None = None  # None: not known
    violations: list[Violation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # which events are missing
    failed: set[int] = field(default_factory=set)  # generations that did not end by plan
    # the job
    _line: int = 0
    _time: float = 0.0
    _epoch: int = 1
    _has_begun: bool = False  # there are all events of this driver
    _is_whole: bool = False  # there are all events of all drivers
    _is_finished: bool = False
    _dropped_bytes: int = 0
    _sizes: tuple[int, float, int] = (1, inf, 1)  # min_np, max_np and np_multiple
    _silent: set[int] = field(default_factory=set)  # generations whose end may have no event
    _accounts: dict[int, tuple[float, float]] = field(default_factory=dict)  # by generation: wall time and goodput
    _lost: Counter[str] = field(default_factory=Counter)  # commits and ticks
    _newest: dict[str, list[int]] = field(default_factory=dict)  # commits in durable copies and in replications
    # hosts and workers
    _agents: set[str] = field(default_factory=set)  # hosts with an agent
    _joined_at: dict[str, int] = field(default_factory=dict)  # the lines of the newest agents, by host
    _leaving: set[str] = field(default_factory=set)  # hosts that drain or were removed
    _cooldowns: dict[str, float] = field(default_factory=dict)  # the ends of cooldowns, by host
    _phases: dict[str, Phase] = field(default_factory=dict)  # by worker
    _slots: dict[tuple[str, int], str] = field(default_factory=dict)  # the newest worker of each slot
    _lost_at: dict[str, int] = field(default_factory=dict)  # the lines of workers that may live on
    _ranks: dict[str, int] = field(default_factory=dict)  # of workers in their newest world
    _doubts: list[Violation] = field(default_factory=list)  # starts that drains of members may explain
    # the newest world
    _members: set[str] | None = None  # None: not known
    _ages: dict[str, int] | None = None  # of members; None: not known
    _trains: bool = False  # this driver has formed the world, and not ended it
    _is_held: bool = False
    _drains: bool = False  # a member, by the cause of the newest hold
    _ends: list[int | str] = field(default_factory=list)  # by this driver
    _has_resumed: bool = False  # training
    _heirs: dict[SlotId, int] = field(default_factory=dict)  # ages that the next workers of these slots get
    _diverged: set[int] = field(default_factory=set)  # generations whose divergence this driver has found
    _may_lose: bool = True  # not all was planned since training was resumed

    def add(self, e: Event) -> None:
        """Check an event."""
        name, generation = e["event"], e["generation"]
        self.events, self._line = self.events + 1, e.line
        self._expect(not self._is_finished, f"{name} after job_finished")
        if e["time"] < self._time - _CLOCK_S:
            self._cooldowns.clear()  # the clock was set back
        self._time = e["time"]
        if name not in _BESIDES_STEPS and name != "driver_restarted":
            expected = generation if self.generation is None else self.generation + (name == "world_formed")
            self._expect(generation == expected, f"{name} of generation {generation}, and not {expected}")
        if self.generation is None and name not in _BESIDES_STEPS:
            self._silent.update(range(1, generation + 1))
        handler: Callable[[Any], None] | None = getattr(self, f"on_{name}", None)
        if handler is not None:
            handler(e)
        if name not in _BESIDES_STEPS:
            self.generation = generation

    def close(self) -> None:
        """End the checks: the file has no further event of this run."""
        if not self._is_finished:
            self.notes.append("no job_finished: the job still runs, or its driver was killed")
        if self._dropped_bytes:
            self.violations.clear()
            self.notes.append(f"not checked: {self._dropped_bytes} bytes of events were dropped")

    def _expect(self, holds: bool, text: str) -> None:
        if not holds:
            self.violations.append(Violation(self._line, text))

    # --------------------------------------------------------------------------------------------------- the job

    def on_job_started(self, e: event_file.JobStarted) -> None:
        self._has_begun, self._is_whole, self._may_lose = True, True, False
        self._members, self._ages = set(), {}
        self._sizes = e["min_np"], inf if e["max_np"] is None else e["max_np"], e["np_multiple"]

    def on_driver_restarted(self, e: event_file.DriverRestarted) -> None:
        """Keep what every driver knows: the worlds and the figures. The options may be others now."""
        epoch, generation = e["epoch"], e["generation"]
        known = generation if self.generation is None else self.generation
        self._expect(epoch > self._epoch, f"driver {epoch} after driver {self._epoch}")
        self._expect(generation >= known, f"driver {epoch} is in generation {generation}, after {known}")
        if generation > known:
            self.notes.append(f"no world_formed of generation {generation}: a driver was killed")
            self._members = None
        self._silent.update(range(known, generation + 1))
        self._epoch, self._sizes, self._ages = epoch, (1, inf, 1), None
        self._has_begun, self._is_whole = True, False
        self._trains, self._is_held, self._has_resumed, self._may_lose = False, False, False, True
        for of_driver in (self._agents, self._leaving, self._cooldowns, self._phases, self._slots, self._ranks):
            of_driver.clear()
        self._doubts, self._ends = [], []
        self._diverged.clear()
        self._heirs.clear()

    def on_job_finished(self, e: event_file.JobFinished) -> None:
        self._is_finished = True
        self._expect(e["driver"] >= self._epoch, f"driver {e['driver']} after driver {self._epoch}")
        self._expect(e["generations"] == e["generation"], f"{e['generations']} generations, and not {e['generation']}")
        self._adds_up(e)
        if len(self._accounts) == e["generations"] + 1:
            walls, goodputs = zip(*self._accounts.values(), strict=True)
            for name, total, parts in (("wall_s", e["wall_s"], walls), ("goodput_s", e["goodput_s"], goodputs)):
                is_near = abs(total - sum(parts)) <= 3 * _ROUNDING_S * len(parts)
                self._expect(is_near, f"{name} is {total}, and {sum(parts):.6f} in all generations together")
        for name, total in (("commits_lost", e["commits_lost"]), ("ticks_lost", e["ticks_lost"])):
            self._expect(total >= self._lost[name], f"{name} is {total}, after {self._lost[name]} in training_resumed")
        most = self.failed | self._silent | {e["generations"]}  # the newest may have failed behind its exit gate
        are_counted = len(self.failed) <= e["failures"] <= len(most)
        self._expect(are_counted, f"{e['failures']} failures, after those of the generations {sorted(self.failed)}")

    def on_generation_finished(self, e: event_file.GenerationFinished) -> None:
        generation = e["generation"]
        self._expect(generation not in self._accounts, f"a second account of generation {generation}")
        self._accounts[generation] = e["wall_s"], e["goodput_s"] - e["redone_earlier_s"]
        self._adds_up(e)

    def _adds_up(self, e: event_file.TimeFields) -> None:
        parts = [e["goodput_s"], *e["badput_s"].values()]
        is_near = abs(sum(parts) - e["wall_s"]) <= _ROUNDING_S * (len(parts) + 12)  # parts below 1 us are not written
        self._expect(is_near, f"wall_s is {e['wall_s']}, but goodput and badput are {sum(parts):.6f} together")
        self._expect(min(parts) >= 0, f"a part of the time is {min(parts)}")

    def on_training_resumed(self, e: event_file.TrainingResumed) -> None:
        commits = e["commits_lost"]  # ticks may be redone: train() may return or raise between two commits
        self._expect(not self._has_resumed, f"training is resumed a second time in generation {e['generation']}")
        self._expect(self._may_lose or not commits, f"planned changes lost {commits} commits")
        self._has_resumed, self._may_lose = True, False
        self._lost.update(commits_lost=commits, ticks_lost=e["ticks_lost"])

    def on_divergence(self, e: event_file.Divergence) -> None:
        generation, ranks = e["generation"], sorted(rank for group in e["groups"] for rank in group)
        self._expect(e["commit"][0] == generation, f"a divergence in commit {e['commit']} of another generation")
        self._expect(generation not in self._diverged, f"a second divergence in generation {generation}")
        self._expect(len(e["groups"]) > 1 and len(ranks) == len(set(ranks)), f"the groups {e['groups']} differ")
        largest = e["groups"][0]
        odd = [rank for rank in ranks if rank not in largest] if 2 * len(largest) > len(ranks) else ranks
        self._expect(e["ranks"] == odd, f"ranks {e['ranks']} differ, and not {odd}, of the groups {e['groups']}")
        self._expect(
            self._members is None or ranks[-1] < len(self._members), f"rank {ranks[-1]} differs, but is no member"
        )
        self._diverged.add(generation)
        self._may_lose = True
        ages = self._ages or {}
        self._heirs.update(
            (worker_id(worker).slot_id, ages[worker]) for worker in e.get("replaced", []) if worker in ages
        )

    def on_divergent_value(self, e: event_file.DivergentValue) -> None:
        is_known = e["generation"] in self._diverged
        self._expect(is_known, f"{e['value']} differs, but no divergence of generation {e['generation']}")

    def on_durable_copy(self, e: event_file.DurableCopy) -> None:
        self._rises("durable copy", e.get("commit"))

    def on_replication(self, e: event_file.Replication) -> None:
        self._rises("replication", e["commit"])

    def _rises(self, what: str, commit: list[int] | None) -> None:
        if commit is not None:
            before = self._newest.get(what, commit)
            self._expect(commit >= before, f"a {what} of commit {commit} after that of {before}")
            self._newest[what] = commit

    def on_output_resumed(self, e: event_file.OutputResumed) -> None:
        self._dropped_bytes += e["dropped_bytes"] if e["output"].startswith("--events-file") else 0

    # ------------------------------------------------------------------------------------------------- the hosts

    def on_host_added(self, e: event_file.HostAdded) -> None:
        self._leaving.discard(e["host"])
        self._cooldowns.pop(e["host"], None)

    def on_host_removed(self, e: event_file.HostRemoved | event_file.HostDraining) -> None:
        self._leaving.add(e["host"])

    on_host_draining = on_host_removed

    def on_host_cooldown(self, e: event_file.HostCooldown) -> None:
        self._cooldowns[e["host"]] = e["time"] + e["seconds"]

    def on_agent_joined(self, e: event_file.AgentJoined) -> None:
        self._agents.add(e["host"])
        self._joined_at[e["host"]] = self._line
        self._leaving.discard(e["host"])

    def on_agent_lost(self, e: event_file.AgentLost) -> None:
        self._agents.discard(e["host"])
        self._leaving.discard(e["host"])

    # ----------------------------------------------------------------------------------------------- the workers

    def on_worker_started(self, e: event_file.WorkerStarted) -> None:
        worker, host, place = e["worker"], e["host"], (e["host"], e["slot"])
        if (before := self._slots.get(place)) is not None:
            has_ended = self._phases.get(before) in (None, "exited", "lost")
            self._expect(has_ended, f"{worker} starts, but {before} has not exited")
            self._expect(worker_id(worker) > worker_id(before), f"{worker} starts after {before}")
        self._expect(host in self._agents or not self._has_begun, f"{worker} starts on a host without an agent")
        self._phases[worker], self._slots[place] = "started", worker
        if not self._trains:
            return  # a commit that only this host has may be awaited
        self._expect(host not in self._leaving, f"{worker} starts on a host that drains or was removed")
        rest_s = self._cooldowns.get(host, -inf) - e["time"]
        stay = sum(worker_id(member).host not in self._leaving for member in self._members or ())
        is_explained = self._is_held and self._drains
        if rest_s > _CLOCK_S and self._epoch == 1 and stay >= self._sizes[0] and not is_explained:
            text = f"{worker} starts {rest_s:.2f} s before its host's cooldown ends, and {stay} members train"
            self._doubts.append(Violation(self._line, text))

    def on_worker_ready(self, e: event_file.WorkerReady) -> None:
        self._enters(e["worker"], "ready", {"started", "member", "lost"})

    def on_worker_unresponsive(self, e: event_file.WorkerUnresponsive) -> None:
        self._enters(e["worker"], "unresponsive", {"started", "ready", "member", "lost"})

    def on_worker_exited(self, e: event_file.WorkerExited) -> None:
        worker, rank = e["worker"], self._ranks.get(e["worker"])
        is_seen = e["exit_code"] is not None or e["signal"] is not None  # else it may live on, on a lost host
        living: set[Phase] = {"started", "ready", "member", "unresponsive", "lost"}
        self._enters(worker, "exited" if is_seen else "lost", living)
        is_right = rank is None or e["rank"] in (None, rank)
        self._expect(is_right, f"{worker} had rank {e['rank']}, and not {rank}, which its age gives")
        self._may_lose |= not e.get("expected")

    def _enters(self, worker: str, phase: Phase, befores: set[Phase]) -> None:
        """Enter the phase of a worker, which must have been in one of ``befores``, if its events are known."""
        before, name = self._phases.get(worker), worker_id(worker)
        self._expect(before is not None or not self._is_whole, f"{worker} is {phase}, but was not started")
        self._expect(before is None or before in befores, f"{worker} is {phase}, but was {before}")
        if before == "lost":  # it has lived on, and was taken back
            is_back = self._joined_at.get(name.host, 0) > self._lost_at[worker]
            self._expect(is_back, f"{worker} is {phase}, but its host, with which it was lost, is not back")
            self._ages = None
        if phase == "lost":
            self._lost_at[worker] = self._line
        self._phases[worker] = phase
        self._slots.setdefault(name.slot_id, worker)

    # ------------------------------------------------------------------------------------------------ the worlds

    def on_hold(self, e: event_file.Hold) -> None:
        self._expect(not self._is_held and not self._ends, "a hold in a hold, or after the end")
        self._is_held, self._drains = True, "drains" in e["cause"]  # it names all members that drain
        if not self._drains:
            self.violations += self._doubts
        self._doubts = []

    def on_release(self, e: event_file.Release) -> None:
        self._expect(self._is_held or not self._has_begun, "a release without a hold")
        self._is_held = False

    def on_end(self, e: event_file.End) -> None:
        at, generation = e["at"], e["generation"]
        if isinstance(at, int):
            self._expect(self._is_held or not self._has_begun, f"an end at tick {at} without a hold")
            self._expect(at >= 1, f"an end at tick {at}")
        elif generation:  # else it is that of a round without a world
            self._expect("now" not in self._ends, f"generation {generation} ends a second time")
            self.failed.update(() if e.get("planned") else (generation,))
        if at == "now":
            self._may_lose, self._doubts = True, []
        self._ends.append(at)
        self._is_held = self._trains = False

    def on_sync(self, e: event_file.Sync) -> None:
        if self._members is not None and e["generation"] == self.generation:
            self._expect(e["worker"] in self._members, f"{e['worker']} gets the state, but is no member")

    def on_world_formed(self, e: event_file.WorldFormed) -> None:
        size, joined, left, before = e["size"], e["joined"], e["left"], self._members
        least, most, multiple = self._sizes
        last, is_plain = e["generation"] - 1, bool(e.get("plain"))
        self._expect(least <= size <= most, f"{size} members, but min_np is {least} and max_np is {most}")
        self._expect(size % multiple == 0, f"{size} members, but np_multiple is {multiple}")
        self._expect(0 <= e["root"] < size, f"the root is rank {e['root']} of {size}")
        self._expect(0 <= e["synced"] < size, f"{e['synced']} of {size} members get the state")
        if self._has_begun:
            self._expect(bool(self._ends) or not last, f"generation {last} has not ended")
            self._expect(last in self._accounts, f"no generation_finished of generation {last}")
        if before is not None:
            strangers, twice = set(left) - before, before.difference(left).intersection(joined)
            self._expect(not strangers, f"{listed(sorted(strangers))} left, but was no member")
            self._expect(not twice, f"{listed(sorted(twice))} joined, but was a member")
            counted = len(before) - len(left) + len(joined)
            self._expect(size == counted, f"{size} members, and not {len(before)} - {len(left)} + {len(joined)}")
            self._members = before.difference(left).union(joined)
            hosts = len({worker_id(member).host for member in self._members})
            self._expect(e["hosts"] == hosts, f"{e['hosts']} hosts, and not {hosts}")
        elif len(joined) == size:
            self._members = set(joined)
        self._enter(joined, {"started", "exited"} if is_plain else {"ready"})
        self._trains, self._has_resumed, self._ends = not is_plain, False, []

    def _enter(self, joined: list[str], wanted: set[Phase]) -> None:
        """Enter the members into the newest world, with their ranks by the rule of the core."""
        members = self._members or set()
        if self._members is None:  # some of those that are READY are in the world
            self._phases = {worker: phase for worker, phase in self._phases.items() if phase != "ready"}
        for member in sorted(members.union(joined)):
            phase = self._phases.get(member)
            is_right = phase in wanted or (phase is None and not self._is_whole)
            self._expect(is_right, f"{member} is a member, but is {phase or 'not started'}")
            if phase != "exited":
                self._phases[member] = "member"
        if self._members == set(joined):
            self._ages = {}
        if self._members is None or self._ages is None:
            self._ages = None
            self._ranks.clear()
            return
        ages = {member: age for member, age in self._ages.items() if member in members}
        ages.update(
            (worker, self._heirs[worker_id(worker).slot_id])
            for worker in joined
            if worker_id(worker).slot_id in self._heirs and worker not in self._lost_at  # who returns is a newcomer
        )
        self._heirs.clear()
        self._ranks.update((member, rank) for rank, member in enumerate(placed(ages, joined)))
        self._ages = ages


def checks(events: Iterable[Event]) -> list[JobCheck]:
    """Return the checks of all runs of jobs in a file."""
    return runs_of(events, lambda first: JobCheck())
