"""Checks of a job's account of time, against its events and the workers' own logs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.kit.job import Job, Line

SHARE = 0.01  # of the wall time, that two measures of the same time may differ by


def check_the_account(job: Job, driver_killed_at: Sequence[float]) -> None:
    """Check that goodput and badput add up to the wall time, and that goodput is not more than the workers logged.

    The workers train on while no driver runs or reaches them. Not all of that time is proven to the next driver, so the
    account may have less goodput. It has more only if the driver died before it learned when a world began to train.
    """
    (started,), (finished,) = job.events("job_started"), job.events("job_finished")
    wall_s = finished["wall_s"]
    for event in (finished, *job.events("generation_finished")):
        parts = [event["goodput_s"], *event["badput_s"].values()]
        assert min(parts) >= 0, event
        assert sum(parts) == pytest.approx(event["wall_s"], abs=1e-4), event
    assert wall_s == pytest.approx(finished["time"] - started["time"], rel=SHARE)
    ended = {event["generation"]: event["wall_s"] for event in job.events("generation_finished")}
    lost_lines = finished["generations"] + 1 - len(ended)
    assert lost_lines <= len(driver_killed_at), f"these generations have ended: {sorted(ended)}"
    if not lost_lines:
        assert sum(ended.values()) == pytest.approx(wall_s, rel=SHARE)

    restarted = [event["time"] for event in job.events("driver_restarted")]
    alone_s = sum(until - since for since, until in zip(driver_killed_at, restarted, strict=True))
    counted_s, logged_s = finished["goodput_s"] + finished["badput_s"].get("commit_stall", 0.0), kept_s(job)
    assert 0 < counted_s <= logged_s + SHARE * wall_s + alone_s, (finished, logged_s, alone_s)


def kept_s(job: Job) -> float:
    """Return the time of all steps that were kept, from the workers' logs."""
    entered, trained = by_generation(job.log("enter")), by_generation(job.log("trained"))
    starts = {generation: min(line["step"] for line in lines) for generation, lines in entered.items()}
    last = max(line["step"] for line in job.log("final"))
    found = 0.0
    for generation, lines in entered.items():
        kept = min([last, *(step for later, step in starts.items() if later > generation)])
        ends = [line["time"] for line in trained.get(generation, ()) if line["step"] <= kept]
        found += max(ends, default=0.0) - min(line["began"] for line in lines) if ends else 0.0
    return found


def by_generation(lines: Sequence[Line]) -> dict[int, list[Line]]:
    found: dict[int, list[Line]] = {}
    for line in lines:
        found.setdefault(line["generation"], []).append(line)
    return found
