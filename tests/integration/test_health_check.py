"""A health check that fails on one of two hosts: the other one trains, and the sick one joins when it is well."""

from __future__ import annotations

from pathlib import Path

from tests.kit.job import Job

HOSTS = ("-np", "2", "--min-np", "1", "-H", "localhost,127.0.0.2", "--join-window", "0.2")


def test_the_job_trains_without_a_sick_host_and_takes_it_when_it_is_well(tmp_path: Path) -> None:
    fault = tmp_path / "fault-127.0.0.2"
    fault.touch()
    check = f"test ! -e {tmp_path}/fault-$ELASTICSTATE_HOST || {{ echo looks; echo the disk is full; exit 1; }}"
    options = (*HOSTS, "--cooldown-range", "0.5", "600", "--health-check", check)
    with Job(tmp_path, *options, steps=3, until=tmp_path / "stop") as job:
        formed = job.wait_for_event("world_formed")
        assert formed["joined"] == ["localhost:0#1"]
        cooldown = job.wait_for_event("host_cooldown", host="127.0.0.2")
        assert cooldown["reason"] == "health check: the disk is full"
        again = job.wait_for_event("host_cooldown", count=2, host="127.0.0.2")
        assert again["reason"] == "health check: the disk is full (cooldown 2 in a row)"
        assert "host 127.0.0.2 is in cooldown for" in job.output
        job.wait_for_step(3)
        fault.unlink()
        formed = job.wait_for_event("world_formed", size=2)
        assert formed["joined"] == ["127.0.0.2:0#1"]
        assert [e["worker"] for e in job.events("worker_started")] == ["localhost:0#1", "127.0.0.2:0#1"]
        job.stop_file.touch()
        job.finish(0)
        job.check_survival()
