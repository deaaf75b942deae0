"""Links between hosts are cut, while all hosts reach the driver: the job goes on with the largest part that can talk.

All cuts strike one after the other at one job, of three hosts and then of four.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.kit.hosts import HEARTBEAT_S, QUICK, Scene, ends_well, next_step_after
from tests.kit.job import Hosts, Job
from tests.kit.network import Network, missing
from tests.kit.series import Errors, one_after_the_other

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

REGROUP_S = 1.0  # from the end of a generation to the next step


def cut_both_ways(network: Network) -> None:
    network["b"].part_from(network["c"])


def cut_to_b(network: Network) -> None:
    network["b"].deafen_to(network["c"])


def cut_to_c(network: Network) -> None:
    network["c"].deafen_to(network["b"])


def cut_in_halves(network: Network) -> None:
    for name in ("a", "b"):
        for other in ("c", "e"):
            network[name].part_from(network[other])


def in_training(scene: Scene, cut: Callable[[Network], None], whole: int, rest: int) -> None:
    scene.trains_with(whole)  # since the end of the cut before
    scene.begin()
    cut(scene.network)
    struck = time.time()
    _goes_on(scene, struck, whole, rest)


def in_a_regroup(scene: Scene, cut: Callable[[Network], None], whole: int, rest: int) -> None:
    """The world forms anew while the link is cut, because a worker on another host has died."""
    scene.trains_with(whole)  # since the end of the cut before
    scene.begin()
    struck = time.time()
    cut(scene.network)
    os.kill([line["pid"] for line in scene.job.log_of("a")][-1], signal.SIGKILL)
    scene.wait_for("worker_exited", host="a")
    _goes_on(scene, struck, whole, rest)


def _goes_on(scene: Scene, struck: float, whole: int, rest: int) -> None:
    """Check that the others go on in time without the smaller part, which comes back with its processes.

    In time: within ``--heartbeat-timeout`` and one regroup.
    """
    found = scene.job.wait_for("cut link", lambda: scene.events("link_cut"))[0]
    assert {found["host"], found["peer"]} in ({"a", "c"}, {"a", "e"}, {"b", "c"}, {"b", "e"})
    text = f"host {found['host']} gets no answer from host {found['peer']}"
    end = scene.wait_for("end", cause=text)
    scene.job.wait_for("a line of the driver", lambda: f"elasticrun: {text}\n" in scene.job.output)
    scene.trains_with(rest)
    assert end["time"] + next_step_after(scene.job, end) - struck < HEARTBEAT_S + REGROUP_S
    assert sum(host.dropped() for host in scene.network.hosts.values()) > 0
    waits = [event for event in scene.events("host_cooldown") if " gets no answer from " in event["reason"]]
    assert len(waits) == whole - rest
    for host in scene.network.hosts.values():
        host.mend()
    scene.wait_for("link_restored", host=found["host"], peer=found["peer"])
    scene.trains_with(whole)
    assert {event["host"] for event in scene.events("worker_started")} <= {"a"}, "all others are the same processes"
    assert not scene.events("agent_lost")


def a_fourth_host_joins(scene: Scene) -> None:
    Hosts(scene.job.directory).set("a:1", "b:1", "c:1", "e:1")
    scene.trains_with(4)


CUTS: dict[str, Callable[[Scene], None]] = {
    "between two of three hosts": lambda scene: in_training(scene, cut_both_ways, 3, 2),
    "between two of three hosts, to the one": lambda scene: in_training(scene, cut_to_b, 3, 2),
    "between two of three hosts, to the other": lambda scene: in_training(scene, cut_to_c, 3, 2),
    "between two of three hosts, in a regroup": lambda scene: in_a_regroup(scene, cut_both_ways, 3, 2),
    "none: a fourth host joins": a_fourth_host_joins,
    "between two of four hosts": lambda scene: in_training(scene, cut_both_ways, 4, 3),
    "between two of four hosts, to the one, in a regroup": lambda scene: in_a_regroup(scene, cut_to_b, 4, 3),
    "between two hosts and two others": lambda scene: in_training(scene, cut_in_halves, 4, 2),
}


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> Errors:
    folder = tmp_path_factory.mktemp("links")
    hosts = Hosts(folder).set("a:1", "b:1", "c:1")
    options = ("-np", "3", "--min-np", "1", "--max-np", "4", *hosts.options, *QUICK)
    with Network(folder, "a", "b", "c", "e") as network:
        within = network["d"].storage.enter()
        with Job(folder, *options, within=within, until=folder / "stop", steps=10, step_seconds=0.03) as job:
            scene = Scene(network, job)

            def one(cut: str) -> None:
                CUTS[cut](scene)
                if cut == list(CUTS)[-1]:
                    ends_well(job)

            return one_after_the_other(CUTS, one)


@pytest.mark.parametrize("cut", CUTS)
def test_a_job_goes_on_when_links_are_cut(survived: Errors, cut: str) -> None:
    survived.check(cut)
