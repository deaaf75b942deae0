"""Counts the operations of all process groups over a hundred commits, with torch's flight recorder."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

import elasticstate as elastic

state = elastic.ObjectState(step=0)
COMMITS, OWN = 100, 3


def recorded() -> int:
    trace = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())
    return len(trace.get("entries", []))


@elastic.run
def train(state: elastic.ObjectState) -> None:
    dist.all_reduce(torch.ones(1))
    before = recorded()
    assert before > 0, "the flight recorder is not on"
    while state.step < COMMITS:
        for _ in range(OWN):
            dist.all_reduce(torch.ones(1))
        state.step += 1
        state.commit()
        state.check_host_updates()
    print(f"operations: {recorded() - before}", flush=True)


train(state)
