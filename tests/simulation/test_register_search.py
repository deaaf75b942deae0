"""All orders of messages of small registers (kit/simulation/register_search.py), and mutants that the search finds.

The mutants take some seconds together, because each of them is a search of its own up to the first violation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from elasticstate.core.register import FILE
from tests.kit.simulation.mutants import mutated
from tests.kit.simulation.register_search import Bounds, Search, Violation

ABC, ABD = tuple("abc"), tuple("abd")
FILE_AND_ABC, ABCD = (FILE, *ABC), tuple("abcd")

SMALL = {
    "a takeover": Bounds(ABC, ABC, writes=(2, 2)),
    "from the file to three agents": Bounds(FILE_AND_ABC, (FILE,), (ABC,), (2, 1)),
    "one agent is replaced": Bounds(ABCD, ABC, (ABD,), (1, 2)),
    "from three agents to the file": Bounds(FILE_AND_ABC, ABC, ((FILE,),), (1, 2)),
    "two drivers with one number": Bounds(ABC, ABC, writes=(1, 1), ballots=2),
}


def three_ballots(bounds: Bounds, *writes: int) -> Bounds:
    return replace(bounds, writes=writes, numbers=(2, 3), ballots=2)


# B learns a change from the file to abc that A has completed, and one agent alone has accepted its last entry.
LEARNED_CHANGE = replace(
    three_ballots(Bounds((FILE, *ABCD), (FILE,), (ABC, ABD)), 2, 2, 1),
    before=(
        *("A writes 1A.2 for file and abc", "file accepts 1A.2 for file and abc"),
        *("c accepts 1A.2 for file and abc", "a accepts 1A.2 for file and abc"),
        *("A writes 1A.3 for abc", "a accepts 1A.3 for abc"),
        *("B begins 2B", "file promises 2B", "c promises 2B", "a promises 2B", "B leads"),
    ),
)
LARGE = {
    "from the file to three agents": replace(SMALL["from the file to three agents"], writes=(3, 3)),
    "one agent is replaced": replace(SMALL["one agent is replaced"], writes=(2, 3)),
    "from three agents to the file": replace(SMALL["from three agents to the file"], writes=(3, 3)),
    "a change that is redirected": Bounds((FILE, *ABCD), (FILE,), (ABC, ABD), (2, 2)),
    "five agents": Bounds(tuple("abcde"), tuple("abcde"), writes=(2, 2)),
    "a change that is learned": LEARNED_CHANGE,
    "three ballots": three_ballots(SMALL["a takeover"], 2, 2, 2),
    "three ballots, from the file to three agents": three_ballots(SMALL["from the file to three agents"], 2, 2, 1),
    "three ballots, one agent is replaced": three_ballots(SMALL["one agent is replaced"], 1, 2, 1),
}


@pytest.mark.parametrize("name", SMALL)
def test_the_register_is_safe_in_all_orders_of_messages(name: str) -> None:
    found = Search(SMALL[name]).run()
    print(f"{name}: {found}")
    assert found.leaders
    assert bool(found.changes) == bool(SMALL[name].sets)


@pytest.mark.long
@pytest.mark.parametrize("name", LARGE)
def test_a_larger_register_is_safe_in_all_orders_of_messages(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = Search(LARGE[name]).run()
    with capsys.disabled():
        print(f"\n{name}: {found}")
    assert found.leaders
    assert bool(found.changes) == bool(LARGE[name].sets)


@dataclass(frozen=True)
class Mutant:
    """A change of the register, bounds in which it shows, and what the search says."""

    place: str
    old: str
    new: str
    bounds: Bounds
    found: str


TAKEOVER, TO_AGENTS, REPLACED, TO_FILE, ONE_NUMBER = SMALL.values()
TAKEN_BACK = Bounds(ABCD, ABC, (ABD, ABC), (2, 1))
LEFT = replace(
    three_ballots(TO_FILE, 1, 1, 1),
    before=("A writes 1A.4 for abc and file", "file accepts 1A.4 for abc and file", "B begins 2B"),
)
REDIRECTED = replace(
    LARGE["a change that is redirected"],
    writes=(3, 1),
    before=(
        *("A writes 1A.2 for file and abc", "file accepts 1A.2 for file and abc"),
        *("a accepts 1A.2 for file and abc", "A writes 1A.3 for file and abd"),
        "a accepts 1A.3 for file and abd",
    ),
)
SMALLER = "ballot != vote.promised and ballot.number <= vote.promised.number"
STARTS, CLAIM = "is chosen, and", "for chosen, and no majority has it"
MUTANTS = (
    Mutant("prepare", "return Vote(ballot, vote.accepted), True", "return vote, True", TAKEOVER, STARTS),
    Mutant("prepare", SMALLER, "ballot < vote.promised", ONE_NUMBER, "two leaders have one number"),
    Mutant("accept", "entry.version.ballot < vote.promised", "False", TAKEOVER, STARTS),
    Mutant("accept", "entry.version < vote.accepted.version", "False", TAKEOVER, STARTS),
    Mutant("_has_majority", "> len(quorum) // 2", ">= len(quorum) // 2", TAKEOVER, STARTS),
    Mutant("Proposer._reached", "[len(quorum) // 2]", "[len(quorum) // 2 - 1]", TAKEOVER, CLAIM),
    Mutant("Proposer.accepted", "in quorums)", "in quorums[-1:])", TO_AGENTS, CLAIM),
    Mutant("Proposer.accepted", "in quorums)", "in quorums[:1])", TO_AGENTS, CLAIM),
    Mutant("Proposer.accepted", "following - 1,", "self.entry.version.index,", TO_AGENTS, CLAIM),
    Mutant("Proposer.promised", "accepted.version > self.learned.version", "False", TAKEOVER, STARTS),
    Mutant("Proposer.promised", "in self.learned.quorums)", "in self.learned.quorums[-1:])", TAKEN_BACK, STARTS),
    Mutant("Proposer.promised", "in self.learned.quorums)", "in self.learned.quorums[:1])", TO_AGENTS, STARTS),
    Mutant("Proposer.promised", "True, self.learned.quorums", "True, self.learned.quorums[-1:]", LEFT, STARTS),
    Mutant("Proposer.write", "(quorums[0], wanted)", "(wanted,)", TO_AGENTS, STARTS),
    Mutant("Proposer.write", "len(quorums) == 1", "True", LEARNED_CHANGE, STARTS),
    Mutant("Proposer._choose", "len(self._runs) == 1", "True", REDIRECTED, STARTS),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.place}-{mutant.new}")
def test_each_mutant_of_the_register_is_found(mutant: Mutant) -> None:
    with mutated(f"register.{mutant.place}", mutant.old, mutant.new), pytest.raises(Violation) as caught:
        Search(mutant.bounds).run()
    assert mutant.found in str(caught.value).splitlines()[0], str(caught.value)


def test_an_acceptor_that_keeps_its_identity_without_its_memory_breaks_the_register() -> None:
    with pytest.raises(Violation, match=STARTS) as caught:
        Search(replace(TAKEOVER, forgets=1)).run()
    assert "forgets" in str(caught.value)


@pytest.mark.parametrize("file", [FILE, "file of B"])
def test_two_files_with_one_identity_break_the_register(file: str) -> None:
    """B, on another machine, changes to its file. C, on the first machine, has the old file of A."""
    change = f"2B.1 for abc and {file}"
    before = (
        *("B begins 2B", "a promises 2B", "a promises 2B", "B leads", f"B writes {change}"),
        *(f"file of B accepts {change}", f"b accepts {change}", f"b accepts {change}"),
    )
    bounds = three_ballots(Bounds((*FILE_AND_ABC, "file of B"), ABC, ((file,),), before=before), 0, 2, 1)
    search = Search(replace(bounds, other_machine="B" if file == FILE else ""))
    if file != FILE:
        assert search.run().changes
        return
    with pytest.raises(Violation, match=STARTS):
        search.run()
