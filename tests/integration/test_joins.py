"""Joins: what newcomers do before the others stop for them, and how they get the state."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.kit.job import Hosts, Job

FAST = ("--join-window", "30", "--min-interrupt-distance", "0.2")


def syncs(job: Job, generation: int) -> list[str]:
    """Return the workers that sent or received state in a generation."""
    return sorted(event["worker"] for event in job.events("sync") if event["generation"] == generation)


def grown(job: Job, hosts: Hosts, *lines: str, size: int) -> None:
    """Let discovery name ``lines``, and wait until a world of ``size`` trains."""
    hosts.set(*lines)
    formed = job.wait_for_event("world_formed", size=size)
    job.wait_for_event("training_resumed", generation=formed["generation"])


def test_newcomers_get_the_state_from_the_memory_of_their_host_or_from_the_root(tmp_path: Path) -> None:
    """One joins on the root's host, then one on another host, at last one on the root's and one on a third at once."""
    hosts = Hosts(tmp_path).set("127.0.0.1:2")
    gate = tmp_path / "gate"
    gate.touch()
    wait = ("--join-window", "60", "--min-interrupt-distance", "0.2")  # the window ends when nobody boots any more
    script = {"steps": 10, "until": tmp_path / "stop", "boot_until": gate, "callback": True}
    with Job(tmp_path, "-np", "2", *hosts.options, *wait, **script) as job:
        job.wait_for_step(10)
        grown(job, hosts, "127.0.0.1:3", size=3)
        assert syncs(job, 2) == ["127.0.0.1:2#1"], "the root has sent nothing"
        own = {line["rank"] for line in job.log("callback") if line["generation"] == 2}
        assert own == {0, 1}, "a commit of others is no commit of its own"

        grown(job, hosts, "127.0.0.1:3", "127.0.0.2:1", size=4)
        assert syncs(job, 3) == ["127.0.0.1:0#1", "127.0.0.2:0#1"]

        gate.unlink()
        hosts.set("127.0.0.1:4", "127.0.0.2:1", "127.0.0.3:1")
        for newcomer in ("127.0.0.1:3#1", "127.0.0.3:0#1"):
            job.wait_for_event("worker_started", worker=newcomer)
        gate.touch()
        formed = job.wait_for_event("world_formed", size=6)
        job.wait_for_event("training_resumed", generation=formed["generation"])
        job.stop_file.touch()
        job.finish()
        job.check_survival()
        assert [event["size"] for event in job.events("world_formed")] == [2, 3, 4, 6]
        assert syncs(job, 4) == ["127.0.0.1:0#1", "127.0.0.1:3#1", "127.0.0.3:0#1"]
        assert {event["ticks_lost"] for event in job.events("training_resumed")} == {0}


def test_a_ready_newcomer_that_dies_or_stands_still_costs_the_members_nothing(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:2")
    # The first join may interrupt, no second one.
    wait = ("--join-window", "0.1", "--min-interrupt-distance", "300", "--heartbeat-timeout", "3")
    with Job(tmp_path, "-np", "2", *hosts.options, *wait, steps=30, until=tmp_path / "stop") as job:

        def train_on() -> None:
            step = max(line["step"] for line in job.log("commit"))
            job.wait_for_step(step + 20)
            assert [event["generation"] for event in job.events("world_formed")] == [1, 2], "nobody was interrupted"

        job.wait_for_step(10)
        grown(job, hosts, "localhost:3", size=3)
        hosts.set("localhost:4")
        job.wait_for_event("worker_ready", worker="localhost:3#1")
        job.kill(3)
        job.wait_for_event("worker_exited", worker="localhost:3#1", signal=signal.SIGKILL)
        train_on()
        job.wait_for_event("worker_ready", worker="localhost:3#2")
        job.kill(3, number=signal.SIGSTOP)
        job.wait_for_event("worker_unresponsive", worker="localhost:3#2")
        train_on()
        job.stop_file.touch()
        job.finish()
        job.check_survival()


def test_the_death_of_a_newcomer_that_reads_the_state_loses_no_step(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:2")
    fault = "kill@sync:rank=2:generation=2"
    options = ("-np", "2", "--min-np", "2", *hosts.options, *FAST)
    with Job(tmp_path, *options, steps=10, until=tmp_path / "stop", fault=[fault]) as job:
        job.wait_for_step(10)
        hosts.set("localhost:3")
        formed = job.wait_for_event("world_formed", generation=3)
        assert formed["left"] == ["localhost:2#1"]
        job.wait_for_event("world_formed", size=3, generation=4)
        job.wait_for_event("training_resumed", generation=4)
        job.stop_file.touch()
        job.finish()
        job.check_survival(1)
        assert {event["ticks_lost"] for event in job.events("training_resumed")} == {0}


def test_a_member_dies_while_a_newcomer_reads_the_state(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:2")
    fault = "kill@step:rank=1:generation=2"
    options = ("-np", "2", "--min-np", "2", *hosts.options, *FAST)
    with Job(tmp_path, *options, steps=10, until=tmp_path / "stop", fault=[fault], ballast=100) as job:
        job.wait_for_step(10)
        hosts.set("localhost:3")
        job.wait_for_event("worker_exited", signal=signal.SIGKILL)
        formed = job.wait_for_event("world_formed", generation=3)
        assert "localhost:1#1" in formed["left"]
        job.wait_for_event("training_resumed", generation=3)
        job.stop_file.touch()
        job.finish()
        job.check_survival(1)


def test_the_death_of_the_root_while_a_newcomer_waits_for_its_commit(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:2")
    fault = "kill@callback:rank=0"  # in generation 2, before the root has sealed its state
    options = ("-np", "2", "--min-np", "2", *hosts.options, *FAST)
    with Job(tmp_path, *options, steps=10, until=tmp_path / "stop", callback=True, fault=[fault]) as job:
        job.wait_for_step(10)
        hosts.set("localhost:3")
        job.wait_for_event("worker_exited", signal=signal.SIGKILL)
        formed = job.wait_for_event("world_formed", generation=3)
        job.wait_for_event("training_resumed", generation=3)
        assert "localhost:0#1" in formed["left"]
        job.stop_file.touch()
        job.finish()
        job.check_survival(1)
