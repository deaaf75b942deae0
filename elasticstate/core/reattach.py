"""Reattach: the first state of a driver that replaces a dead driver. The state decides if the present world goes on.

Everything else arrives later as ordinary events, such as AgentJoined or AgentLost for each host that had an agent.
"""

from __future__ import annotations

from math import inf

from msgspec import Struct
from msgspec.structs import replace

from elasticstate.core import types as t
from elasticstate.core.accounting import activity_of, follow
from elasticstate.core.figures import Losses, Origin, TimeAccount
from elasticstate.core.phases import end_now
from elasticstate.core.plain import reattach_round, reattach_world
from elasticstate.core.policy import Policy
from elasticstate.core.slots import record_incarnation
from elasticstate.core.state import Draft, Failure, Finishing, Host, Ledger, Running, Ticking, Worker
from elasticstate.core.step import Transition, new_membership
from elasticstate.core.types import ShardLayout, listed

_HOLDS_BITS = 32  # the bits of a hold's number that count the holds of one driver


class Recorded(Struct, frozen=True, kw_only=True):
    """State of a job, as its record has it for the next driver. Times are those of the core's clock."""

    epoch: int  # counts the drivers of the job, from 1; in ``Remains``, of the new driver; 0: not elected yet
    hosts: tuple[t.HostSlots, ...] = ()  # discovery's last answer
    world: t.World | None = None  # the newest world that was published or about to be published
    ages: tuple[int, ...] = ()  # of its members, by rank
    first_round: tuple[t.Placement, ...] = ()  # workers that started together; it is not known if they use ``run``
    layouts: tuple[ShardLayout, ...] = ()  # of a sharded job: of the generations whose commits may be the line
    ended: tuple[tuple[int, tuple[t.WorkerId, ...]], ...] = ()  # of a sharded job: worlds without a layout
    replicated: t.CommitId | None = None  # the newest commit whose replication is complete
    # The rest is a part of the ledger:
    next_age: int = 0
    highest: t.CommitId | None = None
    durable: t.CommitId | None = None
    origins: tuple[Origin, ...] = ()
    restarts: int = 0
    resets: int = 0
    settled: int = 0
    no_progress: int = 0
    no_progress_cause: t.RootCause | None = None
    rejected: tuple[t.CommitId, ...] = ()
    account: TimeAccount = TimeAccount()
    failures: int = 0
    failed: int = 0
    total: Losses = Losses()


FROM_LEDGER = tuple(name for name in Recorded.__struct_fields__ if name in Ledger.__struct_fields__)


class Remains(Recorded, frozen=True, kw_only=True):
    """State of a job without a driver, from the job's record and from the reports of its agents."""

    lost: frozenset[str]  # unreachable hosts that had an agent or members of this world: AgentLost follows
    living: dict[t.WorkerId, int]  # reachable workers, each with the newest generation whose world it received
    exited: frozenset[t.WorkerId]  # workers that exited since this world: WorkerExited follows
    ticks: int  # the most that a member of this world is known to have completed
    has_ended: bool  # some members of this world have received END
    gate_is_open: bool  # some members of this world have received OpenGate
    seen_at: float = inf  # the last time at which the previous driver is known to have lived; inf: not known

    @property
    def has_ticked(self) -> bool:
        """Return True if this world has completed a tick."""
        return self.ticks > 0


def reattach(policy: Policy, remains: Remains, now: float) -> Transition:
    """Return the first state of the new driver. The world continues if each member has received it, and is alive or
    will be reported as dead or unreachable. A generation that cannot be complete is ended."""
    d = Draft(new_membership(policy), now)
    world = remains.world
    kind = "" if world is None else "plain" if world.is_plain else "elastic"
    d.update_ledger(**{name: getattr(remains, name) for name in FROM_LEDGER})
    d.update_ledger(kind=kind, started_at=now, ever_ready=kind == "elastic", store_joined=kind == "plain")
    d.update_ledger(holds=remains.epoch << _HOLDS_BITS)
    if remains.account.since is None:
        d.update_ledger(account=remains.account.until(now))
    line = world.line if world is not None else None
    d.update_shards(layouts=remains.layouts, ended=remains.ended, line=line, line_at=now)
    d.update_shards(replicated=remains.replicated, replicated_at=now, forgotten=remains.replicated)
    _hosts(d, remains)
    _slots(d, remains)
    if remains.layouts:
        _shards(d, remains)
    elif world is not None and not world.is_plain:
        _commits(d, remains, world)
    d.reason = "a new driver reattached"
    failure = None
    if world is not None:
        failure = _members(d, remains, world)
    elif remains.first_round:
        _first_round(d, remains)
    _account(d, remains, goes_on=failure is None and not (remains.exited or remains.lost))
    if failure is not None:
        end_now(d, failure)
    follow(d)
    return Transition(d.freeze({}), tuple(d.effects), d.reason)


def _members_of_record(remains: Remains) -> list[t.WorkerId]:
    """Return the members of the newest world, or else of the first round."""
    placements = remains.first_round if remains.world is None else remains.world.members
    return [placement.worker for placement in placements]


def _hosts(d: Draft, remains: Remains) -> None:
    named = {host.name: host for host in remains.hosts}
    members = _members_of_record(remains)
    found = {worker.host for worker in (*remains.living, *remains.exited, *members)}
    rest = sorted(remains.lost.union(found).difference(named))
    for order, name in enumerate((*named, *rest)):
        _, slots, rack = named.get(name, t.HostSlots(name, 0))
        host = Host(name, order, slots, rack=rack, slots_ever=slots, reported_at=d.now)
        agent = "joined" if name in remains.lost else "none"
        d.put_host(host, agent=agent, report="agent connected to the previous driver")


def _slots(d: Draft, remains: Remains) -> None:
    members = _members_of_record(remains)
    for worker in (*remains.living, *remains.exited, *members):
        record_incarnation(d, worker)
    taken = {worker.slot_id for worker in remains.living}  # by the next worker of the slot
    for worker in remains.exited.difference(members):
        if worker.slot_id not in taken:
            _add(d, Worker(worker, started_at=d.now))


def _shards(d: Draft, remains: Remains) -> None:
    """Enter the commits that slots are known to have sealed: at least ``(g, 0)``, when all members had attached. The
    reports of their agents replace this."""
    for layout in remains.layouts:
        for slot_id, _ in layout.digests:
            if slot_id.host in d.hosts:
                start, known = t.CommitId(layout.generation, 0), d.slots.get(slot_id)
                d.put_slot(slot_id, retained=start, sealed=max(start, known.sealed if known else start))
                host = d.hosts[slot_id.host]
                d.put_host(host, slots_ever=max(host.slots_ever, slot_id.slot + 1))


def _commits(d: Draft, remains: Remains, world: t.World) -> None:
    """Presume that unreachable members of the newest world hold its first commit, or a newer one: they do if they have
    received that world. The reports of their agents replace this."""
    for placement in world.members:
        if placement.worker.host in remains.lost and world.keeps(placement.rank):
            d.put_slot(placement.worker.slot_id, retained=t.CommitId(world.generation, 0))


def _members(d: Draft, remains: Remains, world: t.World) -> Failure | None:
    """Enter the newest world. Return why its generation must end, if so."""
    absent: list[t.WorkerId] = []
    lacking = frozenset(world.lacking)
    for placement, age in zip(world.members, remains.ages, strict=True):
        worker, generation = placement.worker, world.generation
        is_given = remains.living.get(worker) == generation
        if is_given or worker in remains.exited or worker.host in remains.lost:
            member = Worker(worker, d.now, joined=generation, first_joined=generation, rank=placement.rank, age=age)
            _add(
                d,
                replace(
                    member,
                    in_round=world.is_plain,
                    reported_at=d.now,
                    ticks_at=d.now,
                    moved_at=d.now,
                    place=t.Place.TRAIN,
                    lacked=placement.rank in lacking,
                    keeps=world.keeps(placement.rank),
                ),
            )
        else:
            absent.append(worker)
    d.world = world
    d.update_ledger(ticking=Ticking(at=d.now))
    if world.is_plain:
        reattach_world(d, world, [str(worker) for worker in absent])
        return None
    _losses(d, remains, world, is_complete=not absent)
    if remains.gate_is_open and not remains.has_ended:  # else the last driver did not know of the gate
        d.phase = Finishing(since=d.now)
        d.effects.append(t.OpenGate(world.generation))
        return None
    d.phase = Running(since=d.now, earlier_ticks=remains.ticks, first_tick=remains.has_ticked)
    if not absent and not remains.has_ended:
        return None
    d.update_ledger(is_broken=bool(absent))
    absent_text = f"these members did not receive their world: {listed(map(str, absent))}"
    reason = f"a new driver reattached; {absent_text if absent else 'the previous driver had ended the generation'}"
    return Failure(t.RootCause(reason, generation=world.generation), "lost")


def _first_round(d: Draft, remains: Remains) -> None:
    """Continue the workers that started together, of which it is not known if they use ``run``."""
    absent: list[str] = []
    for placement in remains.first_round:
        worker = placement.worker
        if worker in remains.living or worker in remains.exited or worker.host in remains.lost:
            _add(d, Worker(worker, d.now, in_round=True, reported_at=d.now))
        else:
            absent.append(str(worker))
    reattach_round(d, remains.first_round, absent)


def _account(d: Draft, remains: Remains, goes_on: bool) -> None:
    """Enter the time without a driver into the account: for the activity of the account, if the world goes on in it.
    Workers train without a driver: if their first tick came then, the whole time is goodput."""
    account, activity, seen_at = d.ledger.account, activity_of(d), min(remains.seen_at, d.now)
    is_before_ticks = account.activity in ("world_formation", "no_ticks")
    if goes_on and (activity == account.activity or (is_before_ticks and activity == "no_ticks")):
        return
    if goes_on and is_before_ticks and activity == "goodput":
        account = account.switched("goodput", max(seen_at, account.since or seen_at))
    else:
        account = account.with_gap(seen_at, d.now)
    d.update_ledger(account=account)


def _losses(d: Draft, remains: Remains, world: t.World, is_complete: bool) -> None:
    """Mark the downtime as a lower bound if training stands still, or will after the agents' reports: the time of the
    stop is not known."""
    d.update_ledger(has_ticked=remains.has_ticked or bool(remains.highest))
    trains = remains.has_ticked or world.generation == 1
    if not (trains and is_complete) or remains.has_ended or remains.exited or remains.lost:
        d.update_ledger(losses=Losses(lower_bounds=frozenset({"downtime_s"})))
    if not trains:
        d.update_ledger(down_since=d.now)


def _add(d: Draft, worker: Worker) -> None:
    d.add(worker)
    d.put_slot(worker.id.slot_id, worker=worker.id)
