"""Silent divergence: members whose commits have different replicated values, found by the digests that they send.

A digest covers all commits of a rank since some tick (state/commit_digests.py), so equal digests mean equal commits.
The core compares the digests of one tick and one begin. Once in a generation it names the ranks that differ, then asks
one worker of each side for the first value that differs: first for the digests of its last commits, then for the
checksums of parts of the values of one commit, until a part is one value. No collective runs, and nothing waits.

An error before an all-reduce makes all ranks equally wrong, and is not found.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from elasticstate.core import event_file, types as t
from elasticstate.core.state import Digests, Draft, Membership, ValueSearch, Worker
from elasticstate.core.types import listed

_WAIT_S = 5.0  # for the digests of the other members; agents send them each second
CAUSES = (
    "Memory with bit errors, a module without init_sync or with buffers that no collective synchronizes, and trained "
    "values that a script changes on some ranks alone cause it. Ranks on unlike processors may differ in the last bit. "
    "Values that differ by design: state.exclude_from_check(name)"
)
_KEPT = 16  # digests of each worker, and of the world


def digests_reported(d: Draft, worker: Worker, digests: tuple[tuple[int, int, int], ...]) -> None:
    """Compare new digests of a member of the present world with those of the others."""
    found = d.ledger.digests
    if found.generation != d.generation:
        found = Digests(d.generation)
    if found.text or d.policy.divergence == "off":
        return
    d.put(worker, digests=(*worker.digests, *digests)[-_KEPT:])
    if all(found.known.get((start, tick)) == digest for start, tick, digest in digests):
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
    if found.differs is None or found.text or found.generation != d.generation:
        return
    groups: dict[int, list[Worker]] = {}
    for member in d.members():
        if not member.keeps:
            continue
        digest = next((digest for *key, digest in member.digests if tuple(key) == found.differs), None)
        if digest is not None:
            groups.setdefault(digest, []).append(member)
        elif d.now < found.since + _WAIT_S and all(tick < found.differs[1] for _, tick, _ in member.digests):
            return
    if len(groups) > 1:
        _report(d, found, sorted(groups.values(), key=lambda group: (-len(group), group[0].rank)))
    else:
        d.update_ledger(digests=replace(found, differs=None))  # those that differed are gone


def comparison_deadlines(d: Draft) -> Iterator[tuple[str, float]]:
    """Yield the time from which the digests of further members are not awaited."""
    found = d.ledger.digests
    if found.differs is not None and not found.text and found.generation == d.generation:
        yield "digests", found.since + _WAIT_S


def _report(d: Draft, found: Digests, groups: list[list[Worker]]) -> None:
    """Write the event, and begin to search the value. ``groups``: members with equal digests, the most first."""
    assert found.differs is not None
    start, tick = found.differs
    largest, others = groups[0], [member for group in groups[1:] for member in group]
    is_majority = len(largest) > len(others)
    odd = sorted(others if is_majority else [*largest, *others], key=_rank)
    commit = t.CommitId(d.generation, tick)
    text = f"commit {commit}: replicated values of {_who(odd)} differ"
    text += f" from those of the other {len(largest)} ranks" if is_majority else " from each other"
    d.note(
        event_file.Divergence,
        commit=list(commit),
        ranks=[_rank(member) for member in odd],
        hosts=list(dict.fromkeys(member.id.host for member in odd)),
        groups=[[_rank(member) for member in group] for group in groups],
        text=text,
    )
    search = ValueSearch((largest[0].id, groups[1][0].id), start, tick)
    d.update_ledger(digests=replace(found, text=text))
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


def _rank(member: Worker) -> int:
    assert member.rank is not None
    return member.rank


def _who(members: list[Worker]) -> str:
    return listed(f"rank {member.rank} ({member.id.slot_id})" for member in members)
