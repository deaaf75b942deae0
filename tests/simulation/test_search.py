"""All orders of events of small jobs, on the real core (kit/simulation/search.py), and mutants that the search finds.

The mutants take some seconds together, because each of them is a search of its own up to the first violation.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.kit.simulation import invariants, search
from tests.kit.simulation.mutants import mutated
from tests.kit.simulation.search import Bounds, Budget, Search, Violation

WINDOW = (("join_window_s", 1.0),)


def job(*hosts: int, policy: tuple[tuple[str, Any], ...] = (), **values: int) -> Bounds:
    """Return a job with these slots on its hosts. ``values``: the faults, min_np and max_np."""
    sizes = {name: values.pop(name) for name in ("min_np", "max_np") if name in values}
    return Bounds(hosts, Budget(**values), policy=policy, **sizes)


SMALL = {
    "two crashes of one worker": job(1, kills=2),
    "a crash": job(1, 1, kills=1),
    "a lost host": job(1, 1, losses=1),
    "an error": job(1, 1, errors=1),
    "an unreachable host": job(1, 1, cuts=1),
    "a notice": job(1, 1, notices=1),
    "a removed host": job(1, 1, removals=1),
    "a stop and a crash": job(1, 1, stops=1, kills=1),
    "a late answer": job(2, late=1),
    "a cut link": job(1, 1, links=1),
}
LARGE = {
    "two crashes of four workers": replace(job(2, 2, min_np=4, kills=2, policy=WINDOW), symmetric=True),
    "a crash of four workers of which two are enough": replace(
        job(2, 2, min_np=2, kills=1, policy=WINDOW), symmetric=True
    ),
    "two crashes of workers or hosts": job(1, 1, kills=2, losses=2, crashes=2),
    "a crash and a late answer": job(1, 1, kills=1, late=1),
    "a notice and a crash": job(1, 1, notices=1, kills=1),
    "an error and a freeze": job(1, 1, errors=1, freezes=1),
    "an unreachable host and a crash": job(1, 1, cuts=1, kills=1),
    "a cut link and a crash": job(1, 1, links=1, kills=1),
    "a crash with an incomplete group": job(2, 1, min_np=2, kills=1, policy=(("np_multiple", 2),)),
}


@pytest.mark.parametrize("name", SMALL)
def test_the_invariants_hold_in_all_orders_of_events(name: str) -> None:
    found = Search(SMALL[name], sample=5).run()
    print(f"{name}: {found}")
    assert found.ends
    assert found.proven or found.states < 100


@pytest.mark.long
@pytest.mark.parametrize("name", LARGE)
def test_the_invariants_hold_in_all_orders_of_events_of_a_larger_job(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bounds = LARGE[name]
    found = Search(bounds, sample=0 if bounds.symmetric else 20).run()
    with capsys.disabled():
        print(f"\n{name}: {found}")


@dataclass(frozen=True)
class Mutant:
    """A change of the core, a job in which it shows, and what the search says."""

    invariant: str
    place: str
    old: str
    new: str
    bounds: Bounds
    found: str


END_NOW = "t.End(generation, None, cause, failure.hang)"
TWICE = replace(job(1, kills=2), twice=True)
CROWDED = job(2, 1, max_np=2, kills=2)
GROUPS = job(2, 1, min_np=2, policy=(("np_multiple", 2),))
DISTANT = job(2, 1, policy=(("min_interrupt_distance_s", 2.0),))
BEHIND_GATE = "    if isinstance(d.phase, Finishing):\n        return\n    plan"
MUTANTS = (
    Mutant("I1", "worlds.make_world", "d.generation + 1,", "d.generation + 2,", job(1, 1), "I1: one world"),
    Mutant("I1", "phases.end_now", END_NOW, END_NOW.replace("n, N", "n - 1, N"), job(1, 1, kills=1), "I1: only the"),
    Mutant("I1", "state.is_live", "and m.phase.at_tick is not None", "", job(1, 1, kills=2), "END now is sent once"),
    Mutant("I2", "worlds.assign", "members.sort()", "members.sort(reverse=True)", job(2), "I2"),
    Mutant("I3", "worlds.make_world", "commits.index(best)", "0", job(1, 1, kills=1), "I3: the root"),
    Mutant("I3", "worlds.choose", "or max(found, key=held)", "or found[0]", CROWDED, "I3: a commit of all"),
    Mutant("I3", "commits.awaited", "retained > best", "retained < best", job(1, 1, kills=1), "I3: a commit of all"),
    Mutant("I3", "phases._is_lost", "newest(workers) == NOTHING", "False", job(1, 1, losses=2), "I3: never silently"),
    Mutant(
        "I4",
        "phases.waiting",
        "len(stay) >= policy.fewest(d.generation)",
        "bool(stay)",
        job(1, 1, min_np=2),
        "I4",
    ),
    Mutant("I4", "worlds.choose", "d.policy.fitting(len(found) + (late is not None))", "len(found)", CROWDED, "I4"),
    Mutant("I4", "policy.Policy.fitting", "most % self.np_multiple", "0", GROUPS, "I4: whole groups"),
    Mutant(
        "I4", "slots._vacancies", "- _taken(d)", "- 0", job(1, 1, max_np=1), "more workers were started than max_np"
    ),
    Mutant("I5", "worlds.staying", "if not worker.draining", "", job(1, 1, notices=1), "I5"),
    Mutant("I5", "slots._Plan.__init__", "if host.cooldown_until <= d.now]", "]", job(1, 1, losses=1), "I5"),
    Mutant("I6", "phases._join_time", "d.ledger.planned_at +", "0.0 *", DISTANT, "I6: minimum distance"),
    Mutant("I6", "worlds.choose", "candidates(d)", "candidates(d)[:1]", job(1, 1), "I6: who is READY joins"),
    Mutant("I6", "phases._who_changes", "max(0, d.policy.fitting(", "max(1, (", GROUPS, "I6: newcomers that complete"),
    Mutant(
        "I6", "phases._who_changes", "= candidates(d)", "= candidates(d) or d.members()", job(1, 1), "I6: newcomers"
    ),
    Mutant("I7", "phases.verdict_deadlines", "elif suspects:", "elif False:", job(1, 1, errors=1), "I7: nothing"),
    Mutant("I7", "phases._awaited", "if w.ready is None and not w.late", "", job(1, 1), "I7: nothing"),
    Mutant("I8", "slots._spread", "crc32(", "__import__('random').randrange(1000) + crc32(", TWICE, "I8"),
    Mutant("I15", "phases._release_draining", "and worker is not holder", "", job(1, 1, notices=1, kills=1), "I15"),
    Mutant("I16", "slots.may_train_on", "return not", "return False and not", job(1, 1, cuts=1), "I16"),
    Mutant("I17", "step._agent_lost", "if notice and host.slots", "if False", job(1, 1, notices=1), "I17"),
    Mutant("I20", "worlds.staying", "if worker.id.host not in beyond", "", job(1, 1, links=1), "I20: a world with"),
    Mutant("slots", "slots._free_slots", "slot.worker is None and", "", job(2, kills=1), "each in its slot"),
    Mutant(
        "verdict", "phases.judge", "d.now < judged_at or silent", "d.now < judged_at", job(1, 1, errors=1), "OWN needs"
    ),
    Mutant("gate", "phases.running", "members and all(", "members and any(", job(1, 1), "the gate opens when all"),
    Mutant("stop", "slots.start_and_stop", BEHIND_GATE, "    plan", job(1, 1, stops=1, kills=1), "nothing begins"),
    Mutant(
        "back", "slots.take_back", "    if late:\n", "    if not late:\n", job(1, 1, cuts=1), "nobody but who is back"
    ),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.invariant}-{mutant.place}")
def test_each_mutant_of_the_core_is_found(mutant: Mutant) -> None:
    with mutated(mutant.place, mutant.old, mutant.new), pytest.raises(Violation) as caught:
        Search(mutant.bounds, sample=0).run()
    assert mutant.found in str(caught.value).splitlines()[0], str(caught.value)


def test_each_invariant_of_the_search_has_a_mutant() -> None:
    checked = {name for source in (invariants, search) for name in re.findall(r'"(I\d+)\b', inspect.getsource(source))}
    others = {"I19"}  # of sharded jobs: simulation/test_sharded.py
    assert checked - others == {mutant.invariant for mutant in MUTANTS if mutant.invariant[1:].isdigit()}


def test_the_search_notices_a_key_that_lacks_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search.Key, "_process", lambda key, slot_id, worker: tuple(slot_id))
    with pytest.raises(Violation, match="the key lacks something"):
        Search(job(1, 1, kills=1), sample=1).run()
