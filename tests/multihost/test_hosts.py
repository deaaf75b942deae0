"""Jobs on several hosts, started by ssh, with real faults of hosts and links."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.kit.hosts import HEARTBEAT_S, QUICK, Scene, ends_well, job_on, next_step_after, trains_with
from tests.kit.job import Job
from tests.kit.network import Network, missing
from tests.kit.series import Errors, one_after_the_other

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

MISSED_S = 1.25 * HEARTBEAT_S  # of silence, at most: the driver looks 20 times in a heartbeat time-out
NEXT_STEP_S = 0.5  # from the detection of a host's loss to the survivors' next step


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with Network(tmp_path, "a", "b", "c") as network:
        yield network


# ------------------------------------------------------------------------------ faults one after the other at one job


def is_missed_in_time(scene: Scene, struck: float) -> None:
    """Check the time until host b was lost, and until the others had trained without it."""
    lost = scene.wait_for("agent_lost", host="b")
    assert lost["time"] - struck < MISSED_S
    assert next_step_after(scene.job, lost) < NEXT_STEP_S


def starts_by_ssh(scene: Scene) -> None:
    formed = scene.trains_with(3)
    assert formed["hosts"] == 3
    assert {e["host"] for e in scene.events("worker_ready")} == {"a", "b", "c"}
    assert len(scene.events("world_formed")) == 1


def loses_power(scene: Scene) -> None:
    is_missed_in_time(scene, _now(scene.network["b"].power_off))
    scene.trains_with(2)
    scene.network["b"].power_on()
    scene.trains_with(3)


def is_rebooted(scene: Scene) -> None:
    """The kernel of the host closes its sockets, so the others detect the loss at once."""
    struck = _now(scene.network["b"].stop)
    generation = scene.trains_with(2)["generation"]
    assert min(line["time"] for line in scene.trained_in(generation)) - struck < NEXT_STEP_S
    scene.network["b"].power_on()
    scene.trains_with(3)


def link_is_cut_and_healed(scene: Scene) -> None:
    is_missed_in_time(scene, _now(scene.network["b"].cut))
    scene.trains_with(2)
    scene.network["b"].heal()
    scene.trains_with(3)
    assert not scene.events("worker_started", host="b"), "the same process"


def link_is_cut_in_one_direction(scene: Scene, fault: str) -> None:
    struck = _now(getattr(scene.network["b"], fault))
    lost = scene.wait_for("agent_lost", host="b")
    assert lost["time"] - struck < MISSED_S
    scene.trains_with(2)
    assert scene.network["b"].dropped() > 0
    scene.network["b"].mend()
    scene.trains_with(3)


def two_are_cut_off_together(scene: Scene) -> None:
    for name in ("b", "c"):
        scene.network[name].cut()
    for name in ("b", "c"):
        scene.wait_for("agent_lost", host=name)
    scene.trains_with(1)
    for name in ("b", "c"):
        scene.network[name].heal()
    scene.trains_with(3)


def only_the_driver_cannot_reach_one(scene: Scene) -> None:
    """All workers can reach each other all the time. The host that the driver cannot reach stands still."""
    driver, b = scene.network["d"], scene.network["b"]
    b.deafen_to(driver)
    driver.deafen_to(b)
    lost = scene.wait_for("agent_lost", host="b")
    assert next_step_after(scene.job, lost) < NEXT_STEP_S
    scene.trains_with(2)
    assert b.dropped() > 0
    b.mend()
    driver.mend()
    scene.trains_with(3)


def agent_is_replaced(scene: Scene, number: signal.Signals) -> None:
    agents = [e["pid"] for e in scene.job.events("agent_joined") if e["host"] == "b"]
    os.kill(agents[-1], number)
    lost = scene.wait_for("agent_lost", host="b")
    assert next_step_after(scene.job, lost) < NEXT_STEP_S
    scene.trains_with(3)
    assert len(scene.events("worker_started", host="b")) == 1


def driver_is_killed_and_started_again(scene: Scene) -> None:
    """Nobody is interrupted."""
    job = scene.job
    job.kill_driver()
    step = max(c["step"] for c in job.log("commit"))
    job.wait_for_while_gone("steps without it", lambda: any(c["step"] > step + 5 for c in job.log("commit")))
    job.start(*job.arguments)
    assert scene.wait_for("driver_restarted")["back"] == ["a", "b", "c"]
    step = max(c["step"] for c in job.log("commit"))
    job.wait_for("steps with the new one", lambda: any(c["step"] > step + 5 for c in job.log("commit")))
    assert not scene.events("world_formed")


def host_is_lost_while_there_is_no_driver(scene: Scene) -> None:
    scene.job.kill_driver()
    scene.network["b"].power_off()
    scene.job.start("--reattach", "again")
    restarted = scene.wait_for("driver_restarted")
    assert (restarted["back"], restarted["lost"]) == (["a", "c"], ["b"])
    scene.trains_with(2)
    scene.network["b"].power_on()
    scene.trains_with(3)


FAULTS: dict[str, Callable[[Scene], None]] = {
    "the job starts by ssh on three hosts": starts_by_ssh,
    "a host loses power, and is missed after the heartbeat and back when it is": loses_power,
    "a host is rebooted, and missed at once": is_rebooted,
    "a link is cut and healed, and the host comes back with its workers": link_is_cut_and_healed,
    "a link is cut in one direction: mute": lambda scene: link_is_cut_in_one_direction(scene, "mute"),
    "a link is cut in one direction: deafen": lambda scene: link_is_cut_in_one_direction(scene, "deafen"),
    "two hosts are cut off together": two_are_cut_off_together,
    "a host that only the driver cannot reach stands still": only_the_driver_cannot_reach_one,
    "an agent that is killed is replaced": lambda scene: agent_is_replaced(scene, signal.SIGKILL),
    "an agent that is stopped is replaced": lambda scene: agent_is_replaced(scene, signal.SIGSTOP),
    "a driver is killed and started again, and interrupts nobody": driver_is_killed_and_started_again,
    "a host that is lost while there is no driver is missed by the next one": host_is_lost_while_there_is_no_driver,
}


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> Errors:
    """Let all faults strike at one job. A job that has ended well is a part of the last one."""
    folder = tmp_path_factory.mktemp("series")
    options = ("--job-name", "again")
    with Network(folder, "a", "b", "c") as network, job_on(network, folder, *options, step_seconds=0.03) as job:
        scene = Scene(network, job)

        def one(fault: str) -> None:
            scene.begin()
            FAULTS[fault](scene)
            if fault == list(FAULTS)[-1]:
                ends_well(job)
                assert {e["status"] for e in job.events("job_finished")} == {"succeeded"}

        return one_after_the_other(FAULTS, one)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_job_on_three_hosts_goes_on(struck: Errors, fault: str) -> None:
    struck.check(fault)


# ------------------------------------------------------------------------- a job on three hosts of which none is lost


SHOW = ("sh", "-c", 'echo "secret=$MY_SECRET other=$NOT_ASKED_FOR"; exec "$@"', "sh")  # runs before each worker
ENVIRONMENT = {"MY_SECRET": "xyzzy-plugh", "NOT_ASKED_FOR": "xyzzy-frotz", "MY_NOTICE": "a notice"}
NOTICE = """#!/bin/sh
test -e {folder}/broken-$ELASTICSTATE_HOST && {{ echo "no service" >&2; exit 2; }}
test -e {folder}/notice-$ELASTICSTATE_HOST && echo "$MY_NOTICE to $(ip -o addr | grep -o 10.91.7.[0-9])"
"""


def nothing_secret_is_in_a_list_of_processes(network: Network, job: Job) -> None:
    trains_with(job, 3)
    (own,) = Path(os.environ["XDG_RUNTIME_DIR"]).glob("*-calm/driver.json")
    token = json.loads(own.read_text())["token"]
    assert len(token) > 30
    lines = list(_command_lines())
    assert sum(b"elasticstate.agent" in line for line in lines) >= 3
    assert not [line for line in lines if b"xyzzy" in line or token.encode() in line]
    assert job.output.count("secret=xyzzy-plugh other=\n") == 3


def lost_packets_are_no_lost_hosts(network: Network, job: Job) -> None:
    network["b"].lose(0.05)
    steps = len(job.log("commit"))
    job.wait_for("200 more commits", lambda: len(job.log("commit")) > steps + 200)
    assert network["b"].dropped() > 0
    network["b"].mend()
    assert not job.events("agent_lost")
    assert len(job.events("world_formed")) == 1


def a_notice_command_on_another_host_lets_it_leave(network: Network, job: Job) -> None:
    """The command runs on the host, with the forwarded variables. The driver reports the host whose command fails."""
    text = job.wait_for_event("warning")["text"]
    script = job.directory / "notice.sh"
    assert text.startswith(f"host c: --preemption-command '{script}' exited with 2: no service"), text
    (job.directory / "notice-b").touch()
    trains_with(job, 2)
    (end,) = job.events("end")
    assert end["cause"] == f"b:0#1 drains: preemption notice: a notice to {network['b'].address}"
    assert end["at"] != "now"
    assert job.wait_for_event("worker_exited", host="b")["exit_code"] == 0
    job.wait_for_event("host_cooldown", host="b")
    ends_well(job)
    assert job.events("agent_lost") == []
    assert [event["ticks_lost"] for event in job.events("training_resumed")] == [0]
    assert [event["host"] for event in job.events("agent_joined")].count("b") == 1


CALM: dict[str, Callable[[Network, Job], None]] = {
    "nothing secret is in a list of processes": nothing_secret_is_in_a_list_of_processes,
    "lost packets are no lost hosts": lost_packets_are_no_lost_hosts,
    "a notice command on another host lets it leave": a_notice_command_on_another_host_lets_it_leave,
}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Errors:
    folder = tmp_path_factory.mktemp("calm")
    (folder / "broken-c").touch()
    script = folder / "notice.sh"
    script.write_text(NOTICE.format(folder=folder))
    script.chmod(0o755)
    options = ("--preemption-command", str(script), "--env", "MY_*")
    options += ("--heartbeat-timeout", "10", "--job-name", "calm", "--cooldown-range", "0.2", "600")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        hosts = Network(folder, "a", "b", "c", new_processes=True)  # their variables and commands are those at users
        with hosts as network, job_on(network, folder, *options, before=list(SHOW)) as job:
            return one_after_the_other(CALM, lambda part: CALM[part](network, job))


@pytest.mark.parametrize("part", CALM)
def test_a_job_on_three_hosts_of_which_none_is_lost(calm: Errors, part: str) -> None:
    calm.check(part)


# ---------------------------------------------------------------------------------------------------- jobs of their own


@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=pytest.mark.long)])
def test_while_all_of_the_world_is_out_of_reach_no_other_world_is_made(
    backend: str, network: Network, tmp_path: Path
) -> None:
    """The workers on a and b train. Host c is added after both have become unreachable for the driver."""
    hosts = tmp_path / "hosts"
    hosts.write_text("a:1\nb:1\n")
    within = network["d"].storage.enter()
    options = ("-np", "2", "--min-np", "1", "--max-np", "3", "--hostfile", str(hosts), "--discovery-interval", "0.1")
    options += (*QUICK, "--backend", backend, "--orphan-timeout", "60")
    with Job(tmp_path, *options, within=within, until=tmp_path / "stop", steps=10) as job:
        trains_with(job, 2)
        for name in ("a", "b"):
            network["d"].deafen_to(network[name])
        for name in ("a", "b"):
            job.wait_for_event("agent_lost", host=name)
        hosts.write_text("a:1\nb:1\nc:1\n")
        job.wait_for_event("worker_ready", host="c")
        before = len(job.log("commit"))
        job.wait_for("more ticks out of reach", lambda: len(job.log("commit")) > before + 50)
        assert len(job.events("world_formed")) == 1
        network["d"].mend()
        trains_with(job, 3)
        ends_well(job)


def _command_lines() -> Iterator[bytes]:
    """Yield the command lines of all processes of this machine."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # the process has ended
            yield path.read_bytes()


def _now(strike: Callable[[], None]) -> float:
    """Run ``strike``. Return the time just before it."""
    now = time.time()
    strike()
    return now
