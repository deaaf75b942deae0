"""Cut links between hosts that the driver reaches: how they are found, and which part of the workers trains on.

The agents of hosts probe each other when a member has not moved for a part of ``--heartbeat-timeout``, or a generation
has failed and no death explains it (docs/decisions/unreachable-hosts.md). A link counts as cut when the other host,
which gave no answer, has answered its own order: else that host may stand still as a whole.

The next world has the largest part of the workers whose hosts can all reach each other and that has the job's state.
The other hosts are *apart*: their workers join again like newcomers, but not before the end of their host's cooldown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import chain

from msgspec.structs import replace

from elasticstate.core import event_file, types as t
from elasticstate.core.commits import (
    Copies,
    copies_on,
    has_job_state,
    held,
    newest,
    newest_whole,
    only_holder,
    reachable,
)
from elasticstate.core.state import (
    DOUBTED,
    Draft,
    Failure,
    Finishing,
    Forming,
    Link,
    Membership,
    Over,
    Running,
    Worker,
    is_live,
    living_members,
)
from elasticstate.core.types import listed

# --------------------------------------------------------------------------------------------------------------- probes


_ANSWER = 0.4  # for an answer, and at least between two orders
_LATE = 0.25  # more, for agents that do not send what they have found
_MOST_PEERS = 64  # that one agent probes at a time; more hosts take turns


def probe(d: Draft) -> None:
    """Order probes: of all links of a world that may stand still because one is cut, and of those that are cut."""
    awaits_others = isinstance(d.phase, Forming) and not is_live(d)
    if awaits_others or isinstance(d.phase, Finishing | Over):
        return
    peers: Peers = {}
    for host, peer in d.ledger.links.cut:
        if d.hosts[host].agent == d.hosts[peer].agent == "joined":
            peers.setdefault(host, {})[peer] = None
    if d.now >= _next_for_all_at(d) and _is_doubted(d):
        _order_all(d, d.members(), peers)
    elif d.now >= _next_at(d):
        _order(d, peers)


def probe_all(d: Draft) -> None:
    """Order probes of all links between the hosts of a world that has ended, and whose members stay."""
    _order_all(d, [worker for worker in d.members() if not worker.draining], {})


def link_deadlines(d: Draft) -> Iterator[tuple[str, float]]:
    """Yield the times of the next order, and those from which hosts that were apart may join."""
    links = d.ledger.links
    if isinstance(d.phase, Finishing | Over):
        return
    if links.cut or links.asked:
        yield "probes of cut links", _next_at(d)
    if _next_for_all_at(d) > d.now and _is_doubted(d):
        yield "probes of all links", _next_for_all_at(d)
    for host, until in links.apart.items():
        yield f"host {host} was apart", until


def explains_nothing_yet(d: Draft, phase: Forming) -> bool:
    """Return True if the generation has failed without a known cause, and no probes were ordered since then."""
    failure = phase.failure
    is_unexplained = failure is not None and failure.kind == "reported" and not failure.hang
    return is_unexplained and d.ledger.links.all_asked_at < phase.since


def are_awaited(d: Draft, phase: Forming) -> bool:
    """Return True while the next world waits for answers, which may say who cannot be in it."""
    is_due = phase.failure is not None and phase.failure.kind in ("reported", "link")
    return is_due and bool(d.ledger.links.asked) and d.now < answers_until(d)


def answers_until(d: Draft) -> float:
    """Return the time until which agents may answer the last order."""
    return d.ledger.links.asked_at + (_ANSWER + _LATE) * d.policy.heartbeat_timeout_s


def _next_at(d: Draft) -> float:
    links = d.ledger.links
    return answers_until(d) if links.asked else links.asked_at + _ANSWER * d.policy.heartbeat_timeout_s


def _next_for_all_at(d: Draft) -> float:
    """Return the time of the next order for all links: it does not wait for the answers about links that are cut."""
    links = d.ledger.links
    if links.all_asked_at == links.asked_at:
        return _next_at(d)
    return links.all_asked_at + _ANSWER * d.policy.heartbeat_timeout_s


def _is_doubted(d: Draft) -> bool:
    """Return True if its agent has seen that a member of the world has not moved for too long."""
    if not (d.still and is_live(d)):
        return False
    limit_s, places = DOUBTED * d.policy.heartbeat_timeout_s, (t.Place.REGROUP, t.Place.TRAIN)
    return any(w.still_s >= limit_s and w.place in places and w.ready is None for w in d.members())


Peers = dict[str, dict[str, None]]
"""By host: the hosts that its agent probes."""


def _order_all(d: Draft, members: list[Worker], peers: Peers) -> None:
    """Order probes of all links between the hosts of these members, and of ``peers``.

    A host probes those that follow it in a ring. If they are too many, each order has some of them. All hosts get the
    order, also without a peer.
    """
    ring = [name for name in {member.id.host: None for member in members} if d.hosts[name].agent == "joined"]
    half = len(ring) // 2
    turns = max(1, -(-half // _MOST_PEERS))
    for at, host in enumerate(ring if half else ()):
        its = peers.setdefault(host, {})
        for distance in range(1 + d.ledger.links.number % turns, half + 1, turns):
            if 2 * distance < len(ring) or at < half:  # else both hosts of a pair would probe it
                its[ring[(at + distance) % len(ring)]] = None
    d.update_ledger(links=replace(d.ledger.links, all_asked_at=d.now))
    _order(d, peers)


def _order(d: Draft, peers: Peers) -> None:
    links = d.ledger.links
    if peers:
        asked = {host: tuple(its) for host, its in peers.items()}
        limit_s = _ANSWER * d.policy.heartbeat_timeout_s
        d.effects.append(t.ProbeLinks(links.number + 1, tuple(asked.items()), limit_s))
        links = replace(links, number=links.number + 1, asked=asked, unanswered=(), asked_at=d.now)
        d.update_ledger(links=links)
    elif links.asked and d.now >= answers_until(d):
        d.update_ledger(links=replace(links, asked={}, unanswered=()))


def probed(d: Draft, event: t.LinksProbed) -> None:
    """Record the answer of an agent. A cut link in the present world breaks its generation."""
    links = d.ledger.links
    if event.number != links.number or event.host not in links.asked:
        return
    cut, unanswered = dict(links.cut), list(links.unanswered)
    for peer in links.asked[event.host]:
        link = (event.host, peer)
        if peer in event.cut and link not in cut:
            unanswered.append(link)
        elif peer not in event.cut and link in cut:
            d.note(event_file.LinkRestored, host=event.host, peer=peer, seconds=round(d.now - cut.pop(link), 3))
    asked = {host: peers for host, peers in links.asked.items() if host != event.host}
    hosts = {worker.id.host for worker in d.members()}
    for link in [link for link in unanswered if link[1] not in asked]:
        unanswered.remove(link)
        cut[link] = d.now
        d.note(event_file.LinkCut, host=link[0], peer=link[1])
        if hosts.issuperset(link) and not isinstance(d.phase, Finishing):
            d.broken.append(Failure(t.RootCause(text_of(link), generation=d.generation), "link"))
    d.update_ledger(links=replace(links, cut=cut, asked=asked, unanswered=tuple(unanswered)))


def host_lost(d: Draft, host: str) -> None:
    """Forget the links of a host whose agent is lost: when it is back, perhaps at another address, they are tried."""
    links = d.ledger.links
    if links.asked or links.cut or links.apart:
        cut = {link: since for link, since in links.cut.items() if host not in link}
        apart = {name: until for name, until in links.apart.items() if name != host}
        pairs = ((name, tuple(peer for peer in peers if peer != host)) for name, peers in links.asked.items())
        asked = {name: peers for name, peers in pairs if name != host}
        unanswered = tuple(link for link in links.unanswered if host not in link)
        d.update_ledger(links=replace(links, cut=cut, asked=asked, unanswered=unanswered, apart=apart))


# ---------------------------------------------------------------------------------------------------------------- parts


_MOST_EXACT = 20  # hosts with cut links, of which the best part is found by an exact search


def beyond(d: Draft) -> frozenset[str]:
    """Return the hosts whose workers are not in the next world because of links. A host that was apart does not join a
    world that trains before the end of its cooldown."""
    trains = isinstance(d.phase, Running)
    return cut_off(d).union(host for host, until in d.ledger.links.apart.items() if trains and d.now < until)


def cut_off(m: Draft | Membership) -> frozenset[str]:
    """Return the hosts that cannot reach a host of the next world: that of the members while they train, else of the
    largest part of the READY workers."""
    if not m.ledger.links.cut:
        return frozenset()
    members = {worker.id.host for worker in living_members(m)} if isinstance(m.phase, Running) else set()
    behind = _behind(m, members)
    found = [w for w in m.workers.values() if w.ready is not None and not w.gone and w.id.host not in behind]
    ready = [worker for worker in found if not worker.draining]
    if members:
        return behind | _behind(m, members | _largest_part(m, ready, ready))
    if m.shards.layouts:
        copies = copies_on(m, reachable(m))
        return _behind(m, _largest_part(m, ready, _holders(m, ready), copies))
    late = only_holder([worker for worker in found if worker.draining], ready)
    ready += [late] if late is not None else []
    return _behind(m, _largest_part(m, ready, _holders(m, ready)))


def enemies(m: Draft | Membership, host: str) -> set[str]:
    """Return the hosts to which the link of this host is cut, in either direction."""
    return {name for link in m.ledger.links.cut if host in link for name in link if name != host}


def reason(m: Draft | Membership, host: str) -> str:
    """Return why this host is apart."""
    return listed((text_of(link) for link in m.ledger.links.cut if host in link), "; ", 3)


def text_of(link: Link) -> str:
    host, peer = link
    return f"host {host} gets no answer from host {peer}"


def remedy(m: Draft | Membership) -> str:
    """Return the user's remedy, if hosts cannot reach each other."""
    return "Let TCP connections between the hosts pass to all ports" if m.ledger.links.cut else ""


def lines(m: Draft | Membership, now: float) -> list[str]:
    """Return one line for each cut link."""
    return [f"{text_of(link)}, for {now - since:.1f} s" for link, since in m.ledger.links.cut.items()]


def _behind(m: Draft | Membership, hosts: Set[str]) -> frozenset[str]:
    """Return the hosts outside of ``hosts`` to which a link of one of them is cut."""
    found = (link for link in m.ledger.links.cut if not hosts.isdisjoint(link))
    return frozenset(chain.from_iterable(found)) - hosts


def _holders(m: Draft | Membership, ready: list[Worker]) -> list[Worker]:
    """Return the READY workers of which one must be in the next world, so that no commit that all members have sealed
    is lost: those of the newest world that had the job's state there; without any, those with the newest commit. In a
    sharded job no worker needs to have that: agents hold it."""
    best = newest(ready)
    of_world = [w for w in ready if has_job_state(m, w)]
    return of_world or [w for w in ready if held(w) == best or m.shards.layouts]


def _largest_part(
    m: Draft | Membership, workers: list[Worker], holders: Sequence[Worker], copies: Copies | None = None
) -> set[str]:
    """Return the hosts of the most workers, up to ``--max-np``, whose hosts can all reach each other, with a holder.

    ``copies``: of the shards of commits. The part must be able to read a commit of them, if a part can to which no host
    can be added. Of equal parts, that with the oldest worker with the newest commit; then that of the oldest workers.
    """
    holding = {worker.id for worker in holders}
    on: dict[str, list[Worker]] = {}
    for worker in workers:
        on.setdefault(worker.id.host, []).append(worker)
    foes = {host: found for host in on if (found := enemies(m, host) & on.keys())}
    free = on.keys() - foes.keys()

    def size(part: Set[str]) -> tuple[bool, bool, int]:
        inside = [worker for host in part | free for worker in on[host]]
        can_read = copies is None or newest_whole(m, copies, _behind(m, part | free)) is not None
        return can_read, any(worker.id in holding for worker in inside), m.policy.fitting(len(inside))

    def preference(part: Set[str]) -> tuple[tuple[t.CommitId, int], list[int], list[int]]:
        inside = [worker for host in part | free for worker in on[host]]
        best = max((held(worker), -worker.age) for worker in inside)
        ages = [-age for age in sorted(worker.age for worker in inside)]
        return best, ages, [-order for order in sorted(m.hosts[host].order for host in part)]

    if not foes:
        return set(on)
    parts = list(_parts(foes)) if len(foes) <= _MOST_EXACT else _greedy_parts(foes, on, holding)
    sizes = list(map(size, parts))
    return free | max((part for part, found in zip(parts, sizes, strict=True) if found == max(sizes)), key=preference)


def _parts(foes: Mapping[str, set[str]]) -> Iterator[set[str]]:
    """Yield all largest sets of hosts without foes in the set, and some smaller ones."""

    def within(hosts: set[str]) -> Iterator[set[str]]:
        worst = max(sorted(hosts), key=lambda host: len(foes[host] & hosts), default="")
        if not hosts or not foes[worst] & hosts:
            yield hosts
            return
        yield from within(hosts - {worst})
        yield from within(hosts - foes[worst])

    yield from within(set(foes))


def _greedy_parts(
    foes: Mapping[str, set[str]], on: Mapping[str, list[Worker]], holders: set[t.WorkerId]
) -> list[set[str]]:
    """Return sets of hosts without foes in the set: those with few foes, then those with many workers, come first.

    One set begins with a host that has a holder, if any.
    """
    order = sorted(foes, key=lambda host: (len(foes[host]), -len(on[host]), min(w.age for w in on[host])))
    of_holders = [host for host in order if any(worker.id in holders for worker in on[host])]
    return [_filled([], order, foes), _filled(of_holders[:1], order, foes)]


def _filled(first: list[str], order: list[str], foes: Mapping[str, set[str]]) -> set[str]:
    part: set[str] = set()
    for host in (*first, *order):
        if part.isdisjoint(foes[host]):
            part.add(host)
    return part
