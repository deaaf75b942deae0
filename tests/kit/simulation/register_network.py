"""Random schedules of the register: agents and drivers on several hosts, and a network that loses and repeats messages.

Each host has an agent, whose identity changes with its memory, and a file, which only a driver on that host can use.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from elasticstate.core.register import (
    Ballot,
    Candidate,
    Entry,
    Proposer,
    Version,
    Vote,
    accept,
    choose_acceptors,
    prepare,
)
from tests.kit.simulation.register_search import check_start, newest_chosen

MOST_MESSAGES = 60


@dataclass
class Driver:
    """A driver, and its host. A driver that is lost or dead does nothing any more."""

    proposer: Proposer
    host: str
    has_led: bool = False


class Message(NamedTuple):
    """A request to an acceptor, or with ``answer`` what it answered."""

    driver: Driver
    acceptor: str
    request: Ballot | Entry
    answer: Vote | None = None
    is_refused: bool = False


class Network:
    """All that there is, and an oracle: what each acceptor has ever accepted."""

    def __init__(self, rng: random.Random, reached: Counter[str]) -> None:
        self.rng, self.reached = rng, reached
        self.hosts = [f"h{number}" for number in range(rng.choice((3, 4, 6)))]
        self.is_large = len(self.hosts) == 6
        self.racks = {host: rng.choice(("", "r", "s")) for host in self.hosts}
        self.agents = {host: f"{host}.1" for host in self.hosts}
        self.votes = {name: Vote() for name in (*self.agents.values(), *(f"file of {host}" for host in self.hosts))}
        self.messages: list[Message] = []
        self.entries: dict[Ballot, list[Entry]] = {}
        self.accepted: dict[Ballot, dict[str, int]] = {}
        self.started = 1
        host = rng.choice(self.hosts)
        self.drivers = [Driver(Proposer.first("d1", file=f"file of {host}"), host, has_led=True)]
        self.led = [self.drivers[0].proposer]

    # ---------------------------------------------------------------------------------------------------- what happens

    def step(self) -> None:
        kind = self.rng.random()
        if kind < 0.8 and self.messages:
            self.deliver()
        elif kind < 0.98:
            self.act(self.rng.choice(self.drivers))
        elif kind < 0.992 and len(self.drivers) < 4:
            self.start()
        elif kind < 0.995 and len(self.drivers) > 1:
            self.drivers.remove(self.rng.choice(self.drivers))
        elif kind < 0.997:
            self.forget(self.rng.choice(self.hosts))

    def start(self) -> None:
        self.started += 1
        self.drivers.append(Driver(Proposer(f"d{self.started}"), self.rng.choice(self.hosts)))

    def forget(self, host: str) -> None:
        """Let an agent lose its memory: the next one is another acceptor."""
        del self.votes[self.agents[host]]
        self.agents[host] = f"{host}.{int(self.agents[host].partition('.')[2]) + 1}"
        self.votes[self.agents[host]] = Vote()
        self.reached["memory lost"] += 1

    def act(self, driver: Driver) -> None:
        """Let a driver begin, write, or repeat what has no answer."""
        proposer = driver.proposer
        if proposer.is_lost:
            self.drivers.remove(driver)
            if not self.drivers:
                self.start()
        elif not driver.has_led:
            if proposer.ballot is None or self.rng.random() < 0.3:
                proposer.begin(proposer.next_number + self.rng.choice((0, 0, 1)))
            assert proposer.ballot is not None
            for acceptor in (*self.agents.values(), f"file of {driver.host}"):
                self.messages.append(Message(driver, acceptor, proposer.ballot))
        elif proposer.entry is not None and proposer.chosen != proposer.entry.version and self.rng.random() < 0.6:
            for acceptor in proposer.missing():
                self.messages.append(Message(driver, acceptor, proposer.entry))
        else:
            self.write(driver)

    def write(self, driver: Driver) -> None:
        proposer, wanted = driver.proposer, None
        is_free = proposer.chosen is not None  # of a change that an earlier leader has begun
        before = proposer.entry
        if self.rng.random() < 0.6:
            wanted = choose_acceptors(
                proposer.present, self.candidates(), 60 if self.is_large else 3, f"file of {driver.host}"
            )
        entry = proposer.write(b"", wanted)
        self.entries.setdefault(entry.version.ballot, []).append(entry)
        self.reached["five acceptors"] += len(entry.acceptors) == 5
        if before is not None and is_free and len(before.quorums) == len(entry.quorums) == 2:
            self.reached["redirected"] += before.quorums[0] == entry.quorums[0] and before.quorums != entry.quorums
        for acceptor in entry.acceptors:
            self.messages.append(Message(driver, acceptor, entry))

    def candidates(self) -> list[Candidate]:
        """Return the agents that are connected to a driver now."""
        hosts = [host for host in self.hosts if self.rng.random() < 0.8]
        return [Candidate(self.agents[host], host, self.racks[host]) for host in hosts]

    # ----------------------------------------------------------------------------------------------------- the network

    def deliver(self) -> None:
        """Deliver a message. It may come again later; when there are many, one of them is lost."""
        place = self.rng.randrange(len(self.messages))
        message = self.messages[place]
        if self.rng.random() < 0.7 or len(self.messages) > MOST_MESSAGES:
            del self.messages[place]
        if len(self.messages) > MOST_MESSAGES:
            del self.messages[self.rng.randrange(len(self.messages))]
        if message.answer is None:
            self.ask(message)
        elif message.driver in self.drivers:
            self.answer(message)

    def ask(self, message: Message) -> None:
        acceptor, request = message.acceptor, message.request
        is_file = acceptor.startswith("file of ")
        if acceptor not in self.votes or (is_file and acceptor != f"file of {message.driver.host}"):
            return
        if isinstance(request, Ballot):
            vote, is_done = prepare(self.votes[acceptor], request)
        else:
            vote, is_done = accept(self.votes[acceptor], request)
        self.votes[acceptor] = vote
        self.messages.append(message._replace(answer=vote, is_refused=not is_done))
        if is_done and isinstance(request, Entry):
            indices = self.accepted.setdefault(request.version.ballot, {})
            indices[acceptor] = max(request.version.index, indices.get(acceptor, 0))
            self.check()

    def answer(self, message: Message) -> None:
        proposer, vote, acceptor = message.driver.proposer, message.answer, message.acceptor
        assert vote is not None
        if message.is_refused:
            assert vote.promised is not None
            proposer.refused(vote.promised)
            is_superseded = proposer.ballot is not None and vote.promised > proposer.ballot
            assert proposer.is_lost or not (message.driver.has_led and is_superseded)
            self.reached["leader refused"] += proposer.is_lost
        elif isinstance(message.request, Ballot):
            proposer.promised(acceptor, message.request, vote.accepted)
        else:
            proposer.accepted(acceptor, message.request.version)
        if proposer.is_leader and not message.driver.has_led:
            message.driver.has_led = True
            self.led.append(proposer)
            assert proposer.learned is not None
            self.reached["takeover"] += 1
            self.reached["takeover during a change"] += proposer.is_changing
        self.check()

    # ------------------------------------------------------------------------------------------------------ the oracle

    def newest_chosen(self, ballot: Ballot | None) -> Version | None:
        if ballot is None:
            return None
        entry = newest_chosen(self.entries.get(ballot, ()), self.accepted.get(ballot, {}))
        return None if entry is None else entry.version

    def check(self) -> None:
        ballots = [leader.ballot for leader in self.led if leader.ballot is not None]
        assert len({ballot.number for ballot in ballots}) == len(ballots)
        for leader in self.led:
            chosen = self.newest_chosen(leader.ballot)
            if leader.chosen is not None:
                assert chosen is not None
                assert leader.chosen <= chosen
            for other in self.led:
                if chosen is not None and other.ballot is not None and other.ballot > chosen.ballot:
                    check_start(other, chosen)

    def heal(self) -> None:
        """Check that a driver with all acceptors that have their memory leads, if they are enough, and can change."""
        driver = Proposer("last")
        ballot = driver.begin(
            1 + max(vote.promised.number for vote in self.votes.values() if vote.promised is not None)
        )
        for name, vote in self.votes.items():
            self.votes[name], is_promised = prepare(vote, ballot)
            assert is_promised
            driver.promised(name, ballot, vote.accepted)
        if driver.learned is None:
            chosen = [self.newest_chosen(leader.ballot) for leader in self.led]
            assert not any(chosen), chosen  # the first file has all that was ever chosen
            return
        living = [sum(name in self.votes for name in quorum) > len(quorum) // 2 for quorum in driver.learned.quorums]
        assert driver.is_leader == all(living)
        if not driver.is_leader:
            self.reached["too many lost"] += 1
            return
        self.led.append(driver)
        self.check()
        file = f"file of {self.hosts[0]}"
        for _ in range(4):
            entry = driver.write(b"", (file,))
            self.entries.setdefault(entry.version.ballot, []).append(entry)
            for name in entry.acceptors:
                if name in self.votes:
                    self.votes[name], is_accepted = accept(self.votes[name], entry)
                    assert is_accepted
                    self.accepted.setdefault(entry.version.ballot, {})[name] = entry.version.index
                    driver.accepted(name, entry.version)
            assert driver.chosen == entry.version
            self.check()
        assert driver.present == (file,)
        assert not driver.is_changing
        self.reached["healed"] += 1


def run_schedule(seed: int, steps: int, reached: Counter[str]) -> None:
    """Run a schedule. What happens depends on the two numbers alone."""
    network = Network(random.Random(seed), reached)
    try:
        for _ in range(steps):
            network.step()
        network.heal()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
