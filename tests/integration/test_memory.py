"""The lines of a job on the memory for its commits."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.job import Job

PLAIN = """
import sys
import torch
import elasticstate as elastic

model = torch.nn.Linear(1000, 1000)
optimizer = torch.optim.Adam(model.parameters())
state = elastic.TorchState(model=model, optimizer=optimizer, step=0)

@elastic.run
def train(state):
    while state.step < 8:
        optimizer.zero_grad()
        model(torch.ones(1, 1000)).sum().backward()
        optimizer.step()
        state.step += 1
        state.commit(every=int(sys.argv[1]))

train(state)
"""
SHARDED = """
import sys
import time
import torch
from torch.distributed.fsdp import fully_shard
import elasticstate as elastic

state = elastic.TorchState(step=0)

@elastic.run
def train(state):
    model = torch.nn.Linear(1000, 1000)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    state.attach(model=model, optimizer=optimizer, init=lambda: None)
    while state.step < 8:
        optimizer.zero_grad()
        model(torch.ones(1, 1000)).sum().backward()
        optimizer.step()
        state.step += 1
        state.commit(every=int(sys.argv[1]))
        time.sleep(0.1)

train(state)
"""


def said_of_memory(tmp_path: Path, script: str, every: int, *options: str) -> list[tuple[str, int, int, float]]:
    """Run the script. Return the verb, the workers, the buffers and copies of each, and their size in MB, per line."""
    path = tmp_path / "script.py"
    path.write_text(script)
    with Job(tmp_path, *options, command=[sys.executable, str(path), str(every)]) as job:
        job.finish()
    found = re.findall(r"commits (.*need) \S+ MB on this host \((\d+) workers? x (\d+) x (\S+) MB", job.output)
    assert len(found) == job.output.count("commits need") + job.output.count("commits now need")
    return [(verb, int(workers), int(each), float(size)) for verb, workers, each, size in found]


@pytest.mark.parametrize("every", [1, 100])
def test_the_need_has_the_state_of_the_optimizer(tmp_path: Path, every: int) -> None:
    ((verb, workers, each, size),) = said_of_memory(tmp_path, PLAIN, every, "-np", "2")
    assert (verb, workers, each) == ("need", 2, 2)
    assert 12 <= size <= 13, "model and two moments"


@pytest.mark.parametrize("every", [1, 100])
def test_the_need_has_the_attached_values_and_their_copies(tmp_path: Path, every: int) -> None:
    hosts = ("-np", "2", "-H", "localhost:1,127.0.0.2:1")
    found = said_of_memory(tmp_path, SHARDED, every, *hosts)
    assert found[-1][:3] in [("need", 1, 6), ("now need", 1, 6)], "without --replicas, there is one on the other host"
    assert all(6 <= size <= 6.6 for *_, size in found), "a half of the model and of two moments"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 44 MB."""
    path = tmp_path / "small"
    path.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=44m", "tmpfs", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_newcomer_needs_space_for_its_part_of_the_shards_only(small: Path, tmp_path: Path) -> None:
    """The only worker has two buffers of 12.6 MB. Both hosts are this machine, so there is no space for two more."""
    hosts, discover, path = tmp_path / "hosts", tmp_path / "discover.sh", tmp_path / "script.py"
    hosts.write_text("localhost:1\n")
    discover.write_text(f"#!/bin/sh\ncat {hosts}\n")
    discover.chmod(0o755)
    path.write_text(SHARDED.replace("state.step < 8", "state.step < 1000 and elastic.size() < 2"))
    options = ("-np", "1", "--max-np", "2", "--host-discovery-script", str(discover), "--discovery-interval", "0.2")
    command = [sys.executable, str(path), "1"]
    options = (*options, "--replicas", "0", "--commit-dir", str(small), "--min-interrupt-distance", "0")
    with Job(tmp_path, *options, command=command) as job:
        job.wait_for("commits", lambda: "commits need" in job.output)
        hosts.write_text("localhost:1\n127.0.0.2:1\n")
        job.finish()
    assert len(job.events("world_formed")) == 2
    assert not job.events("warning"), job.output
