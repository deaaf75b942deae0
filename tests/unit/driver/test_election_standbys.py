"""Which standbys the driver reports: those that all agents that keep the record would find."""

from __future__ import annotations

from elasticstate.core.register import Candidate
from elasticstate.driver.election import Standbys
from elasticstate.net import messages
from elasticstate.net.names import LOCALHOST

KEEPERS = ("a", "b", "c")


class Scene:
    """The standbys of a driver whose agents are a, b and c."""

    def __init__(self, number: int) -> None:
        self.asked: list[str] = []
        self.told: list[tuple[str, tuple[str, ...]]] = []
        self.warnings: list[str] = []
        self.standbys = Standbys(number, self._send, self._send_to_all, self.warnings.append)

    def _send(self, host: str, message: messages.ToAgent) -> None:
        match message:
            case messages.RunStandby():
                self.asked.append(host)
            case messages.Standbys(addresses):
                self.told.append((host, addresses))

    def _send_to_all(self, message: messages.ToAgent) -> None:
        for host in KEEPERS:
            self._send(host, message)

    def look(self) -> None:
        self.standbys.look(lambda: [Candidate(host, host) for host in KEEPERS])

    def answer(self, *hosts: str) -> None:
        """Let these agents answer all that they were told."""
        for host, addresses in self.told:
            if host in hosts:
                self.standbys.known(host, addresses)


def test_a_standby_counts_when_all_that_keep_the_record_know_it() -> None:
    scene = Scene(1)
    scene.look()
    assert scene.asked == ["a"]
    scene.standbys.received("a", messages.StandbyListens(7), "10.0.0.1")
    assert scene.told == [(host, ("10.0.0.1:7",)) for host in KEEPERS]
    for known in ("a", "b"):
        scene.answer(known)
        assert scene.standbys.known_to(KEEPERS) == ()
    scene.answer("c")
    assert scene.standbys.known_to(KEEPERS) == ("a",)


def test_an_agent_that_has_connected_again_has_to_be_told_again() -> None:
    scene = Scene(1)
    scene.look()
    scene.standbys.received("a", messages.StandbyListens(7), "10.0.0.1")
    scene.answer(*KEEPERS)
    scene.standbys.host_lost("b")
    assert scene.standbys.known_to(KEEPERS) == ()
    assert scene.standbys.known_to(("a", "c")) == ("a",)
    scene.told.clear()
    scene.standbys.host_joined("b")
    assert scene.told == [("b", ("10.0.0.1:7",))]
    scene.answer("b")
    assert scene.standbys.known_to(KEEPERS) == ("a",)


def test_the_standby_of_a_lost_host_is_replaced_and_one_that_failed_not_tried_again() -> None:
    scene = Scene(2)
    scene.look()
    assert scene.asked == ["a", "b"]
    for host in "ab":
        scene.standbys.received(host, messages.StandbyListens(7), f"10.0.0.{host}")
    scene.standbys.host_lost("a")
    scene.look()
    assert scene.asked == ["a", "b", "a"], "the host may be back"
    scene.standbys.received("a", messages.StandbyListens(0, "could not be started: no memory"), "10.0.0.a")
    assert scene.warnings == ["the standby on host a could not be started: no memory"]
    scene.look()
    assert scene.asked == ["a", "b", "a", "c"]


def test_no_standby_runs_on_the_driver_s_own_machine() -> None:
    scene = Scene(1)
    scene.standbys.look(lambda: [Candidate("a", LOCALHOST), Candidate("b", "b")])
    assert scene.asked == ["b"]
