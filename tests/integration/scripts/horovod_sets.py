"""Elastic script with a process set of ranks 0 and 1. Rank 1 of the first world kills itself; see
test_horovod_operations.py.

``--anew``: add it in each world, as scripts for Horovod do, and also one of all ranks of that world.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import elasticstate
import elasticstate.horovod as hvd

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--log", type=Path, required=True)
parser.add_argument("--stop", type=Path, required=True)
parser.add_argument("--anew", action="store_true")
args = parser.parse_args()
pair = hvd.ProcessSet([0, 1])
hvd.init(process_sets=[] if args.anew else [pair])
state = hvd.elastic.ObjectState(step=0)


@hvd.elastic.run
def train(state: hvd.elastic.ObjectState) -> None:
    global pair
    generation, stops = elasticstate.generation(), False
    if args.anew:
        whole = hvd.add_process_set(range(hvd.size())) if hvd.size() > 2 else hvd.global_process_set
        pair = hvd.add_process_set([0, 1])
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=whole).item() == hvd.size()
        with pytest.raises(ValueError, match="these ranks already"):
            hvd.add_process_set(hvd.ProcessSet([1, 0]))
    with open(args.log / f"{os.getpid()}.jsonl", "a", buffering=1) as log:
        while not stops:
            if generation == 1 and state.step == 5 and hvd.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            of_set = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item() if pair.included() else None
            of_all = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
            line = {
                "what": "step",
                "time": time.time(),
                "generation": generation,
                "rank": hvd.rank(),
                "size": hvd.size(),
            }
            log.write(json.dumps({**line, "of_set": of_set, "of_all": of_all}) + "\n")
            state.step += 1
            stops = bool(hvd.broadcast_object(args.stop.exists()))
            try:
                state.commit()
            except Exception as error:
                log.write(json.dumps({"what": "caught", "time": time.time(), "error": type(error).__name__}) + "\n")
                raise


train(state)
