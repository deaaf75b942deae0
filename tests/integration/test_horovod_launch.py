"""Launching with Horovod's meanings in real jobs: ``horovod.run()`` and ``elasticrun --horovod``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import elasticstate.horovod as horovod
from elasticstate import UsageError
from tests.kit.forks import Started, Template, environment
from tests.kit.job import Hosts, Job

INELASTIC = """
import json, elasticstate.horovod as horovod

def add(x, *, more):
    import torch, elasticstate.horovod as hvd
    hvd.init()
    total = hvd.allreduce(torch.tensor([float(x + hvd.rank())]), op=hvd.Sum).item()
    return hvd.rank(), hvd.size(), total + more

print(json.dumps(horovod.run(add, (1,), {"more": 10}, np=2, start_timeout=120)))
"""
ELASTIC = """
import json, os, signal, elasticstate.horovod as horovod

def main():
    import torch, elasticstate.horovod as hvd
    hvd.init()

    @hvd.elastic.run
    def train(state):
        while state.step < 30:
            hvd.allreduce(torch.ones(1))
            state.step += 1
            state.commit()
            if state.step == 10 and hvd.rank() == 1 and hvd.size() == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        return hvd.rank(), hvd.size(), state.step

    return train(hvd.elastic.ObjectState(step=0))

print(json.dumps(horovod.run(main, num_proc=3, min_num_proc=1, max_num_proc=3, join_window=60)))
"""
FAILING = """
import elasticstate, elasticstate.horovod as horovod

def main():
    import torch, elasticstate.horovod as hvd
    hvd.init()
    hvd.allreduce(torch.ones(1))
    if hvd.rank() == 1:
        raise ValueError("too bad")
    hvd.allreduce(torch.ones(1))

try:
    horovod.run(main, np=2)
except elasticstate.WorkerFailedError as error:
    print(type(error).__name__, len(error.failures), error, flush=True)
"""


def run(template: Template, folder: Path, program: str) -> tuple[str, str]:
    """Run a script that must end well. Return what it has printed."""
    (folder / "script.py").write_text(program)
    status, printed, error = Started(template, folder / "script", [folder / "script.py"], environment()).finish(240)
    assert status == 0, error
    return printed, error


def test_run_returns_the_results_by_rank(template: Template, tmp_path: Path) -> None:
    printed, _ = run(template, tmp_path, INELASTIC)
    assert json.loads(printed.splitlines()[-1]) == [[0, 2, 13.0], [1, 2, 13.0]]


def test_run_of_an_elastic_function_survives_a_death(template: Template, tmp_path: Path) -> None:
    printed, error = run(template, tmp_path, ELASTIC)
    results = json.loads(printed.splitlines()[-1])
    assert results == [[rank, len(results), 30] for rank in range(len(results))]
    assert "(SIGKILL)" in error


def test_an_error_in_the_function_ends_run_with_it(template: Template, tmp_path: Path) -> None:
    """Without elastic options, the first failure ends the job, as with Horovod."""
    printed, error = run(template, tmp_path, FAILING)
    assert printed.startswith("WorkerFailedError "), printed
    assert "ValueError: too bad" in printed
    assert error.count("elasticrun: generation ") == 1, "it ran only once"


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ({"mpi_args": "-x A"}, "mpirun"),
        ({"executable": "python"}, "at the same path"),
        ({"use_gloo": True, "use_mpi": True}, "Give only one"),
    ],
)
def test_arguments_without_a_meaning_are_refused(arguments: dict[str, object], remedy: str) -> None:
    with pytest.raises(UsageError, match=remedy):
        horovod.run(print, **arguments)  # type: ignore[arg-type]


def test_a_new_host_counts_towards_the_reset_limit(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:1")
    options = ("--horovod", "-np", "1", *hosts.options, "--reset-limit", "0", "--min-interrupt-distance", "0.1")
    with Job(tmp_path, *options, steps=100_000) as job:
        job.wait_for_step(3)
        hosts.set("localhost:2")
        job.finish(1, timeout=120)
        assert len(job.events("world_formed")) == 1
        reason = job.events("root_cause")[0]["reason"]
        assert reason.startswith("reset limit: 1 generation has ended, --reset-limit is 0; last: localhost:1#1 joins")


def test_the_first_world_waits_for_np(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:1")
    with Job(tmp_path, "--horovod", "-np", "2", "--min-np", "1", *hosts.options, "--join-window", "0", steps=20) as job:
        job.wait_for_event("agent_joined")
        hosts.set("localhost:2")
        job.finish(0, timeout=120)
        assert [event["size"] for event in job.events("world_formed")] == [2]


def test_the_first_world_without_np_workers_fails_after_the_start_timeout(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:1")
    options = ("--horovod", "-np", "2", "--min-np", "1", *hosts.options, "--start-timeout", "5")
    with Job(tmp_path, *options, steps=20) as job:
        job.finish(1, timeout=120)
        assert not job.events("world_formed")
        assert "--start-timeout of 5 s expired: 0 workers ready, -np is 2" in job.events("root_cause")[0]["reason"]
