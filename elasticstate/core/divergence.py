"""Silent divergence: members whose commits have different replicated values, found by the digests that they send.

The core compares the digests of one tick and one begin. Once in a generation it names the ranks that differ, then asks
one worker of each side for the first value that differs: first for the digests of its last commits, then for the
checksums of parts of the values of one commit, until a part is one value. An error before an all-reduce makes all ranks
equally wrong, and is not found. For this and for ``--divergence restore`` see docs/decisions/divergence.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from msgspec.structs import replace

from elasticstate.core import accounting, event_file, types as t
from elasticstate.core.commits import newest_equal, put_equal, reject
from elasticstate.core.slots import replace_workers
from elasticstate.core.state import (
    Digests,
    Draft,
    Failure,
    Forming,
    Membership,
    Running,
    Stopping,
    ValueSearch,
    Waiting,
    Worker,
    is_live,
)
from elasticstate.core.types import listed

_WAIT = 5.0  # intervals, for the digests of the other members
CAUSES = (
    "Memory with bit errors, a module without init_sync or with buffers that no collective synchronizes, and trained "
    "values that a script changes on some ranks alone cause it. Ranks on unlike processors may differ in the last bit. "
    "Values that differ by design: state.exclude_from_check(name)"
)
_KEPT = 16  # digests of each worker, and of the world
_SEARCH_S = 2.0  # for the value that differs, before the generation ends
_SUSPECT_S = 3600.0  # a host with two divergences within this time is named as suspect
_MOST_ODD = 64  # hosts that are remembered


def kept_digests(worker: Worker, digests: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, int, int], ...]:
    """Return the digests of a worker that are kept, with these new ones."""
    return (*worker.digests, *digests)[-_KEPT:]


def digests_reported(d: Draft, worker: Worker, digests: tuple[tuple[int, int, int], ...]) -> None:
    """Compare new digests, which the worker has already, of a member of the present world with those of the others."""
    found = d.ledger.digests
    if found.generation != d.generation:
        found = Digests(d.generation)
    if d.policy.divergence == "off":
        return
    if d.policy.divergence == "restore":
        slot = d.slots[worker.id.slot_id]
        new = tuple((t.CommitId(d.generation, tick), digest) for _, tick, digest in digests if digest >= 0)
        d.put_slot(worker.id.slot_id, digests=(*(old for old in slot.digests if old not in new), *new)[-_KEPT:])
        digests = tuple(each for each in digests if each[2] >= 0)
    for start, tick, digest in digests:  # of a thousand workers: this is all, unless something is new
        if found.known.get((start, tick)) != digest:
            break
    else:
        return
    known, differs = dict(found.known), found.differs
    for start, tick, digest in digests:
        is_equal = known.setdefault((start, tick), digest) == digest
        if not is_equal and (differs is None or tick < differs[1]):
            differs = start, tick
    for key in list(known)[:-_KEPT]:
        del known[key]
    since = d.now if differs is not None and found.differs is None else found.since
    d.update_ledger(digests=replace(found, known=known, differs=differs, since=since))


def compare(d: Draft) -> None:
    """Name the ranks that differ, as soon as all members have sent the digest in which some differ."""
    found = d.ledger.digests
    if found.generation != d.generation:
        return
    restores = d.policy.divergence == "restore"
    if restores:
        found = _judge(d, found)
    if found.differs is not None and not found.text:
        _compare_members(d, found, found.differs)
        if restores and d.ledger.digests.differs is None:  # those that differed are gone
            _judge(d, d.ledger.digests)
    if restores:
        _end_generation(d, d.ledger.digests)


def _compare_members(d: Draft, found: Digests, differs: tuple[int, int]) -> None:
    groups: dict[int, list[Worker]] = {}
    for member in d.members():
        if not member.keeps:
            continue
        digest = next((digest for *key, digest in member.digests if tuple(key) == differs), None)
        if digest is not None and digest >= 0:
            groups.setdefault(digest, []).append(member)
        elif d.now < _awaited_until(d, found) and _is_awaited(member, differs[1]):
            return
    if len(groups) > 1:
        _report(d, found, sorted(groups.values(), key=lambda group: (-len(group), group[0].rank)))
    else:
        d.update_ledger(digests=replace(found, differs=None))  # those that differed are gone


def _awaited_until(m: Draft | Membership, found: Digests) -> float:
    return found.since + _WAIT * t.digests_interval_s(m.world.size if m.world is not None else 1)


def _is_awaited(member: Worker, tick: int) -> bool:
    """Return True if a digest of the commit of this tick may still come from a member that has not sent it."""
    if member.in_gate or member.ready is not None:
        return False
    return not member.digests or (member.digests[-1][1] < tick and member.digests[-1][2] != t.OUT_OF_INPUTS)


def comparison_deadlines(d: Draft) -> Iterator[tuple[str, float]]:
    """Yield the times from which the digests of further members, or answers on the value, are not awaited."""
    found = d.ledger.digests
    if found.generation != d.generation:
        return
    if found.differs is not None and not found.text:
        yield "digests", _awaited_until(d, found)
    yield "value that differs", found.ends_at
    yield "members without commits", found.pending_since + d.policy.regroup_timeout_s


def _report(d: Draft, found: Digests, groups: list[list[Worker]]) -> None:
    """Write the event, and begin to search the value. ``groups``: members with equal digests, the most first."""
    assert found.differs is not None
    start, tick = found.differs
    largest, others = groups[0], [member for group in groups[1:] for member in group]
    is_majority = len(largest) > len(others)
    odd = sorted(others if is_majority else [*largest, *others], key=_rank)
    commit = t.CommitId(d.generation, tick)
    who = listed(f"rank {member.rank} ({member.id.slot_id})" for member in odd)
    text = f"commit {commit}: replicated values of {who} differ"
    text += f" from those of the other {len(largest)} ranks" if is_majority else " from each other"
    hosts = list(dict.fromkeys(member.id.host for member in odd))
    if suspects := _suspects(d, hosts):
        text += f"; suspect, after another divergence within an hour: {'host' if len(suspects) == 1 else 'hosts'} "
        text += listed(suspects)
    restores = d.policy.divergence == "restore" and isinstance(d.phase, Running | Forming | Waiting)
    if restores:
        text += f"; the job goes back to {_start_text(d, found.equal)}"
    replaced = odd if restores and is_majority else []
    d.note(
        event_file.Divergence,
        commit=list(commit),
        ranks=[_rank(member) for member in odd],
        hosts=hosts,
        groups=[[_rank(member) for member in group] for group in groups],
        replaced=[str(member.id) for member in replaced],
        suspects=suspects,
        text=text,
    )
    search = ValueSearch((largest[0].id, groups[1][0].id), start, tick)
    found = replace(found, text=text)
    if restores:
        _reject(d, tick - 1, found.equal)  # at once: the record has it before anything else happens
        for member in replaced:  # sums have the same order then
            d.put_slot(member.id.slot_id, age=member.age)
        found = replace(found, odd=tuple(member.id for member in replaced), ends_at=d.now + _SEARCH_S)
    d.update_ledger(digests=found)
    _ask(d, search, t.DigestQuestion())


def _ask(d: Draft, search: ValueSearch, question: t.DigestQuestion) -> None:
    _put(d, replace(search, question=question, answers={}))
    d.effects += [t.AskDigests(worker, d.generation, question) for worker in search.workers]


def _put(d: Draft, search: ValueSearch | None) -> None:
    d.update_ledger(digests=replace(d.ledger.digests, search=search))


def answered(d: Draft, worker: Worker, answer: t.DigestAnswer) -> None:
    """Continue the search of the first value that differs."""
    search = d.ledger.digests.search
    if search is None or worker.id not in search.workers or answer.question != search.question:
        return
    search = replace(search, answers={**search.answers, worker.id: answer})
    _put(d, search)
    if len(search.answers) < len(search.workers):
        return
    _put(d, None)
    one, other = (search.answers[worker] for worker in search.workers)
    tick, begin, _ = search.question
    if not tick:
        by_tick = [dict(zip(each.parts[::2], each.parts[1::2], strict=False)) for each in (one, other)]
        common = (tick for tick in sorted(by_tick[0]) if tick in by_tick[1] and search.start < tick <= search.tick)
        if first := next((tick for tick in common if by_tick[0][tick] != by_tick[1][tick]), 0):
            _ask(d, search, t.DigestQuestion(first))
        return
    if one.end != other.end or len(one.parts) != len(other.parts):
        return  # the ranks have different values: their names are compared before a sync
    pairs = enumerate(zip(one.parts, other.parts, strict=True))
    index = next((i for i, (mine, its) in pairs if mine != its), None)
    if index is None:
        return
    if index < len(one.names):
        _name(d, tick, one.names[index])
        return
    size = -(-(one.end - begin) // t.MOST_PARTS)
    _ask(d, search, t.DigestQuestion(tick, begin + index * size, min(one.end, begin + (index + 1) * size)))


def _name(d: Draft, tick: int, value: str) -> None:
    commit = t.CommitId(d.generation, tick)
    d.note(event_file.DivergentValue, commit=list(commit), value=value)
    text = f"{d.ledger.digests.text}; the first value that differs is {value!r}, in commit {commit}"
    d.update_ledger(digests=replace(d.ledger.digests, text=text))


def divergence_lines(m: Membership) -> list[str]:
    """Return the line of the present generation for the status, if its ranks differ."""
    found = m.ledger.digests
    return [found.text] if found.text and found.generation == m.generation else []


def suspect_lines(m: Membership, now: float) -> Iterator[str]:
    """Yield a line for each host that is suspect."""
    hosts = [host for host, at in m.ledger.odd_hosts if now < at + _SUSPECT_S]
    for host in dict.fromkeys(hosts):
        if hosts.count(host) > 1:
            yield f"host {host} is suspect: {hosts.count(host)} divergences within an hour"


def _suspects(d: Draft, hosts: list[str]) -> list[str]:
    """Record the hosts of ranks that differ. Return those that were among such hosts before, within an hour."""
    earlier = tuple((host, at) for host, at in d.ledger.odd_hosts if d.now < at + _SUSPECT_S)
    new = tuple((host, d.now) for host in hosts)
    d.update_ledger(odd_hosts=(*earlier, *new)[-_MOST_ODD:])
    return [host for host in hosts if any(host == known for known, _ in earlier)]


def _rank(member: Worker) -> int:
    assert member.rank is not None
    return member.rank


# -------------------------------------------------------------------------------------------------------------- restore


def _judge(d: Draft, found: Digests) -> Digests:
    """Find the newest commit that is equal on all members, so that they may overwrite the one before it.

    While the job is being stopped, members may differ or be gone, and no world follows: nobody waits for a verdict.
    """
    newest, members = max((tick for _, tick in found.known), default=0), d.members()
    is_whole = is_live(d) and d.world is not None and len(members) == d.world.size
    if newest <= found.compared or not (is_whole or isinstance(d.phase, Stopping)):
        return found
    by_tick = _by_tick(d)
    equal, compared, absent = found.equal, found.compared, found.absent
    for tick in sorted(tick for tick in by_tick if tick > compared):
        if is_whole and found.differs is not None and tick >= found.differs[1]:
            break
        awaited = [member for member in members if member.id not in absent and _is_awaited(member, tick)]
        if d.now >= found.pending_since + d.policy.regroup_timeout_s:
            without = [member for member in awaited if member.ticks >= tick]
            if isinstance(d.phase, Running):  # else they should have left the world, and may have lost a commit
                absent = absent.union(member.id for member in without if not member.digests)
            awaited = [member for member in awaited if member not in without]
        if awaited:
            break
        compared, digests = tick, by_tick[tick]
        are_all = all(m.id.slot_id in digests or m.id in absent or _is_out_of_inputs(m) for m in members)
        if are_all and len(set(digests.values())) == 1:
            equal = tick
    since = inf if compared >= newest else d.now if compared > found.compared else min(found.pending_since, d.now)
    if (equal, compared) != (found.equal, found.compared):
        d.effects.append(t.CommitsCompared(d.generation, equal, compared))
    changed = replace(found, equal=equal, compared=compared, absent=absent, pending_since=since)
    if changed != found:
        d.update_ledger(digests=changed)
    return changed


def _by_tick(d: Draft) -> dict[int, dict[t.SlotId, int]]:
    """Return the digests of the present generation's commits, by tick and slot. Slots of dead members count."""
    found: dict[int, dict[t.SlotId, int]] = {}
    for placement in d.world.members if d.world is not None else ():
        slot_id = placement.worker.slot_id
        for commit, digest in d.slots[slot_id].digests:
            if commit.generation == d.generation:
                found.setdefault(commit.tick, {})[slot_id] = digest
    return found


def _is_out_of_inputs(member: Worker) -> bool:
    return bool(member.digests) and member.digests[-1][2] == t.OUT_OF_INPUTS


def _end_generation(d: Draft, found: Digests) -> None:
    """Replace the workers that differ from most others, and end the generation, when the value is found, or nobody can
    be asked for it any more."""
    if found.ends_at == inf:
        return
    asked = [d.workers.get(name) for name in found.search.workers] if found.search is not None else []
    may_answer = all(w is not None and not (w.gone or w.in_gate or w.ready is not None) for w in asked)
    if asked and may_answer and is_live(d) and d.now < found.ends_at:
        return
    d.update_ledger(digests=replace(found, search=None, odd=(), ends_at=inf))
    if not isinstance(d.phase, Running | Forming | Waiting):
        return
    odd = [worker for name in found.odd if (worker := d.workers.get(name)) is not None and not worker.gone]
    tick = found.differs[1] if found.differs is not None else 0
    replace_workers(d, odd, f"values of its worker differ in commit {t.CommitId(d.generation, tick)}")
    if is_live(d):
        d.broken.append(Failure(t.RootCause(found.text, generation=d.generation), "divergence"))


def reject_unequal(d: Draft) -> None:
    """Reject the commits of the last world that are newer than the newest one that is known to be equal on all of its
    members. Called before the next world is formed. The commit before the newest one in a slot is equal on all."""
    if d.policy.divergence != "restore" or d.world is None or d.world.size == 1:
        return
    found, by_tick, last = d.ledger.digests, _by_tick(d), 0
    slots = [d.slots[placement.worker.slot_id] for placement in d.world.members]
    before = [slot.previous.tick for slot in slots if slot.previous and slot.previous.generation == d.generation]
    proven = max([newest_equal(d), *before])
    without = {member.id.slot_id for member in d.members() if member.id in found.absent or _is_out_of_inputs(member)}
    compared = {placement.worker.slot_id for placement in d.world.members} - without
    for tick in sorted({proven, *by_tick}, reverse=True):
        digests = by_tick.get(tick, {})
        if tick == proven or (compared <= digests.keys() and len(set(digests.values())) == 1):
            last = tick
            break
    newer, others_left = _held(d, last)
    if not newer or not others_left:
        return
    highest = d.ledger.highest
    if last > newest_equal(d):  # known from the commits that are rejected now
        put_equal(d, last)
        found = d.ledger.digests
    _reject(d, last, last)
    if highest != d.ledger.highest and not found.text:
        d.warn(
            f"commit {highest} is not used: it is not known to be equal on all members of generation {d.generation}. "
            f"The job goes back to {_start_text(d, last)}"
        )


def _held(d: Draft, last: int) -> tuple[bool, bool]:
    """Return two flags: commits of the present generation after tick ``last`` are held, and others are held. What a new
    driver presumes of unreachable members (reattach.py), and nobody has reported, does not count."""
    slots = [
        commit
        for slot in d.slots.values()
        for commit in (slot.retained, slot.previous)
        if commit is not None and commit <= slot.sealed
    ]
    ready = [worker.ready for worker in d.ready_workers() if worker.ready is not None]
    held = {*slots, *(commit for each in ready for commit in (each.commit, each.previous))} - {None}
    newer = {commit for commit in held if commit and commit.generation == d.generation and commit.tick > last}
    return bool(newer), bool(held - newer)


def _reject(d: Draft, last: int, newest: int) -> None:
    """Reject the commits of the present generation after tick ``last``. ``newest``: the tick of the newest before."""
    reject(d, t.CommitId(d.generation, last))
    highest = d.ledger.highest
    if highest is not None and highest.generation == d.generation and highest.tick > newest:
        d.update_ledger(highest=accounting.users_commit(d, t.CommitId(d.generation, newest)))


def _start_text(d: Draft, tick: int) -> str:
    return f"commit {t.CommitId(d.generation, tick)}" if tick else f"the begin of generation {d.generation}"
