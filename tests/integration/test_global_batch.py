"""The loss curve of the GPT example equals that of four undisturbed workers, for all changes of the world."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from tests.kit.job import Hosts, Job

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
STEPS = 100
TOLERANCE = 1e-4
OPTIONS = ("--join-window", "30", "--min-interrupt-distance", "0.2", "--min-np", "2")


def gpt(folder: Path, hosts: Hosts, *script: str) -> Job:
    folder.mkdir()
    command = [sys.executable, str(GPT), "--steps", str(STEPS), "--losses", str(folder / "losses"), *script]
    return Job(folder, "-np", "4", *OPTIONS, *hosts.options, command=command)


def losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step. For a step that was trained again, the last loss counts."""
    file = folder / "losses"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return {int(step): float(loss) for step, loss in map(str.split, lines)}


def test_a_world_of_4_2_5_and_3_workers_learns_like_4_undisturbed_ones(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    hosts = Hosts(tmp_path).set("localhost:4")
    with gpt(tmp_path / "undisturbed", hosts) as job:
        job.finish(0)
        assert [event["size"] for event in job.events("world_formed")] == [4]
    folder = tmp_path / "disturbed"
    with gpt(folder, hosts, "--pace", "0.2") as job:

        def steps_of(size: int) -> None:
            job.wait_for_event("world_formed", size=size)
            begin = len(losses(folder))
            job.wait_for(f"steps of {size} workers", lambda: len(losses(folder)) >= begin + 10)

        steps_of(4)
        job.kill(2, 3)
        job.wait_for_event("world_formed", size=2)
        hosts.set("localhost:2")
        steps_of(2)
        hosts.set("localhost:5")
        steps_of(5)
        job.kill(0, 3)
        job.wait_for_event("world_formed", size=3)
        hosts.set("localhost:3")
        job.finish(0)
        assert [event["size"] for event in job.events("world_formed")][:4] == [4, 2, 5, 3]
        killed = [event for event in job.events("worker_exited") if event["signal"] == 9]
        booting = [event for event in killed if event["rank"] is None]
        assert len(killed) - len(booting) == 4
        grown = next(event["time"] for event in job.events("world_formed") if event["size"] == 5)
        for event in booting:  # newcomers in slots that are removed
            assert event["slot"] in ({2, 3} if event["time"] < grown else {3, 4}), event
    expected, found = losses(tmp_path / "undisturbed"), losses(folder)
    assert list(expected) == list(range(1, STEPS + 1))
    assert sorted(found) == list(expected)
    deviation = max(abs(found[step] / expected[step] - 1) for step in expected)
    record_property("report", f"largest deviation of the loss in {STEPS} steps on 4, 2, 5, 3 workers: {deviation:.1e}")
    assert deviation <= TOLERANCE
    assert expected[STEPS] < 0.7 * expected[1], "it learns"
