"""A driver takes over from one that has died: what it knows at first, and whether the world of the last one goes on.

What is told afterwards is told in events like any other: AgentJoined or AgentLost of each host that had an agent, the
ends of workers, and what the living have said in their generation.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from elasticstate.core import types as t
from elasticstate.core.ending import end_now
from elasticstate.core.membership import Transition, new_membership
from elasticstate.core.missing import listed
from elasticstate.core.policy import Policy
from elasticstate.core.reach import has_been
from elasticstate.core.records import Draft, Failure, Finishing, Host, Running, Worker

_HOLDS_BITS = 32  # of the number of a hold, for those of one driver


@dataclass(frozen=True, slots=True)
class Remains:
    """What is known of a job without a driver: by its record, and by its agents."""

    epoch: int  # of the driver that takes over: higher than that of any before
    world: t.World | None  # the newest that was published, or was about to be
    ages: tuple[int, ...]  # of its members, by rank
    next_age: int
    highest: t.CommitId | None  # the newest commit of a user that was heard of
    hosts: tuple[t.HostSlots, ...]  # discovery's last answer
    lost: frozenset[str]  # hosts that had an agent, or members of that world: AgentLost follows
    living: dict[t.WorkerId, int]  # in touch, with the newest generation that each was given a world of
    exited: frozenset[t.WorkerId]  # since that world: WorkerExited follows
    has_ticked: bool  # in that world
    has_ended: bool  # some of its members have been told so
    gate_is_open: bool  # its members have been told that they may exit


def take_over(policy: Policy, remains: Remains, now: float) -> Transition:
    """The state with which a driver goes on. The world does, too, if each of its members was given it, and is still
    there or is about to be found dead or out of reach; a generation that cannot be complete is ended."""
    d = Draft(new_membership(policy), now)
    world = remains.world
    started = world is not None or any(remains.living.values())
    d.account(started_at=now, ever_ready=started, highest=remains.highest, next_age=remains.next_age)
    d.account(holds=remains.epoch << _HOLDS_BITS)
    _hosts(d, remains)
    _seats(d, remains)
    d.reason = "a driver was restarted"
    if world is not None:
        _members(d, remains, world)
    return Transition(d.freeze(), tuple(d.effects), d.reason)


def _hosts(d: Draft, remains: Remains) -> None:
    named = {host.name: host.slots for host in remains.hosts}
    members = [placement.worker for placement in remains.world.members] if remains.world is not None else []
    found = {worker.host for worker in (*remains.living, *remains.exited, *members)}
    rest = sorted(remains.lost.union(found).difference(named))
    for order, name in enumerate((*named, *rest)):
        slots = named.get(name, 0)
        host = d.hosts[name] = Host(name, order, slots, seats=slots, heard="its agent was there before", heard_at=d.now)
        if name in remains.lost:
            d.put_host(host, agent="joined")


def _seats(d: Draft, remains: Remains) -> None:
    members = [placement.worker for placement in remains.world.members] if remains.world is not None else []
    for worker in (*remains.living, *remains.exited, *members):
        has_been(d, worker)
    for worker in remains.exited.difference(members):
        _add(d, Worker(worker, started_at=d.now))


def _members(d: Draft, remains: Remains, world: t.World) -> None:
    absent: list[t.WorkerId] = []
    lacking = frozenset(world.lacking)
    for placement, age in zip(world.members, remains.ages, strict=True):
        worker, generation = placement.worker, world.generation
        is_given = remains.living.get(worker) == generation
        if is_given or worker in remains.exited or worker.host in remains.lost:
            member = Worker(worker, d.now, joined=generation, first_joined=generation, rank=placement.rank, age=age)
            _add(d, replace(member, heard_at=d.now, ticks_at=d.now, place="train", lacked=placement.rank in lacking))
        else:
            absent.append(worker)
    d.world = world
    if remains.gate_is_open and not remains.has_ended:  # else the last driver did not know that it was open
        d.become(Finishing(since=d.now))
        d.effects.append(t.OpenGate(world.generation))
        return
    d.become(Running(since=d.now, first_tick=remains.has_ticked))
    if absent or remains.has_ended:
        why = f"{listed([str(worker) for worker in absent])} had not gone on" if absent else "the last one had ended it"
        d.account(is_broken=bool(absent))
        reason = f"the driver was restarted, and {why}"
        end_now(d, Failure(t.RootCause(reason, generation=world.generation), "lost"))


def _add(d: Draft, worker: Worker) -> None:
    d.add(worker)
    d.put_slot(worker.id.seat, worker=worker.id)
