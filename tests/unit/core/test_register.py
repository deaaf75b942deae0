"""The replicated register: votes, leaders, changes of the set of acceptors, and the choice of the set."""

from __future__ import annotations

import msgspec
import pytest

from elasticstate.core.register import (
    FILE,
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

ABC, ABD, FIVE = tuple("abc"), tuple("abd"), tuple("abcde")


class Acceptors:
    """Acceptors that answer at once. Those that are not named in a call get no message."""

    def __init__(self, names: str) -> None:
        self.votes = {name: Vote() for name in (FILE, *names)}

    def prepare(self, proposer: Proposer, names: str, number: int = 0) -> Proposer:
        ballot = proposer.begin(number or proposer.next_number)
        for name in self.named(names):
            self.votes[name], is_promised = prepare(self.votes[name], ballot)
            promised = self.votes[name].promised
            assert promised is not None
            if is_promised:
                proposer.promised(name, ballot, self.votes[name].accepted)
            else:
                proposer.refused(promised)
        return proposer

    def accept(self, proposer: Proposer, entry: Entry, names: str) -> Entry:
        for name in self.named(names):
            self.votes[name], is_accepted = accept(self.votes[name], entry)
            promised = self.votes[name].promised
            assert promised is not None
            if is_accepted:
                proposer.accepted(name, entry.version)
            else:
                proposer.refused(promised)
        return entry

    def named(self, names: str) -> list[str]:
        return [FILE if name == "F" else name for name in names]


def leader_of(acceptors: Acceptors, present: tuple[str, ...]) -> Proposer:
    """Return the leader of a new job that has changed to these acceptors."""
    leader = Proposer.first("one")
    acceptors.accept(leader, leader.write(b"first"), "F")
    acceptors.accept(leader, leader.write(b"change", present), "F" + "".join(present))
    acceptors.accept(leader, leader.write(b"present"), "".join(present))
    assert (leader.present, leader.is_changing) == (present, False)
    return leader


# --------------------------------------------------------------------------------------------------------------- votes


def test_an_acceptor_promises_each_number_to_one_proposer() -> None:
    vote, _ = prepare(Vote(), Ballot(2, "b"))
    for ballot in (Ballot(1, "z"), Ballot(2, "a"), Ballot(2, "c")):
        assert prepare(vote, ballot) == (vote, False)
    assert prepare(vote, Ballot(2, "b")) == (vote, True)  # a repeated message
    assert prepare(vote, Ballot(3, "a")) == (Vote(Ballot(3, "a")), True)


def test_an_acceptor_keeps_the_newest_entry() -> None:
    older, newer = (Entry(Version(Ballot(2, "a"), index), (ABC,), b"") for index in (1, 2))
    vote, is_accepted = accept(Vote(Ballot(1, "z")), newer)
    assert (vote, is_accepted) == (Vote(Ballot(2, "a"), newer), True)
    assert accept(vote, newer) == (vote, True)  # a repeated message
    assert accept(vote, older) == (vote, False)
    promised, _ = prepare(vote, Ballot(3, "b"))
    assert promised == Vote(Ballot(3, "b"), newer)
    assert accept(promised, Entry(Version(Ballot(2, "a"), 3), (ABC,), b"")) == (promised, False)


def test_a_vote_is_the_same_after_its_way_through_a_message() -> None:
    vote = Vote(Ballot(3, "b"), Entry(Version(Ballot(2, "a"), 7), (ABC, (FILE,)), b"value"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(vote), type=Vote) == vote


# -------------------------------------------------------------------------------------------------------------- leaders


def test_the_driver_of_a_new_job_leads_at_once() -> None:
    leader = Proposer.first("one")
    assert leader.is_leader
    entry = leader.write(b"first")
    assert (entry.version, entry.quorums) == (Version(Ballot(1, "one"), 1), ((FILE,),))
    assert (leader.chosen, leader.missing()) == (None, (FILE,))
    leader.accepted(FILE, entry.version)
    assert (leader.chosen, leader.missing()) == (entry.version, ())


def test_a_new_driver_learns_the_newest_value_from_any_majority() -> None:
    acceptors = Acceptors("abc")
    leader = leader_of(acceptors, ABC)
    chosen = acceptors.accept(leader, leader.write(b"newest"), "ab")
    for number, majority in enumerate(("ca", "bc", "abc"), start=2):
        following = acceptors.prepare(Proposer(f"of {majority}"), majority, number)
        assert following.is_leader
        assert following.learned == chosen
    assert following.write(b"next").version == Version(Ballot(4, "of abc"), 1)


def test_a_proposer_without_a_majority_does_not_lead() -> None:
    acceptors = Acceptors("abc")
    leader_of(acceptors, ABC)
    following = acceptors.prepare(Proposer("two"), "Fc", 2)  # the file has the change
    assert not following.is_leader
    assert following.missing() == ("a", "b")
    with pytest.raises(RuntimeError, match="only a leader"):
        following.write(b"")


def test_a_proposer_that_has_learned_nothing_does_not_lead() -> None:
    acceptors = Acceptors("abc")
    assert not acceptors.prepare(Proposer("two"), "Fabc").is_leader


def test_a_proposer_begins_again_above_what_has_refused_it() -> None:
    acceptors = Acceptors("abc")
    leader_of(acceptors, ABC)
    acceptors.prepare(Proposer("dead"), "c", 7)
    following = acceptors.prepare(Proposer("two"), "cab", 2)
    following.refused(Ballot(3, "late"))
    assert following.highest_refusal == Ballot(7, "dead")
    assert not following.is_leader  # c would refuse each entry
    assert not following.is_lost
    with pytest.raises(ValueError, match="not higher"):
        following.begin(2)
    assert acceptors.prepare(following, "cab", following.next_number).is_leader
    assert following.ballot == Ballot(8, "two")


def test_promises_of_an_earlier_ballot_do_not_count() -> None:
    acceptors = Acceptors("abc")
    leader_of(acceptors, ABC)
    following = acceptors.prepare(Proposer("two"), "a", 2)
    acceptors.prepare(following, "b", 3)
    following.promised("c", Ballot(2, "two"), acceptors.votes["c"].accepted)
    assert not following.is_leader


def test_an_entry_of_the_own_number_does_not_make_a_leader() -> None:
    """Two drivers with one identity: the second one must not write versions that the first one has written."""
    acceptors = Acceptors("abc")
    first = leader_of(acceptors, ABC)
    second = acceptors.prepare(Proposer(first.identity), "abc", 1)
    assert second.learned is not None
    assert not second.is_leader
    assert second.next_number == 2


def test_a_leader_learns_nothing_from_late_answers() -> None:
    acceptors = Acceptors("abc")
    leader = leader_of(acceptors, ABC)
    never_chosen = acceptors.accept(leader, leader.write(b"never chosen"), "c")
    following = acceptors.prepare(Proposer("two"), "abc", 2)
    assert following.learned is not None
    assert following.learned.value == b"present"  # a and b were enough
    following.write(b"next")
    following.accepted("a", never_chosen.version)
    assert following.missing() == ABC


def test_a_leader_that_is_refused_between_two_entries_stops() -> None:
    acceptors = Acceptors("abc")
    leader = leader_of(acceptors, ABC)
    assert acceptors.prepare(Proposer("two"), "ab", 2).is_leader
    assert leader.is_leader  # no message has reached it
    assert leader.entry is not None
    acceptors.accept(leader, leader.entry, "a")  # repeated, after it was chosen
    assert leader.is_lost
    leader.refused(Ballot(1, "one"))
    leader.accepted("c", leader.entry.version)
    assert leader.is_lost
    with pytest.raises(RuntimeError, match="only a leader"):
        leader.write(b"")
    with pytest.raises(RuntimeError, match="never begins again"):
        leader.begin(9)


def test_an_old_entry_that_a_newer_one_overtakes_does_not_end_a_leader() -> None:
    acceptors = Acceptors("abc")
    leader = leader_of(acceptors, ABC)
    older, newer = leader.write(b"older"), leader.write(b"newer")
    acceptors.accept(leader, newer, "ab")
    acceptors.accept(leader, older, "abc")
    assert leader.is_leader
    assert leader.chosen == newer.version


def test_an_entry_counts_as_chosen_where_a_newer_one_came_first() -> None:
    acceptors = Acceptors("abc")
    leader = leader_of(acceptors, ABC)
    older, newer = leader.write(b"older"), leader.write(b"newer")
    acceptors.accept(leader, older, "a")
    assert leader.chosen is not None
    assert leader.chosen < older.version
    acceptors.accept(leader, newer, "b")
    assert leader.chosen == older.version
    acceptors.accept(leader, newer, "a")
    assert leader.chosen == newer.version
    leader.accepted("a", older.version)  # a late answer
    assert leader.missing() == ("c",)


# ------------------------------------------------------------------------------------------------- changes of the set


def test_the_set_changes_in_two_entries() -> None:
    acceptors = Acceptors("abc")
    leader = Proposer.first("one")
    acceptors.accept(leader, leader.write(b"first"), "F")
    change = leader.write(b"change", ABC)
    assert change.quorums == ((FILE,), ABC)
    assert change.acceptors == (FILE, *ABC)
    acceptors.accept(leader, change, "abc")
    assert leader.chosen != change.version  # the old set has not accepted it
    assert leader.write(b"too early").quorums == ((FILE,), ABC)
    acceptors.accept(leader, change, "F")
    assert leader.chosen == change.version  # and the next entry has the same sets
    assert leader.is_changing
    assert leader.write(b"after").quorums == (ABC,)
    assert not leader.is_changing


def test_a_change_that_is_not_chosen_can_be_redirected_and_taken_back() -> None:
    acceptors = Acceptors("abcd")
    leader = leader_of(acceptors, ABC)
    first = leader.write(b"", ABD)
    assert leader.write(b"").quorums == (ABC, ABD)  # what was wanted before
    assert leader.write(b"", (FILE,)).quorums == (ABC, (FILE,))
    acceptors.accept(leader, first, "abcd")
    assert leader.chosen == first.version
    assert leader.write(b"").quorums == (ABC, (FILE,))  # the chosen one was given up
    entry = leader.write(b"", ("c", "b", "a"))
    assert entry.quorums == (ABC,)
    acceptors.accept(leader, entry, "bc")
    assert leader.chosen == entry.version
    assert leader.write(b"").quorums == (ABC,)


@pytest.mark.parametrize("wanted", [(), ("a", "a", "b")])
def test_a_set_has_each_acceptor_once(wanted: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="no set of acceptors"):
        Proposer.first("one").write(b"", wanted)


def test_a_new_driver_completes_a_change_that_it_learns() -> None:
    acceptors = Acceptors("abcd")
    leader = leader_of(acceptors, ABC)
    change = acceptors.accept(leader, leader.write(b"change", ABD), "ad")
    following = acceptors.prepare(Proposer("two"), "ad", 2)
    assert following.learned == change
    assert not following.is_leader  # of abc, only a has promised
    acceptors.prepare(following, "abd", 3)
    assert following.is_leader
    assert following.is_changing
    entry = following.write(b"next", (FILE,))
    assert entry.quorums == (ABC, ABD)
    assert following.write(b"next", (FILE,)).quorums == (ABC, ABD)  # somebody may have reached abd
    acceptors.accept(following, entry, "abd")
    assert following.chosen == entry.version
    last = following.write(b"last")
    assert last.quorums == (ABD,)
    acceptors.accept(following, last, "bd")
    assert following.chosen == last.version


def test_a_rebooted_acceptor_never_votes_with_an_empty_memory() -> None:
    """The newest value is on a and b, and b reboots: c and b must not elect a driver that does not know the value."""

    def leads_from(name_of_b: str) -> bytes | None:
        acceptors = Acceptors("abc")
        leader = leader_of(acceptors, ABC)
        newest = acceptors.accept(leader, leader.write(b"newest"), "ab")
        assert leader.chosen == newest.version
        acceptors.votes[name_of_b] = Vote()
        following = acceptors.prepare(Proposer("two"), "c" + name_of_b, 2)
        return following.learned.value if following.is_leader and following.learned is not None else None

    assert leads_from("B") is None
    assert leads_from("b") == b"present"  # with the host's name as its identity, the newest value is lost


def test_five_acceptors_lose_three_one_after_the_other_and_end_as_a_file_when_two_hosts_are_left() -> None:
    connected = [Candidate(name, f"host {name}") for name in "abcdefgh"]
    acceptors = Acceptors("abcdefgh")
    leader = leader_of(acceptors, FIVE)

    def change(hosts: int, missing: str) -> tuple[str, ...]:
        """Let the leader write until the change has ended, without these acceptors."""
        wanted = choose_acceptors(leader.present, connected, hosts)
        for _ in range(3):
            entry = leader.write(b"value", wanted)
            answer = "".join("F" if name == FILE else name for name in entry.acceptors if name not in missing)
            acceptors.accept(leader, entry, answer)
            assert leader.chosen == entry.version
        assert not leader.is_changing
        return leader.present

    for lost, expected in ("b", "acdef"), ("d", "acefg"), ("a", "cefgh"):
        connected = [candidate for candidate in connected if candidate.acceptor != lost]
        assert "".join(change(50, lost)) == expected
    connected = [candidate for candidate in connected if candidate.acceptor in "ceg"]
    assert "".join(change(3, "bdafh")) == "ceg"
    connected = connected[1:]
    assert change(2, "bdafhc") == (FILE,)
    assert acceptors.prepare(Proposer("two"), "F", 2).is_leader


# ---------------------------------------------------------------------------------------------------- choice of the set


def candidates(text: str) -> list[Candidate]:
    """Return candidates of ``acceptor@host/rack``, the oldest first."""
    parts = [word.replace("/", "@").split("@") for word in text.split()]
    return [Candidate(*part) for part in parts]


@pytest.mark.parametrize(
    ("present", "connected", "hosts", "expected"),
    [
        (FILE, "", 1, FILE),
        (FILE, "a@1 b@2", 2, FILE),
        (FILE, "a@1 b@2 x@2", 3, FILE),  # two hosts
        (FILE, "a@1 b@2 c@3 d@4", 4, "a b c"),
        (FILE, "a@1 x@1 b@2 c@3", 4, "a b c"),  # one for each host
        ("c d b", "a@1 b@2 c@3 d@4", 4, "c d b"),  # all stay
        ("c x b", "a@1 b@2 c@3 d@4", 4, "b c a"),
        ("a b c", "a@1 b@2", 3, FILE),
        ("a b c", "a@1 b@2 c@3 d@4 e@5 f@6", 49, "a b c"),
        ("a b c", "a@1 b@2 c@3 d@4 e@5 f@6", 50, "a b c d e"),
        ("a b c", "a@1 b@2 c@3 d@4", 50, "a b c"),
        ("a b c d e", "a@1 b@2 c@3 d@4 e@5", 49, "a b c"),
        (FILE, "a@1/r b@2/r c@3/s d@4/t", 4, "a c d"),  # one for each rack
        (FILE, "a@1/r b@2/r c@3/s d@4/s", 4, "a c b"),
        (FILE, "a@1 b@2 c@3/s d@4/t", 4, "a b c"),  # racks that are not known
        ("a b x", "a@1/r b@2/r c@3/r d@4/s", 4, "a b d"),  # those that stay come first
    ],
)
def test_the_set_of_acceptors(present: str, connected: str, hosts: int, expected: str) -> None:
    chosen = choose_acceptors(tuple(present.split()), candidates(connected), hosts)
    assert " ".join(chosen) == expected


def test_a_driver_names_its_own_file() -> None:
    assert choose_acceptors(ABC, [], 1, "file of b") == ("file of b",)
    assert Proposer.first("one", 3, "file of b").write(b"").quorums == (("file of b",),)
