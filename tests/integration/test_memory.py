"""What a job says of the memory for its commits."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from job import Job

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
