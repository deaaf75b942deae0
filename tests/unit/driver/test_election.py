"""The election of a driver by the agents that keep the record, over real connections."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Awaitable, Callable, Coroutine
from math import inf
from typing import Any

import pytest
from msgspec.structs import replace

from elasticstate.core.register import FILE, Ballot, Entry, Proposer, Version, Vote
from elasticstate.driver.driver import Driver
from elasticstate.driver.election import Elected, Election
from elasticstate.driver.record import ReplacedError, Votes, first_record, value_of
from elasticstate.errors import OptionError
from elasticstate.net import messages
from elasticstate.net.control import DriverConnection, tell_replaced
from elasticstate.net.messages import Launch
from elasticstate.net.trust import Trust
from elasticstate.options import Options

TOKEN = "t" * 40
OPTIONS = Options(command=("python", "train.py"), np=2, min_np=1, hosts=("a:2",), job_name="j")
AGENTS = ("a", "b", "c")


def entry(number: int, index: int, quorums: tuple[tuple[str, ...], ...] = (AGENTS,), epoch: int = 1) -> Entry:
    record = replace(first_record(OPTIONS, "j"), epoch=epoch)
    return Entry(Version(Ballot(number, "first"), index), quorums, value_of(record))


def agent(name: str, port: int, kept: Entry | None, *rivals: int) -> DriverConnection:
    """Return the connection of an agent that keeps this entry, and looks for a driver at these ports."""
    addresses = tuple(f"127.0.0.1:{each}" for each in (port, *rivals))
    connection = DriverConnection(
        Launch(f"host-{name}", name, 1, addresses, TOKEN, 10.0, 60.0, "", "", "/", "", (), is_joining=True)
    )
    connection._vote = Vote(kept.version.ballot if kept else None, kept)
    return connection


def run(scenario: Callable[[Election, int], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        election = Election("j", TOKEN, "second", 10.0, lambda _: None)
        port = election.listen("127.0.0.1")
        try:
            await scenario(election, port)
        finally:
            await election.close()

    asyncio.run(asyncio.wait_for(main(), 60))


async def with_agents(agents: list[DriverConnection], work: Awaitable[Elected | None]) -> Elected | None:
    """Await ``work`` while these agents look for a driver."""
    seeking = [asyncio.ensure_future(each.establish(60)) for each in agents]
    try:
        return await work
    finally:
        for task in seeking:
            task.cancel()
        await asyncio.gather(*seeking, return_exceptions=True)


def test_a_driver_that_a_majority_has_elected_knows_the_newest_record() -> None:
    async def scenario(election: Election, port: int) -> None:
        agents = [agent("a", port, entry(1, 3)), agent("c", port, entry(1, 5)), agent("new", port, None)]
        elected = await with_agents(agents, election.won())
        assert elected is not None
        assert elected.proposer.is_leader
        assert elected.proposer.learned is not None
        assert elected.proposer.learned.version.index == 5
        assert (elected.record.job, elected.record.token) == ("j", TOKEN)
        assert elected.hosts == {"host-a", "host-c", "host-new"}
        ballot = elected.proposer.ballot
        assert ballot is not None
        assert ballot.number == 2
        assert all(each._vote.promised == ballot for each in agents), "the old driver gets no vote any more"

    run(scenario)


def test_less_than_a_majority_elects_nobody_and_is_not_asked_for_votes() -> None:
    async def scenario(election: Election, port: int) -> None:
        agents = [agent("a", port, entry(1, 3)), agent("new", port, None), agent("newer", port, None)]
        winning = asyncio.ensure_future(with_agents(agents, election.won()))
        while "1 of 3 are here" not in election.status(as_json=False):
            await asyncio.sleep(0.01)
        assert agents[0]._vote.promised == Ballot(1, "first"), "a living driver is not disturbed"
        agents.append(agent("b", port, entry(1, 4)))
        assert (await with_agents(agents[-1:], winning)) is not None

    run(scenario)


def test_agents_that_have_just_heard_the_driver_elect_no_standby() -> None:
    async def scenario(election: Election, port: int) -> None:
        agents = [agent(name, port, entry(1, 3)) for name in AGENTS]
        for each in agents:
            each._heard_at = asyncio.get_running_loop().time()
        winning = asyncio.ensure_future(with_agents(agents, election.won(silent_s=3600)))
        while len(election._voters) < 3:
            await asyncio.sleep(0.01)
        assert not winning.done()
        for each in election._voters:
            election._voters[each] = (replace(election._voters[each][0], silent_s=3600), election._voters[each][1])
        assert (await winning) is not None

    run(scenario)


@pytest.mark.parametrize("seed", range(20))
def test_of_several_standbys_one_wins_and_no_other_one_asks_for_votes_after_that(seed: int) -> None:
    """The agents dial all of them at once."""

    async def scenario() -> None:
        chance = random.Random(seed)
        elections = [Election("j", TOKEN, f"standby {number}", 10.0, lambda _: None) for number in range(3)]
        ports = [each.listen("127.0.0.1") for each in elections]
        agents = []
        for name in AGENTS:
            chance.shuffle(ports)
            agents.append(agent(name, ports[0], entry(1, 3), *ports[1:]))
            agents[-1]._heard_at -= 2 * SILENT_S
        winning = [asyncio.ensure_future(each.won(SILENT_S)) for each in elections]
        seeking = [asyncio.ensure_future(each.establish(60)) for each in agents]
        try:
            done, losing = await asyncio.wait(winning, return_when=asyncio.FIRST_COMPLETED)
            (winner,) = (each for each, won in zip(elections, winning, strict=True) if won in done)
            ballot = winner._proposer.ballot
            rivals = [each for each in elections if each is not winner]
            while any(not each._voters or each._is_preparing or _knows_no_promise(each) for each in rivals):
                await asyncio.sleep(0.01)  # one may have asked at the same time, and hears the refusals later
            assert not any(each._may_begin() or each._is_preparing for each in rivals)
            promised = [each._vote.promised for each in agents]
            assert promised.count(ballot) >= 2, "a majority has promised a rival its votes"
            assert not any(each.done() for each in losing)
        finally:
            for task in (*seeking, *winning):
                task.cancel()
            await asyncio.gather(*seeking, *winning, return_exceptions=True)
            for each in elections:
                await each.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


SILENT_S = 3600.0


def _knows_no_promise(election: Election) -> bool:
    return all(voter.promised_s > SILENT_S for voter, _ in election._voters.values())


def test_a_rival_that_was_refused_wins_if_the_first_one_is_lost() -> None:
    async def scenario() -> None:
        elections = [Election("j", TOKEN, f"standby {number}", 10.0, lambda _: None) for number in range(2)]
        first, second = (each.listen("127.0.0.1") for each in elections)
        agents = [agent(name, first, entry(1, 3), second) for name in AGENTS]
        for each in agents:
            each._heard_at -= 1
        seeking = [asyncio.ensure_future(each.establish(60)) for each in agents]
        winning = [asyncio.ensure_future(each.won(0.3)) for each in elections]
        try:
            done, others = await asyncio.wait(winning, return_when=asyncio.FIRST_COMPLETED)
            await elections[winning.index(next(iter(done)))].close()  # it leads nobody
            assert await asyncio.gather(*others)
        finally:
            for task in seeking:
                task.cancel()
            await asyncio.gather(*seeking, return_exceptions=True)
            for election in elections:
                await election.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_during_a_change_a_majority_of_both_sets_is_needed() -> None:
    async def scenario(election: Election, port: int) -> None:
        both = entry(1, 3, ((FILE,), AGENTS))
        agents = [agent(name, port, both) for name in AGENTS]
        winning = asyncio.ensure_future(with_agents(agents, election.won()))
        while "0 of 1 are here" not in election.status(as_json=False):
            await asyncio.sleep(0.01)
        assert not winning.done()
        winning.cancel()
        await asyncio.gather(winning, return_exceptions=True)

    run(scenario)


def test_agents_that_know_no_job_begin_a_new_one() -> None:
    async def scenario(election: Election, port: int) -> None:
        assert await with_agents([agent("a", port, None)], election.won(new_after_s=inf)) is None

    run(scenario)


def test_who_is_replaced_ends_in_an_election_as_well() -> None:
    async def scenario(election: Election, port: int) -> None:
        word = messages.Replaced(7, "elsewhere")
        winning = asyncio.ensure_future(election.won())
        await tell_replaced(f"127.0.0.1:{port}", Trust(TOKEN), 10.0, word)
        with pytest.raises(ReplacedError, match="continues with a newer driver on host elsewhere"):
            await winning

    run(scenario)


def test_a_leader_waits_for_a_majority_for_a_limited_time_and_stops_when_it_is_refused() -> None:
    async def scenario() -> None:
        votes = Votes(Proposer.first("first"), FILE, is_replicated=True)
        sent: list[str] = []
        votes.send = lambda acceptor, _: sent.append(acceptor)
        both = votes.propose(b"1", AGENTS)
        assert sorted(sent) == ["a", "b", "c", FILE]
        votes.filed(both)
        with pytest.raises(ReplacedError, match="no majority of those that keep the record"):
            await votes.chosen(both, 0.05)
        for name in "ab":
            votes.received(name, messages.Accepted(both.version))
        await votes.chosen(both, 60)
        votes.received("c", messages.VoteRefused(Ballot(2, "second")))
        with pytest.raises(ReplacedError, match="a newer driver has asked"):
            votes.propose(b"2", None)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"hosts": ("localhost:2", "b:2", "c:2")}, "host 'localhost' is another machine on each host"),
        ({"hosts": ("127.0.0.2:2", "b:2", "c:2")}, "host '127.0.0.2' is another machine on each host"),
        ({"backend": "mpi"}, "not with --backend mpi"),
        ({"call_directory": "/tmp"}, r"launch\(\) waits for elasticrun"),
    ],
)
def test_a_job_that_no_other_machine_could_continue_gets_no_standby(options: dict[str, Any], text: str) -> None:
    async def scenario() -> None:
        with pytest.raises(OptionError, match=f"--standbys: {text}"):
            Driver(dataclasses.replace(OPTIONS, standbys=1, **options))

    asyncio.run(scenario())
