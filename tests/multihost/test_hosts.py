"""Jobs on several hosts, started by ssh, with real faults of hosts and links."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import inf
from pathlib import Path

import pytest
from job import Job, Line

from tests.multihost.network import Network, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

HEARTBEAT_S = 2.0
NEXT_STEP_S = 0.5  # from the detection of a host's loss to the survivors' next step
QUICK = (
    *("--heartbeat-timeout", str(HEARTBEAT_S), "--min-interrupt-distance", "0.1", "--join-window", "5"),
    *("--cooldown-range", "0.2", "0.4", "--connect-timeout", "1", "--orphan-timeout", "20"),
)


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with Network(tmp_path, "a", "b", "c") as network:
        yield network


def job_on(network: Network, tmp_path: Path, *options: str, **script: object) -> Job:
    """Run a job with a worker on each of the hosts a, b and c. It trains until the file ``stop`` exists."""
    hosts = ("-np", "3", "--min-np", "1", "-H", "a:1,b:1,c:1")
    within = network["d"].storage.enter()
    return Job(tmp_path, *hosts, *QUICK, *options, within=within, until=tmp_path / "stop", steps=10, **script)


def trains_with(job: Job, size: int, count: int = 1) -> Line:
    """Wait until the ``count``-th world of this size has completed a tick."""
    event = job.wait_for_event("world_formed", count, size=size)
    generation = event["generation"]
    job.wait_for(
        f"a tick of generation {generation}", lambda: any(c["generation"] >= generation for c in job.log("commit"))
    )
    return event


def ends_well(job: Job) -> None:
    job.stop_file.touch()
    job.finish()
    job.check_survival()
    check_no_two_worlds(job)


def check_no_two_worlds(job: Job, what: str = "commit") -> None:
    """Check that after the first tick of a later world, an older world ended at most the tick that was in progress."""
    ticks: dict[int, dict[int, float]] = {}  # generation -> step -> time at which the last member ended it
    first: dict[int, float] = {}
    for line in job.log(what):  # ordered by time
        ticks.setdefault(line["generation"], {})[line["step"]] = line["time"]
        first.setdefault(line["generation"], line["time"])
    later = inf
    for generation in sorted(ticks, reverse=True):
        side_by_side = [step for step, last in ticks[generation].items() if last > later]
        assert len(side_by_side) <= 1, f"generation {generation} went on beside a later one: {side_by_side}"
        later = min(later, first[generation])


def next_step_after(job: Job, lost: Line) -> float:
    """Return the seconds from the loss of a host to the first tick without it."""
    resumed = job.wait_for(
        "training resumed", lambda: [e for e in job.events("training_resumed") if e["time"] > lost["time"]]
    )
    return float(resumed[0]["time"]) - float(lost["time"])


def test_a_job_by_ssh_on_three_hosts(network: Network, tmp_path: Path) -> None:
    with job_on(network, tmp_path) as job:
        formed = trains_with(job, 3)
        assert formed["hosts"] == 3
        assert {e["host"] for e in job.events("worker_ready")} == {"a", "b", "c"}
        ends_well(job)
        assert len(job.events("world_formed")) == 1


def test_nothing_secret_is_in_a_list_of_processes(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", "xyzzy-plugh")
    monkeypatch.setenv("NOT_ASKED_FOR", "xyzzy-frotz")
    show = ["sh", "-c", 'echo "secret=$MY_SECRET other=$NOT_ASKED_FOR"; exec "$@"', "sh"]
    with job_on(network, tmp_path, "--env", "MY_*", before=show) as job:
        trains_with(job, 3)
        token = json.loads(next(Path(os.environ["XDG_RUNTIME_DIR"]).glob("*/driver.json")).read_text())["token"]
        assert len(token) > 30
        lines = list(_command_lines())
        assert sum(b"elasticstate.agent" in line for line in lines) >= 3
        assert not [line for line in lines if b"xyzzy" in line or token.encode() in line]
        ends_well(job)
    assert job.output.count("secret=xyzzy-plugh other=\n") == 3


def test_a_host_that_loses_power_is_missed_within_the_heartbeat_and_back_when_it_is(
    network: Network, tmp_path: Path
) -> None:
    with job_on(network, tmp_path) as job:
        trains_with(job, 3)
        struck = _now(network["b"].power_off)
        lost = job.wait_for_event("agent_lost", host="b")
        assert lost["time"] - struck < HEARTBEAT_S
        assert next_step_after(job, lost) < NEXT_STEP_S
        trains_with(job, 2)
        network["b"].power_on()
        trains_with(job, 3, count=2)
        ends_well(job)


def test_a_driver_that_is_killed_and_started_again_interrupts_nobody(network: Network, tmp_path: Path) -> None:
    with job_on(network, tmp_path, "--job-name", "again") as job:
        trains_with(job, 3)
        job.kill_driver()
        step = max(c["step"] for c in job.log("commit"))
        job.wait_for_while_gone("steps without it", lambda: any(c["step"] > step + 5 for c in job.log("commit")))
        job.start(*job.arguments)
        assert job.wait_for_event("driver_restarted")["back"] == ["a", "b", "c"]
        ends_well(job)
        assert len(job.events("world_formed")) == 1
        assert {e["status"] for e in job.events("job_finished")} == {"succeeded"}


def test_a_host_that_is_lost_while_there_is_no_driver_is_missed_by_the_next_one(
    network: Network, tmp_path: Path
) -> None:
    with job_on(network, tmp_path, "--job-name", "again", "--reattach-timeout", "3") as job:
        trains_with(job, 3)
        job.kill_driver()
        network["b"].power_off()
        job.start("--reattach", "again")
        restarted = job.wait_for_event("driver_restarted")
        assert (restarted["back"], restarted["lost"]) == (["a", "c"], ["b"])
        trains_with(job, 2)
        network["b"].power_on()
        trains_with(job, 3, count=2)
        ends_well(job)


def test_a_host_that_is_rebooted_is_missed_at_once(network: Network, tmp_path: Path) -> None:
    """The kernel of the host closes its sockets, so the others detect the loss at once."""
    with job_on(network, tmp_path) as job:
        trains_with(job, 3)
        struck = _now(network["b"].stop)
        trains_with(job, 2)
        commit = min(c["time"] for c in job.log("commit") if c["generation"] > 1)
        assert commit - struck < NEXT_STEP_S
        network["b"].power_on()
        trains_with(job, 3, count=2)
        ends_well(job)


def test_a_host_whose_link_is_cut_and_healed_comes_back_with_its_workers(network: Network, tmp_path: Path) -> None:
    with job_on(network, tmp_path) as job:
        trains_with(job, 3)
        struck = _now(network["b"].cut)
        lost = job.wait_for_event("agent_lost", host="b")
        assert lost["time"] - struck < HEARTBEAT_S
        assert next_step_after(job, lost) < NEXT_STEP_S
        trains_with(job, 2)
        network["b"].heal()
        trains_with(job, 3, count=2)
        assert len([e for e in job.events("worker_started") if e["host"] == "b"]) == 1, "the same process"
        ends_well(job)


@pytest.mark.parametrize("fault", ["mute", "deafen"])
def test_a_link_that_is_cut_in_one_direction(fault: str, network: Network, tmp_path: Path) -> None:
    with job_on(network, tmp_path) as job:
        trains_with(job, 3)
        struck = _now(getattr(network["b"], fault))
        lost = job.wait_for_event("agent_lost", host="b")
        assert lost["time"] - struck < HEARTBEAT_S
        trains_with(job, 2)
        assert network["b"].dropped() > 0
        network["b"].mend()
        trains_with(job, 3, count=2)
        ends_well(job)


def test_two_hosts_that_are_cut_off_together(network: Network, tmp_path: Path) -> None:
    with job_on(network, tmp_path) as job:
        trains_with(job, 3)
        network["b"].cut()
        network["c"].cut()
        for host in ("b", "c"):
            job.wait_for_event("agent_lost", host=host)
        trains_with(job, 1)
        network["b"].heal()
        network["c"].heal()
        job.wait_for("all three again", lambda: [e for e in job.events("world_formed")[1:] if e["size"] == 3])
        ends_well(job)


def test_a_host_that_only_the_driver_cannot_reach_stands_still(network: Network, tmp_path: Path) -> None:
    """All workers can reach each other all the time."""
    with job_on(network, tmp_path) as job:
        trains_with(job, 3)
        network["b"].deafen_to(network["d"])
        network["d"].deafen_to(network["b"])
        lost = job.wait_for_event("agent_lost", host="b")
        assert next_step_after(job, lost) < NEXT_STEP_S
        trains_with(job, 2)
        assert network["b"].dropped() > 0
        network["b"].mend()
        network["d"].mend()
        trains_with(job, 3, count=2)
        ends_well(job)


def test_lost_packets_are_no_lost_hosts(network: Network, tmp_path: Path) -> None:
    with job_on(network, tmp_path, "--heartbeat-timeout", "10") as job:
        trains_with(job, 3)
        network["b"].lose(0.05)
        steps = len(job.log("commit"))
        job.wait_for("200 more commits", lambda: len(job.log("commit")) > steps + 200)
        assert network["b"].dropped() > 0
        network["b"].mend()
        ends_well(job)
        assert not job.events("agent_lost")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_agent_that_is_killed_or_stopped_is_replaced(
    number: signal.Signals, network: Network, tmp_path: Path
) -> None:
    with job_on(network, tmp_path) as job:
        trains_with(job, 3)
        agent = next(e["pid"] for e in job.events("agent_joined") if e["host"] == "b")
        os.kill(agent, number)
        lost = job.wait_for_event("agent_lost", host="b")
        assert next_step_after(job, lost) < NEXT_STEP_S
        trains_with(job, 3, count=2)
        assert len([e for e in job.events("worker_started") if e["host"] == "b"]) == 2
        ends_well(job)


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
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


def test_a_notice_command_on_another_host_lets_it_leave(network: Network, tmp_path: Path) -> None:
    """The command runs on the host, with the forwarded variables. The driver reports the host whose command fails."""
    (tmp_path / "broken-c").touch()
    script = tmp_path / "notice"
    script.write_text(
        f"""#!/bin/sh
test -e {tmp_path}/broken-$ELASTICSTATE_HOST && {{ echo "no service" >&2; exit 2; }}
test -e {tmp_path}/notice-$ELASTICSTATE_HOST && echo "$NOTICE_TEST to $(ip -o addr | grep -o 10.91.7.[0-9])"
"""
    )
    script.chmod(0o755)
    options = ("--preemption-command", str(script), "--preemption-interval", "0.1", "--env", "NOTICE_*")
    os.environ["NOTICE_TEST"] = "a notice"
    try:
        job = job_on(network, tmp_path, *options)
    finally:
        del os.environ["NOTICE_TEST"]
    with job:
        trains_with(job, 3)
        text = job.wait_for_event("warning")["text"]
        assert text.startswith(f"host c: --preemption-command '{script}' exited with 2: no service"), text
        (tmp_path / "notice-b").touch()
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
