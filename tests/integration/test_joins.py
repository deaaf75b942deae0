"""Joins: what newcomers do before the others stop for them, and how they get the state."""

from __future__ import annotations

import signal
from pathlib import Path

from job import Hosts, Job

FAST = ("--join-window", "0.1", "--min-interrupt-distance", "0.2")


def syncs(job: Job, generation: int) -> list[str]:
    """Return the workers that sent or received state in a generation."""
    return sorted(event["worker"] for event in job.events("sync") if event["generation"] == generation)


def grown(job: Job, hosts: Hosts, *lines: str, size: int) -> None:
    """Let discovery name ``lines``, and wait until a world of ``size`` trains."""
    hosts.set(*lines)
    formed = job.wait_for_event("world_formed", size=size)
    job.wait_for_event("training_resumed", generation=formed["generation"])


def test_a_newcomer_reads_the_state_from_the_memory_of_its_host_and_nobody_sends_it(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:2")
    with Job(tmp_path, "-np", "2", *hosts.options, *FAST, steps=10, until=tmp_path / "stop", callback=True) as job:
        job.wait_for_step(10)
        grown(job, hosts, "localhost:3", size=3)
        job.stop_file.touch()
        job.finish()
        job.check_survival()
        assert syncs(job, 2) == ["localhost:2#1"], "the root has sent nothing"
        assert {line["rank"] for line in job.log("callback")} == {0, 1}, "a commit of others is no commit of its own"
        assert {event["ticks_lost"] for event in job.events("training_resumed")} == {0}


def test_a_newcomer_on_another_host_gets_the_state_from_the_root(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("127.0.0.1:2")
    with Job(tmp_path, "-np", "2", *hosts.options, *FAST, steps=10, until=tmp_path / "stop") as job:
        job.wait_for_step(10)
        grown(job, hosts, "127.0.0.1:2", "127.0.0.2:1", size=3)
        job.stop_file.touch()
        job.finish()
        job.check_survival()
        assert syncs(job, 2) == ["127.0.0.1:0#1", "127.0.0.2:0#1"]


def test_newcomers_on_the_root_s_host_and_on_another_one_join_at_once(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("127.0.0.1:2")
    gate = tmp_path / "gate"
    gate.touch()
    wait = ("--join-window", "60", "--min-interrupt-distance", "0.2")  # the window ends when nobody boots any more
    with Job(tmp_path, "-np", "2", *hosts.options, *wait, steps=10, until=tmp_path / "stop", boot_until=gate) as job:
        job.wait_for_step(10)
        gate.unlink()
        hosts.set("127.0.0.1:3", "127.0.0.2:1")
        for newcomer in ("127.0.0.1:2#1", "127.0.0.2:0#1"):
            job.wait_for_event("worker_started", worker=newcomer)
        gate.touch()
        formed = job.wait_for_event("world_formed", size=4)
        job.wait_for_event("training_resumed", generation=formed["generation"])
        job.stop_file.touch()
        job.finish()
        job.check_survival()
        assert syncs(job, 2) == ["127.0.0.1:0#1", "127.0.0.1:2#1", "127.0.0.2:0#1"]


def test_the_death_of_a_ready_newcomer_costs_the_members_nothing(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:2")
    wait = ("--join-window", "0.1", "--min-interrupt-distance", "60")  # the first join may interrupt, no second one
    with Job(tmp_path, "-np", "2", *hosts.options, *wait, steps=30, until=tmp_path / "stop") as job:
        job.wait_for_step(10)
        grown(job, hosts, "localhost:3", size=3)
        hosts.set("localhost:4")
        job.wait_for_event("worker_ready", worker="localhost:3#1")
        step = max(line["step"] for line in job.log("commit"))
        job.kill(3)
        job.wait_for_event("worker_exited", worker="localhost:3#1", signal=signal.SIGKILL)
        job.wait_for_step(step + 20)
        assert [event["generation"] for event in job.events("world_formed")] == [1, 2], "nobody was interrupted"
        job.stop_file.touch()
        job.finish()
        job.check_survival()


def test_a_ready_newcomer_that_stands_still_costs_the_members_nothing(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:2")
    wait = ("--join-window", "0.1", "--min-interrupt-distance", "60", "--heartbeat-timeout", "3")
    with Job(tmp_path, "-np", "2", *hosts.options, *wait, steps=30, until=tmp_path / "stop") as job:
        job.wait_for_step(10)
        grown(job, hosts, "localhost:3", size=3)
        hosts.set("localhost:4")
        job.wait_for_event("worker_ready", worker="localhost:3#1")
        job.kill(3, number=signal.SIGSTOP)
        job.wait_for_event("worker_unresponsive", worker="localhost:3#1")
        step = max(line["step"] for line in job.log("commit"))
        job.wait_for_step(step + 20)
        assert [event["generation"] for event in job.events("world_formed")] == [1, 2], "nobody was interrupted"
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
    options = ("-np", "2", "--min-np", "1", *hosts.options, *FAST)
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
    options = ("-np", "2", "--min-np", "1", *hosts.options, *FAST)
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
