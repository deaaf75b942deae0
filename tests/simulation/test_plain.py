"""Random jobs of plain workers: kills, errors, hosts that come, go and drain, lost and returning agents, and drivers
that die, also in the middle of their effects (I18)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import msgspec
from hypothesis import given, strategies as st

from elasticstate.core import types as t
from elasticstate.core.reattach import reattach
from elasticstate.core.state import Over
from elasticstate.core.step import new_membership, next_deadline, step
from elasticstate.driver.record import Reattachment, Record, newer
from elasticstate.net import messages
from elasticstate.options import Options
from tests.kit.policy import in_pairs, policy_of
from tests.kit.simulation.verified import Verified

HOSTS = ("a", "b", "c")
STEPS_OF_FAULTS, MOST_STEPS = 150, 3_000
SITUATIONS = (
    "world",
    "restart",
    "kill",
    "error",
    "hosts",
    "agent lost",
    "cut",
    "drain",
    "succeeded",
    "failed",
    "limit",
    "back",
    "driver died",
    "died in its effects",
    "finished without a driver",
    "finished without a driver, of unknown kind",
    "goes on after a reattach",
)
NO_STAMP = messages.Stamp(messages.Place.BOOT, 0, 0, None)
reached: Counter[str] = Counter()


class PlainJob:
    """A model of agents and plain workers. A worker trains until it is killed, stopped, or its world has trained
    enough."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        np = rng.randint(1, 4)
        self.policy = policy_of(
            np=np,
            min_np=rng.randint(1, np),
            max_np=rng.choice((np, np + 1, None)),
            join_window_s=rng.choice((0.0, 2.0)),
            listen=rng.choice((None, None, "0.0.0.0:1")),
            min_interrupt_distance_s=rng.choice((0.0, 1.0)),
            preemption_window_s=rng.choice((0.0, 1.0)),
            preemption_cooldown_s=2.0,
            cooldown_range_s=(1.0, 4.0),
            reset_limit=rng.choice((None, None, 3)),
            max_no_progress=rng.choice((3, 1000)),
            elastic_timeout_s=100.0,
            horovod=rng.random() < 0.2,
        )
        if seed % 4 == 1:
            self.policy = in_pairs(self.policy)
        self.m = new_membership(self.policy)
        self.now = 0.0
        self.events = Verified(self.policy)
        self.living: dict[t.WorkerId, t.PlainPlace] = {}
        self.stopped: set[t.WorkerId] = set()
        self.away: dict[str, dict[t.WorkerId, t.PlainPlace]] = {}  # workers on unreachable hosts
        self.joins_store = rng.random() < 0.8
        self.asked: set[str] = set()
        self.up: set[str] = set()
        self.stopping: set[str] = set()
        self.end: t.EndJob | None = None
        self.restarts = 0
        self.record = Record("job", "id", "token", (), Options(command=("train",), np=1, min_np=1), "/", epoch=1)
        self.exits: dict[str, list[t.WorkerExited]] = {}  # by host: since workers were started there
        self.incarnations: dict[str, dict[int, int]] = {}
        self.store_joined: dict[str, int] = {}  # by host: the newest generation
        self.with_faults = True
        self.is_dead = False  # the driver has died in its effects

    def deliver(self, event: t.Event) -> None:
        self.m, effects, reason = step(self.m, event, self.now)
        assert reason
        self._carry_out_all(effects)

    def _carry_out_all(self, effects: Sequence[t.Effect]) -> None:
        self.record = newer(self.record, self.m, (), (self.now, self.now)) or self.record
        started = [effect for effect in effects if isinstance(effect, t.StartWorker)]
        if started:
            self._check_round(started)
            for host in {effect.worker.host for effect in started}:
                self.exits[host] = []
        orders = sum(not isinstance(effect, t.Note) for effect in effects)
        is_over = any(isinstance(effect, t.EndJob) for effect in effects)
        self.is_dead = self.with_faults and orders > 1 and not is_over and self.rng.random() < 0.05
        reached["died in its effects"] += self.is_dead
        for effect in effects[: self.rng.randrange(len(effects)) if self.is_dead else len(effects)]:
            self._carry_out(effect)

    def _check_round(self, started: list[t.StartWorker]) -> None:
        places = [effect.place for effect in started if effect.place is not None]
        assert len(places) == len(started), "each worker has a place"
        assert not self.living, f"I18: {self.living} live when the next round starts"
        assert [place.rank for place in places] == list(range(len(places))), "I18: the world is complete"
        assert {place.size for place in places} == {len(places)}
        assert len({(p.generation, p.store_host, p.restarts) for p in places}) == 1
        assert self.policy.fewest(places[0].generation - 1) <= len(places)
        assert len(places) == self.policy.fitting(len(places)), "I4"
        assert places[0].store_host == started[0].worker.host
        for host in {effect.worker.host for effect in started}:
            here = [p for e, p in zip(started, places, strict=True) if e.worker.host == host]
            assert [p.local_place for p in here] == list(range(here[0].local_size)), "LOCAL_RANK has no gaps"
            assert len({p.cross_rank for p in here}) == 1
        assert {p.cross_rank for p in places} == set(range(places[0].cross_size))
        assert places[0].restarts >= self.restarts
        self.restarts = places[0].restarts
        reached["world"] += 1
        reached["restart"] += self.restarts > 0

    def _carry_out(self, effect: t.Effect) -> None:
        self.events.see(self.now, effect, self.m)
        match effect:
            case t.StartAgent(host):
                self.asked.add(host)
            case t.StopAgent(host):
                self.asked.discard(host)
                self.stopping.add(host)
            case t.StartWorker(worker, _, place):
                assert worker.host in self.up
                assert place is not None
                self.living[worker] = place
                self.incarnations.setdefault(worker.host, {})[worker.slot] = worker.incarnation
            case t.StopWorker(worker):
                self.stopped.add(worker)
            case t.EndJob():
                assert self.end is None
                self.end = effect
            case t.World() | t.Hold() | t.End() | t.OpenGate() | t.Leave():
                raise AssertionError(f"{effect} for plain workers")

    def act(self) -> None:
        rng = self.rng
        self.now += rng.choice((0.0, 0.01, 0.5))
        if self.is_dead:
            self.replace_driver()
        elif self.with_faults and rng.random() < 0.08:
            self._fault()
        elif self.asked and rng.random() < 0.5:
            self._joins(rng.choice(sorted(self.asked)))
        elif self.stopping and rng.random() < 0.5:
            host = min(self.stopping)
            self.stopping.remove(host)
            self._lose(host, "exited with 0", may_live=False)
        elif (due := [worker for worker in self.living if worker in self.stopped]) and rng.random() < 0.6:
            self._exits(rng.choice(due), None, 15)
        elif self.living and self.joins_store and rng.random() < 0.3:
            place = next(iter(self.living.values()))
            if place.store_host in self.up:
                self.store_joined[place.store_host] = place.generation
                self.deliver(t.PlainStoreJoined(place.generation))
        elif self.living and not self.with_faults and rng.random() < 0.2:
            self._exits(rng.choice(list(self.living)), 0, None)
        else:
            deadline = next_deadline(self.m)
            self.now = max(self.now, min(self.now + 1.0, self.now + 1.0 if deadline is None else deadline))
            self.deliver(t.TimePassed())

    def _exits(self, worker: t.WorkerId, code: int | None, signal: int | None, *, is_noticed: bool = True) -> None:
        del self.living[worker]
        self.exits.setdefault(worker.host, []).append(t.WorkerExited(worker, 1, code, signal))
        if is_noticed:
            self.deliver(t.WorkerExited(worker, 1, code, signal))

    def replace_driver(self) -> None:
        """Replace a dead driver. Meanwhile workers and agents may end, and hosts that had no agent yet get none."""
        rng = self.rng
        reached["driver died"] += 1
        self.is_dead = False
        for worker in [worker for worker in self.living if rng.random() < 0.2 and worker.host in self.up]:
            code = 0 if worker not in self.stopped and rng.random() < 0.6 else None
            self._exits(worker, code, 9 if code is None else None, is_noticed=False)
        if rng.random() < 0.3 and self.living and not self.stopped.intersection(self.living):
            for worker in [worker for worker in self.living if worker.host in self.up]:
                self._exits(worker, 0, None, is_noticed=False)
        gone = {host for host in sorted(self.up) if rng.random() < 0.1} | self.stopping
        self.up -= gone
        self.living = {worker: place for worker, place in self.living.items() if worker.host not in gone}
        self.asked, self.stopping, self.away = set(), set(), {}
        self.record = msgspec.structs.replace(self.record, epoch=self.record.epoch + 1)
        takeover = Reattachment(self.record, self.now)
        events: list[t.Event] = []
        for host in sorted(self.up):
            events += self._report(host, takeover)
        for host in gone:
            self.exits.pop(host, None)
            self.store_joined.pop(host, None)
        lost = [t.AgentLost(host, "did not reconnect", may_live=False) for host in takeover.lost()]
        before = self.record
        transition = reattach(self.policy, takeover.remains((self.now, self.now)), self.now)
        self.m = transition.next
        goes_on = transition.next.ledger.round is not None and not transition.next.ledger.round.end
        reached["goes on after a reattach"] += goes_on
        members = before.first_round or (before.world.members if before.world is not None else ())
        exits = {exited.worker: exited.exit_code for of_host in self.exits.values() for exited in of_host}
        has_finished = bool(members) and all(exits.get(member.worker) == 0 for member in members)
        reached["finished without a driver"] += has_finished
        reached["finished without a driver, of unknown kind"] += has_finished and before.world is None
        self.events.restarted(self.now, self.record.epoch, self.m)
        self._carry_out_all(transition.effects)
        if self.is_dead:
            return
        self.deliver(t.Several((*lost, *events)))
        if has_finished:
            assert self.end is not None, "commands that have ended are not run again"
            assert self.end.succeeded

    def _report(self, host: str, takeover: Reattachment) -> list[t.Event]:
        """Report the state of a host to the next driver, as the driver's code does. Return the events."""
        living = {worker: place.generation for worker, place in self.living.items() if worker.host == host}
        reports = tuple(messages.WorkerReport(worker, 1, number, NO_STAMP, ()) for worker, number in living.items())
        exits, incarnations = self.exits.get(host, []), tuple(self.incarnations.get(host, {}).items())
        joined = self.store_joined.get(host, 0)
        takeover.joined(host, messages.HostReport((), reports, tuple(exits), incarnations, store_joined=joined))
        events: list[t.Event] = list(exits)
        events.append(t.AgentJoined(host, (), tuple(living.items()), incarnations))
        if joined:
            events.append(t.PlainStoreJoined(joined))
        return events

    def _joins(self, host: str) -> None:
        self.asked.discard(host)
        self.up.add(host)
        back = self.away.pop(host, {})
        self.living.update(back)
        reached["back"] += bool(back)
        self.deliver(t.AgentJoined(host, workers=tuple((worker, p.generation) for worker, p in back.items())))
        assert all(worker in self.stopped for worker in back) or self.end or self.is_dead, (
            "who returns too late is stopped"
        )

    def _lose(self, host: str, reason: str, may_live: bool) -> None:
        self.up.discard(host)
        self.asked.discard(host)
        here = {worker: place for worker, place in self.living.items() if worker.host == host}
        self.living = {worker: place for worker, place in self.living.items() if worker.host != host}
        if may_live:
            self.away[host] = here
        self.deliver(t.AgentLost(host, reason, may_live))

    def _fault(self) -> None:
        rng, kind = self.rng, self.rng.choice(("kill", "error", "hosts", "agent lost", "cut", "drain", "driver"))
        if kind == "driver":
            self.replace_driver()
            return
        if kind == "hosts":
            self.deliver(
                t.HostsDiscovered(tuple(t.HostSlots(h, rng.randint(1, 2)) for h in HOSTS if rng.random() < 0.8))
            )
        elif kind in ("agent lost", "cut") and self.up - self.stopping:
            self._lose(rng.choice(sorted(self.up - self.stopping)), "sent no heartbeat", may_live=kind == "cut")
        elif kind == "drain" and self.up:
            self.deliver(t.HostDraining(rng.choice(sorted(self.up)), "SIGTERM"))
        elif kind in ("kill", "error") and self.living:
            worker = rng.choice(list(self.living))
            self._exits(worker, *((None, 9) if kind == "kill" else (1, None)))
        else:
            return
        reached[kind] += 1


def play(seed: int) -> None:
    job = PlainJob(seed)
    job.deliver(t.HostsDiscovered(tuple(t.HostSlots(host, 2) for host in HOSTS)))
    for _ in range(STEPS_OF_FAULTS):
        if job.end is None:
            job.act()
    job.with_faults = False
    if job.is_dead:
        job.replace_driver()
    if job.end is None:
        job.deliver(t.HostsDiscovered(tuple(t.HostSlots(host, 2) for host in HOSTS)))
    for _ in range(MOST_STEPS):
        if job.end is not None:
            break
        job.act()
    assert job.end is not None, f"seed {seed}: the job does not end: {job.m.phase_name} {job.m.ledger}"
    assert isinstance(job.m.phase, Over)
    reached["succeeded" if job.end.succeeded else "failed"] += 1
    cause = job.end.root_cause
    reached["limit"] += cause is not None and "reset limit" in cause.reason
    if job.policy.reset_limit is not None:
        assert job.restarts <= job.policy.reset_limit, "restarts are bounded, over all drivers"


@given(seed=st.integers(0, 2**64 - 1))
def explore(seed: int) -> None:
    play(seed)


def test_random_jobs_of_plain_workers_end_and_each_world_is_complete() -> None:
    explore()
    for situation in SITUATIONS:
        assert reached[situation], f"{situation} was not reached: {reached}"
