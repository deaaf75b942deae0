"""Exhaustive search of the register: *all* orders of messages between a few drivers and acceptors, on the real code.

The network is a set of messages that only grows: each may be delivered at any time, any number of times, or never.

- A request reaches one acceptor at any time after it was sent, again and again.
- An answer needs no step of its own: a driver acts on any part of all answers that were ever given to it. A proposer
  leads with any of them, in the order in which it learns most at first, or least. A leader knows none or all of those
  since its last entry: a part of them makes no other decision.
- A refusal only stops a driver, and a driver without answers has stopped as well.
- An acceptor that loses its memory comes back with another identity. The old one is an acceptor that gets no more
  messages, and the new one is there from the beginning. ``forgets`` and ``other_machine`` break this rule: the search
  finds what happens then.

Acceptors that are in the same sets are symmetric, so they may change places in the text of a story.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from itertools import combinations, islice
from typing import Any, Generic, NamedTuple, TypeVar

from elasticstate.core import register
from elasticstate.core.register import FILE, Ballot, Entry, Proposer, Quorum, Version, Vote

_Value = TypeVar("_Value")

FIRST = "A"  # the driver that leads at the beginning
DRIVERS = (FIRST, "B", "C")


@dataclass(frozen=True)
class Bounds:
    """A small register: its acceptors, the sets of them that a leader may want, and how much may happen."""

    acceptors: Quorum
    present: Quorum  # the set that has accepted the value at the beginning
    sets: tuple[Quorum, ...] = ()
    writes: tuple[int, ...] = (2, 2)  # of the first leader, and of the leader of each of ``numbers``
    numbers: tuple[int, ...] = (2,)  # with which later drivers may begin
    ballots: int = 1  # of later drivers
    forgets: int = 0  # acceptors that lose their memory, and keep their identity
    other_machine: str = ""  # a driver that takes the last acceptor for FILE
    before: tuple[str, ...] = ()  # what has happened before all else, as in the text of a story


class Acceptor(NamedTuple):
    """An acceptor, and all answers that it has ever given: what each promise told, and the newest index accepted."""

    vote: Vote = Vote()
    promises: tuple[tuple[Ballot, Entry | None], ...] = ()
    reached: tuple[tuple[Ballot, int], ...] = ()


class State(NamedTuple):
    """All there is. Acceptors, drivers and entries are numbers in tables of the search."""

    acceptors: tuple[int, ...]
    drivers: tuple[int, ...]
    ballots: tuple[Ballot, ...]  # that were begun: requests for a promise
    entries: tuple[int, ...]  # that were written: requests to accept
    forgets: int = 0


class Violation(AssertionError):
    """An invariant that is broken. The text has the shortest story that leads there."""


@dataclass
class Found:
    """Figures of a complete search."""

    states: int = 0
    transitions: int = 0
    depth: int = 0
    leaders: int = 0  # states in which a later driver leads
    changes: set[str] = field(default_factory=set)  # entries that were chosen with another set alone

    def __str__(self) -> str:
        return (
            f"{self.states:,} states ({self.leaders:,} with a later leader), {self.transitions:,} transitions, "
            f"depth {self.depth}; another set is chosen in {', '.join(sorted(self.changes)) or 'no entry'}"
        )


class Numbers(Generic[_Value]):
    """Numbers for equal values, which make small and quick keys."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._values: list[_Value] = []

    def add(self, value: _Value, key: Any = None) -> int:
        number = self._numbers.setdefault(value if key is None else key, len(self._values))
        if number == len(self._values):
            self._values.append(value)
        return number

    def __getitem__(self, number: int) -> _Value:
        return self._values[number]


def newest_chosen(entries: Iterable[Entry], reached: Mapping[str, int]) -> Entry | None:
    """Return the newest entry of a leader that was ever chosen: counted by hand, without the code that is tested.

    ``reached``: the newest index that each acceptor has ever accepted of this leader.
    """
    newest: Entry | None = None
    for entry in entries:
        index, is_chosen = entry.version.index, True
        for quorum in entry.quorums:
            is_chosen &= 2 * sum(reached.get(acceptor, 0) >= index for acceptor in quorum) > len(quorum)
        if is_chosen and (newest is None or index > newest.version.index):
            newest = entry
    return newest


def check_start(leader: Proposer, chosen: Version) -> None:
    """Check where a leader began: not before an entry of a lower ballot that is chosen, earlier or now."""
    began = Version(Ballot(0, ""), 0) if leader.learned is None else leader.learned.version
    assert began >= chosen, f"{_text(chosen)} is chosen, and {leader.identity} leads from {_text(began)}"


class Search:
    """A breadth-first search of all states within ``bounds``."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.found = Found()
        self._acceptors: Numbers[Acceptor] = Numbers()
        self._drivers: Numbers[Proposer] = Numbers()
        self._entries: Numbers[Entry] = Numbers()
        self._known: dict[Any, Any] = {}  # results of pure functions
        self._names = tuple(FILE if self._is_other_file(place) else name for place, name in enumerate(bounds.acceptors))
        sets = (bounds.present, *bounds.sets)
        classes: dict[Any, list[int]] = {}
        for place, name in enumerate(self._names):
            key = place if name == FILE else tuple(name in quorum for quorum in sets)
            classes.setdefault(key, []).append(place)
        self._symmetric = list(classes.values())
        self._class_of = [
            next(n for n, places in enumerate(self._symmetric) if p in places) for p in range(len(self._names))
        ]
        self._places: dict[State, int] = {}
        self._parents, self._choices = array("i"), array("h")

    def run(self) -> Found:
        """Visit all states. Raises Violation."""
        found, first = self.found, self._state_before()
        self._add(first, -1, 0)
        level = deque([(0, first)])
        while level:
            following: deque[tuple[int, State]] = deque()
            for place, state in level:
                self._expand(place, state, following)
            level = following
            found.depth += bool(level)
        return found

    def _add(self, state: State, parent: int, choice: int) -> int:
        place = self._places[state] = len(self._parents)
        self._parents.append(parent)
        self._choices.append(choice)
        self.found.states += 1
        self.found.leaders += any(self._drivers[number]._leads for number in state.drivers[1:])
        return place

    def _expand(self, place: int, state: State, following: deque[tuple[int, State]]) -> None:
        for choice, (what, after) in enumerate(self._successors(state)):
            self.found.transitions += 1
            if after in self._places:
                continue
            try:
                self._check(what[0], after)
            except AssertionError as error:
                raise Violation(f"{error}\n{self.story(place, choice)}") from error
            following.append((self._add(after, place, choice), after))

    def story(self, place: int, *more: int) -> str:
        """Return what has happened on the way to a state."""
        choices: list[int] = list(more)
        while place > 0:
            choices.insert(0, self._choices[place])
            place = self._parents[place]
        state, lines = self._state_before(), list(self.bounds.before)
        for choice in choices:
            what, state = next(islice(self._successors(state), choice, None))
            lines.append(self._text(*what))
        return "\n".join(lines)

    def _text(self, does: str, place: int, what: Ballot | Entry | None = None) -> str:
        who = DRIVERS[place] if does in ("begins", "leads", "writes") else self.bounds.acceptors[place]
        if isinstance(what, Entry):
            sets = " and ".join("".join(quorum) for quorum in what.quorums)
            return f"{who} {does} {_text(what.version)} for {sets}"
        return f"{who} {does} {what.number}{what.proposer}" if what is not None else f"{who} {does}"

    # ------------------------------------------------------------------------------------------------------ invariants

    def _check(self, does: str, state: State) -> None:
        if does not in ("accepts", "leads"):
            return
        drivers = [self._drivers[number] for number in state.drivers]
        leaders = [driver for driver in drivers if driver._leads]
        numbers = [leader.ballot.number for leader in leaders if leader.ballot is not None]
        assert len(set(numbers)) == len(numbers), f"two leaders have one number: {numbers}"
        for place, leader in enumerate(drivers):
            if not leader._leads or leader.ballot is None:
                continue
            reached = self._reached(state, leader.ballot)
            chosen = self._after(0, (leader.ballot, reached, state.entries), self._newest_chosen)
            claim = self._after(state.drivers[place], reached, self._claim)
            assert claim <= chosen, f"{leader.identity} takes {claim} for chosen, and no majority has it"
            for other in leaders:
                if chosen and other.ballot is not None and other.ballot > leader.ballot:
                    check_start(other, Version(leader.ballot, chosen))

    def _newest_chosen(self, _: int, what: tuple[Ballot, tuple[int, ...], tuple[int, ...]]) -> int:
        ballot, indices, entry_numbers = what
        reached: dict[str, int] = {}
        for name, index in zip(self._names, indices, strict=True):
            reached[name] = max(reached.get(name, 0), index)
        entries = [self._entries[number] for number in entry_numbers]
        entry = newest_chosen([entry for entry in entries if entry.version.ballot == ballot], reached)
        if entry is not None and len(entry.quorums) == 1 and set(entry.quorums[0]) != set(self.bounds.present):
            self.found.changes.add(_text(entry.version))
        return 0 if entry is None else entry.version.index

    # ------------------------------------------------------------------------------------------------- what may happen

    def _state_before(self) -> State:
        state = self._first_state()
        for text in self.bounds.before:
            state = {self._text(*what): after for what, after in self._successors(state)}[text]
        return state

    def _first_state(self) -> State:
        """Let the first leader change to the present set, with all acceptors."""
        bounds, leader = self.bounds, Proposer.first(FIRST)
        acceptors: dict[str, Acceptor] = {}
        entry = leader.write(_value(leader))
        while True:
            for name in entry.acceptors:
                vote, _ = register.accept(acceptors.get(name, Acceptor()).vote, entry)
                acceptors[name] = Acceptor(vote, (), ((entry.version.ballot, entry.version.index),))
                leader.accepted(name, entry.version)
            if entry.quorums == (bounds.present,):
                break
            entry = leader.write(_value(leader), bounds.present)
        self._first_index = entry.version.index
        others = [Proposer(identity) for identity in DRIVERS[1 : 1 + bounds.ballots]]
        return State(
            tuple(self._acceptors.add(acceptors.get(name, Acceptor())) for name in bounds.acceptors),
            tuple(self._add_driver(driver) for driver in (leader, *others)),
            (),
            (self._entries.add(entry),),
            bounds.forgets,
        )

    def _successors(self, state: State) -> Iterator[tuple[tuple[Any, ...], State]]:
        """Yield all that may happen: its description, and the state after it."""
        drivers = [self._drivers[number] for number in state.drivers]
        awaited = tuple(driver.ballot for driver in drivers if driver.ballot is not None and not driver._leads)
        seen = set()
        for place, number in enumerate(state.acceptors):
            if (number, self._class_of[place]) in seen:  # as a symmetric one
                continue
            seen.add((number, self._class_of[place]))
            for what, after in self._after(number, (state.ballots, awaited, state.entries), self._deliver, place):
                yield (what[0], place, *what[1:]), self._with_acceptor(state, place, after)
            if state.forgets and self._acceptors[number].vote != Vote():
                forgetful = self._acceptors.add(self._acceptors[number]._replace(vote=Vote()))
                yield (
                    ("forgets", place),
                    self._with_acceptor(state, place, forgetful)._replace(forgets=state.forgets - 1),
                )
        for place, (number, driver) in enumerate(zip(state.drivers, drivers, strict=True)):
            if driver._leads:
                yield from self._writes(state, place, number)
                continue
            if len(state.ballots) < self.bounds.ballots:
                yield from self._begins(state, place, driver)
            if driver.ballot is not None:
                answers = tuple(self._after(acceptor, driver.ballot, self._answers) for acceptor in state.acceptors)
                for leader in self._after(number, answers, self._lead):
                    then = self._with_driver(state, place, leader)
                    yield ("leads", place), self._without_answers(then, driver.ballot)

    def _deliver(self, number: int, requests: tuple[Any, ...], place: int) -> list[tuple[tuple[Any, ...], int]]:
        """Return what becomes of an acceptor with each of the requests that changes something."""
        ballots, awaited, entries = requests
        results: list[tuple[tuple[Any, ...], int]] = [
            (("promises", ballot), self._promise(number, ballot, ballot in awaited))
            for ballot in ballots
            if self._reaches(ballot, place)
        ]
        results += [
            (("accepts", entry), self._accept(number, entry))
            for entry in map(self._entries.__getitem__, entries)
            if self._reaches(entry.version.ballot, place) and self._names[place] in entry.acceptors
        ]
        return [(what, after) for what, after in results if after != number]

    def _without_answers(self, state: State, ballot: Ballot | None) -> State:
        """Forget the promises of a ballot: its driver does not need them any more."""
        return self._with_acceptors(state, [self._after(n, ballot, self._forget_promise) for n in state.acceptors])

    def _begins(self, state: State, place: int, driver: Proposer) -> Iterator[tuple[tuple[Any, ...], State]]:
        for number in self.bounds.numbers:
            if driver.ballot is None or number > driver.ballot.number:
                after = copy(driver)
                ballot = after.begin(number)
                then = self._without_answers(self._with_driver(state, place, self._add_driver(after)), driver.ballot)
                yield ("begins", place, ballot), then._replace(ballots=tuple(sorted({*state.ballots, ballot})))

    def _writes(self, state: State, place: int, number: int) -> Iterator[tuple[tuple[Any, ...], State]]:
        """Let a leader write, when it knows of no new answer, or of all."""
        ballot = self._drivers[number].ballot
        reached = self._reached(state, ballot)
        results = {*self._after(number, (), self._write), *self._after(number, reached, self._write)}
        for after, entry in sorted(results):
            then = self._with_driver(state, place, after)
            then = then._replace(entries=tuple(sorted({*state.entries, entry})))
            yield ("writes", place, self._entries[entry]), then

    def _reaches(self, ballot: Ballot, place: int) -> bool:
        """Return False for the file of another machine."""
        other = self.bounds.other_machine
        if not other or self._names[place] != FILE:
            return True
        return self._is_other_file(place) == (ballot.proposer == other)

    def _is_other_file(self, place: int) -> bool:
        return bool(self.bounds.other_machine) and place == len(self.bounds.acceptors) - 1

    def _with_acceptor(self, state: State, place: int, number: int) -> State:
        acceptors = list(state.acceptors)
        acceptors[place] = number
        return self._with_acceptors(state, acceptors)

    def _with_acceptors(self, state: State, acceptors: list[int]) -> State:
        for places in self._symmetric:
            for at, ordered in zip(places, sorted([acceptors[at] for at in places]), strict=True):
                acceptors[at] = ordered
        return State(tuple(acceptors), *state[1:])

    def _with_driver(self, state: State, place: int, number: int) -> State:
        return state._replace(drivers=(*state.drivers[:place], number, *state.drivers[place + 1 :]))

    # ---------------------------------------------------------------------------------------- the code that is searched

    def _after(self, number: int, what: Any, function: Any, *more: Any) -> Any:
        """Return the result of a pure function, from memory if it is known."""
        key = (function.__name__, number, what, *more)
        try:
            return self._known[key]
        except KeyError:
            result = self._known[key] = function(number, what, *more)
            return result

    def _promise(self, number: int, ballot: Ballot, is_awaited: bool) -> int:
        acceptor = self._acceptors[number]
        vote, is_promised = register.prepare(acceptor.vote, ballot)
        promises = dict(acceptor.promises)
        if not is_promised or (vote == acceptor.vote and (ballot in promises or not is_awaited)):
            return number
        if is_awaited:
            promises[ballot] = vote.accepted
        return self._acceptors.add(Acceptor(vote, _in_order(promises), acceptor.reached))

    def _accept(self, number: int, entry: Entry) -> int:
        acceptor = self._acceptors[number]
        vote, is_accepted = register.accept(acceptor.vote, entry)
        if not is_accepted:
            return number
        reached, (ballot, index) = dict(acceptor.reached), (entry.version.ballot, entry.version.index)
        reached[ballot] = max(index, reached.get(ballot, 0))
        return self._acceptors.add(Acceptor(vote, acceptor.promises, _in_order(reached)))

    def _forget_promise(self, number: int, ballot: Ballot) -> int:
        acceptor = self._acceptors[number]
        return self._acceptors.add(acceptor._replace(promises=tuple(p for p in acceptor.promises if p[0] != ballot)))

    def _answers(self, number: int, ballot: Ballot) -> tuple[Entry | None, ...]:
        promises = dict(self._acceptors[number].promises)
        return (promises[ballot],) if ballot in promises else ()

    def _index(self, number: int, ballot: Ballot) -> int:
        return dict(self._acceptors[number].reached).get(ballot, 0)

    def _reached(self, state: State, ballot: Ballot | None) -> tuple[int, ...]:
        return tuple(self._after(acceptor, ballot, self._index) for acceptor in state.acceptors)

    def _lead(self, number: int, answers: tuple[tuple[Entry | None, ...], ...]) -> tuple[int, ...]:
        """Return what becomes of a proposer that leads, with each part of the answers."""
        known = [(name, answer[0]) for name, answer in zip(self._names, answers, strict=True) if answer]
        first = Version(Ballot(0, ""), 0)
        known.sort(key=lambda answer: first if answer[1] is None else answer[1].version)
        leaders = set()
        for size in range(1, len(known) + 1):
            for part in combinations(known, size):
                for order in (part, part[::-1]):
                    driver = copy(self._drivers[number])
                    assert driver.ballot is not None
                    for name, accepted in order:
                        driver.promised(name, driver.ballot, accepted)
                    if driver.is_leader:
                        leaders.add(self._add_driver(driver))
        return tuple(sorted(leaders))

    def _write(self, number: int, reached: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """Return what becomes of a leader that writes, and its entry, for each set that it may want."""
        leader, bounds = self._with_answers(number, reached), self.bounds
        assert leader.ballot is not None
        index = leader.entry.version.index if leader.entry is not None else 0
        most = self._first_index + bounds.writes[0]
        if leader.identity != FIRST:
            most = bounds.writes[1 + bounds.numbers.index(leader.ballot.number)]
        if index == most:
            return ()
        results = set()
        for wanted in (None, *bounds.sets):
            after = copy(leader)
            entry = after.write(_value(after), wanted)
            results.add((self._add_driver(after), self._entries.add(entry)))
        return tuple(results)

    def _claim(self, number: int, reached: tuple[int, ...]) -> int:
        """Return the index that a leader with all answers takes for chosen."""
        chosen = self._with_answers(number, reached).chosen
        return 0 if chosen is None else chosen.index

    def _with_answers(self, number: int, reached: tuple[int, ...]) -> Proposer:
        leader = copy(self._drivers[number])
        assert leader.ballot is not None
        for name, index in zip(self._names, reached, strict=False):
            if index:
                leader.accepted(name, Version(leader.ballot, index))
        return leader

    def _add_driver(self, driver: Proposer) -> int:
        """Return the number of a driver. It forgets what it can learn again, or does not need any more."""
        driver = copy(driver)
        driver._promised, driver._accepted, driver.chosen = frozenset(), {}, None
        key = (driver.identity, driver.ballot, driver._leads, driver.learned, driver.entry, driver._base, driver._runs)
        return self._drivers.add(driver, key)


def _value(leader: Proposer) -> bytes:
    """Return a value that no other entry has."""
    assert leader.ballot is not None
    return _text(Version(leader.ballot, 1 if leader.entry is None else leader.entry.version.index + 1)).encode()


def _text(version: Version) -> str:
    return f"{version.ballot.number}{version.ballot.proposer}.{version.index}"


def _in_order(answers: dict[Ballot, _Value]) -> tuple[tuple[Ballot, _Value], ...]:
    return tuple(sorted(answers.items(), key=lambda answer: answer[0]))
