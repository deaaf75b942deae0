"""Private names of torch's flight recorder: a change in torch fails here. At run time it is a warning."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading

import pytest
import torch

from elasticstate import compat
from elasticstate.compat import libraries, process_groups

PROGRAM = """
import json, os, time
os.environ["TORCH_FR_BUFFER_SIZE"] = "256"
import torch
import torch.distributed as dist
from elasticstate.compat.process_groups import last_collectives

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(2))
since_ns = time.time_ns()
dist.all_reduce(torch.ones(3, 4))
dist.broadcast(torch.ones(5, dtype=torch.int64), 0)
pair = dist.new_group([0], group_desc="pair")
dist.all_gather([torch.ones(1)], torch.ones(1), group=pair)
dist.barrier()
print(json.dumps([[each.group, each.number, each.text] for each in last_collectives(since_ns)]))
dist.destroy_process_group()
"""


def test_the_records_of_gloo_have_group_number_operation_and_sizes() -> None:
    """A process of its own, because torch reads its variable once."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=120)
    found = json.loads(done.stdout)
    assert ["default_pg", 2, "all_reduce(Float[3, 4])"] in found
    assert ["default_pg", 3, "broadcast(Long[5])"] in found
    assert ["default_pg", 4, "barrier()"] in found
    assert next(group for group, _, text in found if text.startswith("all_gather")).startswith("pair ")
    assert not any("[2]" in text for _, _, text in found), "that is of the last generation"


def test_without_the_name_there_is_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    compat.warn_absent.cache_clear()
    monkeypatch.delattr(torch._C._distributed_c10d, "_dump_fr_trace_json")
    with caplog.at_level(logging.WARNING):
        assert process_groups.last_collectives(0) == ()
    assert "has no torch._C._distributed_c10d._dump_fr_trace_json" in caplog.text


def test_the_stack_of_a_thread_ends_where_it_is() -> None:
    inside, over = threading.Event(), threading.Event()

    def wait_there() -> None:
        inside.set()
        over.wait()

    thread = threading.Thread(target=wait_there)
    thread.start()
    inside.wait()
    assert "wait_there" in [frame.name for frame in libraries.stack_of(thread)]
    over.set()
    thread.join()
    assert not libraries.stack_of(thread)
