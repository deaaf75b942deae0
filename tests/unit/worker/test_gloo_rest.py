"""Processes whose last collective is still in flight when its group, their model or their interpreter ends.

With torch 2.13 alone, such a process waits for itself for ever, or aborts, in most runs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elasticstate.worker import new_process
from tests.kit import forks

SCRIPT = """
import gc, os, sys, warnings, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork beside threads
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
child = os.fork()
if child == 0:
    store = dist.TCPStore("127.0.0.1", store.port)


class Model(DistributedDataParallel):
    pass


def main():
    global kept
    dist.init_process_group("gloo", store=store, rank=0 if child else 1, world_size=2)
    model = Model(torch.nn.Linear(64, 64))
    for _ in range(3):
        model(torch.randn(4, 64)).sum().backward()
    sent = torch.ones(5_000_000)
    dist.all_reduce(sent, async_op=True)
    del sent
    {end}


main()
if child:
    print(os.waitpid(child, 0)[1])
    sys.exit(3)
"""
ENDS = {
    "the function returns": "dist.destroy_process_group()",
    "the model is deleted": "dist.destroy_process_group(); del model",
    "the model is collected": "model.own = model; dist.destroy_process_group(); del model; gc.collect()",
    "the group lives longer": "del model; dist.destroy_process_group()",
    "the interpreter ends": "kept = model; dist.destroy_process_group()",
    "nothing is destroyed": "",
}


LATE_PEER = """if child:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        del model
        store.set("deleted", "")
        work.wait()
    else:
        store.wait(["deleted"])
        dist.all_reduce(torch.ones(3))"""


def run(directory: Path, end: str) -> tuple[int, str, str]:
    """Run the script in a process that forks from one that has imported torch, as workers do."""
    script = directory / "script.py"
    script.write_text("from elasticstate.worker.gloo_rest import watch_models\nwatch_models()" + SCRIPT.format(end=end))
    return forks.Started(forks.template(), directory / "output", [script], forks.environment()).finish(100)


def test_a_new_process_ends_although_a_collective_is_in_flight(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(end=ENDS["the function returns"]))
    command = [sys.executable, new_process.__file__, str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "0\n", "")


@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_although_a_collective_is_in_flight(tmp_path: Path, end: str) -> None:
    assert run(tmp_path, ENDS[end]) == (3, "0\n", "")


def test_nobody_waits_if_the_group_outlives_the_model(tmp_path: Path) -> None:
    assert run(tmp_path, LATE_PEER) == (3, "0\n", "")


REWRAPPED = """dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        DistributedDataParallel(model)
    except Exception as error:
        os.write(2, f"{type(error).__name__}\\n".encode())  # in one piece: both processes do it"""


def test_a_wrapper_of_a_world_that_has_ended_is_not_wrapped_again(tmp_path: Path) -> None:
    assert run(tmp_path, REWRAPPED) == (3, "0\n", "UsageError\nUsageError\n")
