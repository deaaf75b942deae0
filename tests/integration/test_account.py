"""The account of time of a real job that is killed, joined and left: the parts are the wall time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.kit.job import Hosts, Job, Line

STEP_S, EVERY = 0.05, 4
FAST = ("--join-window", "30", "--min-interrupt-distance", "0.2", "--job-name")
EXPECTED = ("boot", "world_formation", "sync", "regroup", "drain", "redone_ticks", "commit_stall", "exit")


def parts(event: Line) -> dict[str, float]:
    """Return the parts of an account, which must add up to the wall time."""
    found = {"goodput": event["goodput_s"], **event["badput_s"]}
    assert sum(found.values()) == pytest.approx(event["wall_s"], abs=1e-4)
    assert min(found.values()) >= 0
    return found


def asks(*arguments: str) -> str:
    """Return the answer to ``elasticrun status``."""
    command = [sys.executable, "-m", "elasticstate", "status", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def samples(text: str) -> dict[str, float]:
    """Return the value of each sample, by its name with the value of its label."""
    found = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {" ".join((sample.name, *sample.labels.values())): sample.value for sample in found}


def check_numbers(status: Line, metrics: dict[str, float], generation: int) -> None:
    """Check the answers of ``status --json`` and of the metrics, in this order, while the world trains."""
    figures = status["figures"]
    assert (status["phase"], status["size"], status["living"], status["slots"]) == ("running", 2, 2, 2)
    assert (status["generation"], metrics["elasticstate_generation"]) == (generation, generation)
    assert status["workers"]["member"] == metrics["elasticstate_workers member"] == 2
    assert status["hosts"]["joined"] == metrics["elasticstate_hosts joined"] == 1
    assert figures["failures"] == metrics["elasticstate_failures_total"] == 1
    assert figures["ticks_lost"] == metrics["elasticstate_redone_ticks_total"]
    assert 10 < status["ticks"] <= metrics["elasticstate_ticks_total"]
    assert figures["wall_s"] < metrics["elasticstate_wall_seconds"]
    of_causes = {
        key.partition(" ")[2]: s for key, s in metrics.items() if key.startswith("elasticstate_badput_seconds ")
    }
    for cause, seconds in figures["badput_s"].items():
        assert of_causes[cause] == pytest.approx(seconds, abs=1e-6) or cause == "commit_stall"
    total = metrics["elasticstate_goodput_seconds"] + sum(of_causes.values())
    assert total == pytest.approx(metrics["elasticstate_wall_seconds"])


def world_of(job: Job, size: int, count: int = 1) -> Line:
    formed = job.wait_for_event("world_formed", count, size=size, timeout=90)
    return job.wait_for_event("training_resumed", generation=formed["generation"])


def test_goodput_and_badput_are_the_wall_time(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:2")
    script = {"steps": 10, "step_seconds": STEP_S, "commit_every": EVERY, "until": tmp_path / "stop"}
    script["fault"] = "kill@backward:step=6:rank=1"  # two ticks after the last commit
    name = f"account-{tmp_path.name}"
    options = ("-np", "2", "--min-np", "1", *hosts.options, "--metrics", "0")
    with Job(tmp_path, *options, *FAST, name, **script) as job:
        world_of(job, 2, count=2)  # the survivor alone, then with a new worker in the slot
        hosts.set("localhost:3")
        world_of(job, 3)
        hosts.set("localhost:2")
        left = world_of(job, 2, count=3)
        job.wait_for_step(job.log("commit")[-1]["step"] + 10)
        asked = [asks(name), asks(name, "--json")]
        (url,) = re.findall(r"^elasticrun: metrics: (http://127\.0\.0\.1:\d+/metrics)$", job.output, re.MULTILINE)
        with urllib.request.urlopen(url, timeout=60) as answer:
            scraped = answer.read().decode()
        job.stop_file.touch()
        job.finish()
        job.check_survival(faults=1)
    (started,), (finished,) = job.events("job_started"), job.events("job_finished")
    found = parts(finished)
    assert finished["wall_s"] == pytest.approx(finished["time"] - started["time"], rel=0.01)
    assert finished["goodput"] == pytest.approx(finished["goodput_s"] / finished["wall_s"], abs=1e-4)
    missing = [cause for cause in EXPECTED if not found.get(cause)]
    assert not missing, found
    assert "no_driver" not in found

    of_generations: Counter[str] = Counter()
    ended = job.events("generation_finished")
    for event in ended:
        of_generations.update(parts(event))
        assert event["redone_earlier_s"] == 0
    assert [event["generation"] for event in ended] == list(range(left["generation"] + 1))
    assert dict(of_generations) == pytest.approx(found, abs=1e-3)
    assert "drain" in ended[-2]["badput_s"], "the generation that the leaving worker ended"
    assert set(ended[0]["badput_s"]) <= {"boot", "waiting_for_hosts"}
    step_s = sum(1 for line in job.log("commit") if line["rank"] == 0) * EVERY * STEP_S
    assert found["goodput"] >= 0.9 * step_s, "the sleeps of the steps that were kept are goodput"

    check_numbers(json.loads(asked[1]), samples(scraped), left["generation"])
    (line,) = [line for line in asked[0].splitlines() if line.startswith("time: ")]
    assert " s = goodput " in line
    assert " + boot " in line
    assert ", goodput " in job.output.splitlines()[-1]
    assert ", badput: " in job.output.splitlines()[-1]
