"""Divergence in the core: random programs on ranks whose digests are the real ones, against what was done to them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from elasticstate.core import types as t
from elasticstate.core.divergence import divergence_lines
from elasticstate.core.state import Membership
from elasticstate.core.step import next_deadline, step
from elasticstate.state.divergence import CommitDigests, Selection, decode_question
from tests.kit.core import RUNNING, drive, kinds

HOSTS = {2: "a:1 b:1", 3: "a:2 b:1", 4: "a:2 b:2"}


def running(ranks: int, **policy: object) -> Membership:
    names = [f"{host[0]}:{slot}#1" for host in HOSTS[ranks].split() for slot in range(int(host[2:]))]
    script = f"0.0 hosts {HOSTS[ranks]}\n0.1 agent-joined a + agent-joined b\n1.0 " + " + ".join(
        f"ready {name}" for name in names
    )
    return drive(f"{script}\n1.1 first a:0#1 in=1", np=ranks, min_np=ranks, max_np=ranks, **policy)[0]


@dataclass
class Program:
    """Commits of ranks, whose digests reach a core by random ways. ``flips``: (rank, tick, value, last tick)."""

    ranks: int
    values: int
    seed: int
    flips: tuple[tuple[int, int, int, int], ...] = ()
    discarded: tuple[tuple[int, int], ...] = ()  # (rank, tick): the commit is discarded there
    m: Membership = field(init=False)
    notes: list[dict[str, object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.m = running(self.ranks)
        assert self.m.world is not None
        self.workers = [member.worker for member in self.m.world.members]
        self.now = 2.0
        self.pending: list[list[tuple[int, int, int]]] = [[] for _ in self.workers]
        names = tuple(f"model.parameters.{i}" for i in range(self.values))
        self.selection = Selection(names, b"the same", None)
        self.digests = [self._of_rank(rank) for rank in range(self.ranks)]

    def _of_rank(self, rank: int) -> CommitDigests:
        return CommitDigests(1, lambda *digest: self.pending[rank].append(digest), lambda: self.now)

    def step(self, event: t.Event) -> None:
        self.m, effects, _ = step(self.m, event, self.now)
        for effect in effects:
            match effect:
                case t.Note(name, fields) if name.startswith("diverg"):
                    self.notes.append({"event": name, **dict(fields)})
                case t.AskDigests(worker, generation, question):
                    asked = decode_question(generation, question.tick, question.begin << 32 | question.end)
                    assert asked == (1, question)
                    answer = self.digests[self.workers.index(worker)].answer(question)
                    self.step(t.FromWorker(worker, answer))

    def send(self, rank: int) -> None:
        digests, self.pending[rank] = tuple(self.pending[rank]), []
        if digests and self.random.random() < 0.5:
            self.step(t.FromWorker(self.workers[rank], t.CommitDigests(1, digests)))
        elif digests:
            stamp = t.Stamp(t.Place.TRAIN, 1, digests[-1][1], t.CommitId(1, digests[-1][1]), digests=digests)
            self.step(t.FromWorker(self.workers[rank], stamp))

    def run(self, ticks: int, tick_s: float) -> None:
        for tick in range(1, ticks + 1):
            self.now += tick_s * self.random.uniform(0.9, 1.1)
            values = np.random.default_rng(tick).integers(1, 1 << 32, self.values, dtype=np.uint32)
            for rank in self.random.sample(range(self.ranks), self.ranks):
                mine = values.copy()
                for flipped, first, value, last in self.flips:
                    if flipped == rank and first <= tick <= last:
                        mine[value] ^= 1
                if (rank, tick) in self.discarded:
                    self.digests[rank].restart(tick)
                else:
                    self.digests[rank].add(tick, mine, self.selection)
                if self.random.random() < min(1.0, 2 * tick_s):
                    self.send(rank)
        for rank, digests in enumerate(self.digests):
            digests.send()
            self.send(rank)
        while (deadline := next_deadline(self.m)) is not None and deadline < self.now + 10:
            self.now = deadline
            self.step(t.TimePassed())


programs = st.tuples(st.sampled_from((2, 3, 4)), st.integers(1, 1200), st.integers(0, 1 << 32))


@settings(max_examples=30, deadline=None)
@given(program=programs, data=st.data())
def test_one_flipped_bit_is_found_with_rank_commit_and_value(
    program: tuple[int, int, int], data: st.DataObject
) -> None:
    ranks, values, seed = program
    ticks, tick_s = data.draw(st.sampled_from([(60, 1.0), (60, 0.1), (60, 0.001)]))
    rank, value = data.draw(st.integers(0, ranks - 1)), data.draw(st.integers(0, values - 1))
    tick = data.draw(st.integers(1, ticks))
    last = data.draw(st.sampled_from((tick, ticks)))
    found = Program(ranks, values, seed, ((rank, tick, value, last),))
    found.run(ticks, tick_s)
    divergence, named = found.notes
    assert divergence["ranks"] == ([rank] if ranks > 2 else [0, 1])
    assert divergence["hosts"] == (["a" if ranks > 2 and rank < 2 else "b"] if ranks > 2 else ["a", "b"])
    assert named == {
        "event": "divergent_value", "generation": 1, "commit": [1, tick], "value": f"model.parameters.{value}"
    }  # fmt: skip
    assert f"'model.parameters.{value}', in commit (1, {tick})" in divergence_lines(found.m)[0]


@settings(max_examples=20, deadline=None)
@given(program=programs, tick_s=st.sampled_from((1.0, 0.1, 0.002)), data=st.data())
def test_equal_ranks_raise_no_alarm_whatever_commits_some_of_them_lack(
    program: tuple[int, int, int], tick_s: float, data: st.DataObject
) -> None:
    ranks, values, seed = program
    lacking = st.tuples(st.integers(0, ranks - 1), st.integers(1, 40))
    found = Program(ranks, min(values, 20), seed, discarded=tuple(data.draw(st.lists(lacking, max_size=10))))
    found.run(40, tick_s)
    assert found.notes == []
    assert divergence_lines(found.m) == []


def test_five_thousand_equal_commits_raise_no_alarm_and_a_flip_after_them_is_found() -> None:
    found = Program(3, 5, 1, ((2, 5001, 3, 5001),), ((1, 1024), (0, 1500)))
    found.run(5000, 0.002)
    assert found.notes == []
    found = Program(3, 5, 1, ((2, 5001, 3, 5001),), ((1, 1024), (0, 1500)))
    found.run(5002, 0.002)
    assert [(note["event"], note["commit"]) for note in found.notes] == [
        ("divergence", [1, 5002]), ("divergent_value", [1, 5001])
    ]  # fmt: skip


def test_two_pairs_have_no_majority_so_all_ranks_are_named() -> None:
    found = Program(4, 5, 1, ((1, 3, 0, 9), (2, 3, 0, 9)))
    found.run(9, 1.0)
    assert found.notes[0]["ranks"] == [0, 1, 2, 3]
    assert found.notes[0]["groups"] == [[0, 3], [1, 2]]


DIFFERENT = "2.0 digests a:0#1 in=1 digests=0:1:7 + digests a:1#1 in=1 digests=0:1:8"


def test_a_generation_is_reported_once() -> None:
    m, effects = drive(RUNNING + DIFFERENT + " + digests a:2#1 in=1 digests=0:1:7")
    assert "divergence" in kinds(effects)
    assert divergence_lines(m) != []
    _, effects = drive("3.0 digests a:0#1 in=1 digests=0:2:7 + digests a:1#1 in=1 digests=0:2:8", m)
    assert kinds(effects) == []


def test_a_member_without_digests_is_awaited_for_some_seconds() -> None:
    m, effects = drive(RUNNING + DIFFERENT)
    assert "divergence" not in kinds(effects)
    _, effects = drive("7.0 time", m)
    assert "divergence" in kinds(effects)


@pytest.mark.parametrize("late", ["in=2 digests=0:1:8", "in=1 digests=1:1:8", "in=1 digests=0:2:8"])
def test_digests_of_other_generations_chains_and_ticks_do_not_compare(late: str) -> None:
    m, _ = drive(RUNNING + f"2.0 digests a:0#1 in=1 digests=0:1:7 + digests a:1#1 {late}")
    assert m.ledger.digests.differs is None


def test_the_option_off_compares_nothing() -> None:
    m, _ = drive(RUNNING + DIFFERENT, divergence="off")
    assert m.ledger.digests.differs is None


def test_a_member_that_dies_before_all_have_sent_their_digests_is_not_named() -> None:
    m, _ = drive(RUNNING + DIFFERENT)
    m, effects = drive("2.1 exit a:1#1 signal=9", m)
    assert "divergence" not in kinds(effects)
    assert m.ledger.digests.text == ""
