"""The training of check_gpu.py: under elasticrun, under torchrun (``--restarted``), or alone (``--alone STEPS``).

All sums are exact, so the weights have the same bits after the same number of steps, whatever worlds made them: each
sample's gradient is a multiple of 2^-16 in float64. Several ranks share one GPU: NCCL refuses that on one host, and by
another NCCL_HOSTID each rank counts as a host of its own.

A file ``assert-PID`` in the folder makes that process fail by a device-side assert, ``stay-PID`` keeps it away from the
next collective for longer than --collective-timeout. The job ends two steps after the
file ``stop`` appears. The lines of the logs are those that tests/integration/job.py reads; ``ns`` is CLOCK_MONOTONIC.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["NCCL_HOSTID"] = str(os.getpid())

import torch
import torch.distributed as dist

SAMPLES = 12  # of one step; a multiple of each size of a world, so that all ranks have as many
TENSORS = 4
UNIT = 2.0**16

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--device", default="cuda:0", help="of the tensors; fake: fake_nccl.py and slow_device.py")
parser.add_argument("--numbers", type=int, default=1 << 20, help="parameters")
parser.add_argument("--step-seconds", type=float, default=0.01, help="pause after each step")
parser.add_argument("--restarted", default="", metavar="BACKEND", help="under torchrun, with a checkpoint at each step")
parser.add_argument("--alone", type=int, default=0, metavar="STEPS", help="print the digest after so many steps")
args = parser.parse_args()
is_fake = args.device == "fake"
device = torch.device("cpu" if is_fake else args.device)
model = torch.nn.ParameterList(torch.zeros(args.numbers // TENSORS, dtype=torch.float64) for _ in range(TENSORS))
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=2**-6, momentum=0.5)


def gradient(number: int, parameter: torch.Tensor, sample: int) -> torch.Tensor:
    x = torch.arange(parameter.numel(), dtype=torch.float64, device=device).mul_(0.37).add_(sample + number).sin_()
    return (parameter.detach() - x).mul_(UNIT).round_().div_(UNIT)


def one_step(step: int, rank: int, size: int) -> None:
    works = []
    for number, parameter in enumerate(model):
        total = torch.zeros_like(parameter)
        for sample in range(rank, SAMPLES, size):
            total += gradient(number, parameter, step * SAMPLES + sample)
        parameter.grad = total
        if size > 1:
            works.append(dist.all_reduce(total, async_op=True))
    for work in works:
        work.wait()
    optimizer.step()


def digest() -> str:
    state = [*model.parameters(), *(optimizer.state[p].get("momentum_buffer") for p in model.parameters())]
    return hashlib.sha256(b"".join(t.detach().cpu().numpy().tobytes() for t in state if t is not None)).hexdigest()


def used_bytes() -> dict[str, int]:
    """Return the bytes of the device that all processes use, and those that torch has reserved in this one."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {"device_bytes": total - free, "reserved_bytes": torch.cuda.memory_reserved(device)}


if args.alone:
    for step in range(args.alone):
        one_step(step, 0, 1)
    print(digest())
    sys.exit()

log = open(args.folder / "logs" / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115 - open until the end


def note(what: str, **fields: Any) -> None:
    more = {"pid": os.getpid(), "time": time.time(), "ns": time.monotonic_ns()}
    log.write(json.dumps({"what": what, **more, **fields}) + "\n")


def stay_away() -> None:
    """Let the others wait for longer than --collective-timeout, if check_gpu.py asks for it."""
    asked = args.folder / f"stay-{os.getpid()}"
    if asked.exists():
        asked.unlink()
        note("stay")
        time.sleep(14)


def lose_device() -> None:
    """Fail by an assert in a kernel, if check_gpu.py asks for it."""
    asked = args.folder / f"assert-{os.getpid()}"
    if asked.exists():
        asked.unlink()
        note("assert")
        if is_fake:
            error = torch.AcceleratorError("device-side assert triggered")
            error.error_code = 710
            raise error
        torch.zeros(2, device=device)[torch.tensor([7], device=device)] += 1
        torch.cuda.synchronize(device)


def finish_step(where: dict[str, Any], step: int) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    note("step", **where, step=step)
    time.sleep(args.step_seconds)


def until(step: int, known: int) -> int:
    """Return the last step, -1 if it is not known yet; the same on all ranks."""
    if known >= 0:
        return known
    last = torch.tensor([step + 2 if (args.folder / "stop").exists() else -1])
    dist.broadcast(last, 0)
    return int(last.item())


def use_a_new_group(rank: int, size: int) -> None:
    """Use a group of this rank and its neighbour, whose communicator is another one."""
    for first in range(0, size, 2):
        ranks = [first, first + 1][: size - first]
        group = dist.new_group(ranks)
        if rank in ranks:
            mine = torch.ones(1, device=device)
            dist.all_reduce(mine, group=group)
            assert mine.item() == len(ranks)


def restarted() -> None:
    """Train under torchrun: a failure restarts all workers, which load the checkpoint of the last step."""
    torch.set_num_threads(1)
    checkpoint = args.folder / "checkpoint"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    step, last = 0, -1
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    dist.init_process_group(args.restarted, device_id=device if device.type == "cuda" else None)
    where = {"generation": 1 + int(os.environ["TORCHELASTIC_RESTART_COUNT"]), "rank": dist.get_rank()}
    note("enter", **where, size=dist.get_world_size(), step=step, digest=digest(), **used_bytes())
    while last < 0 or step < last:
        last = until(step, last)
        one_step(step, dist.get_rank(), dist.get_world_size())
        step += 1
        if where["rank"] == 0:
            fresh = checkpoint.with_suffix(".new")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, fresh)
            fresh.replace(checkpoint)
        finish_step(where, step)
    note("final", **where, step=step, digest=digest())
    dist.destroy_process_group()


def elastic() -> None:
    import elasticstate

    if is_fake:
        import fake_nccl
        import slow_device

        fake_nccl.install()
        slow_device.use(slow_device.SlowDevice(0.0005))
    from elasticstate.state.base import committer_of

    state = elasticstate.TorchState(model=model, optimizer=optimizer, step=0, last=-1)

    @elasticstate.run
    def train(state: elasticstate.TorchState) -> None:
        where = {"generation": elasticstate.generation(), "rank": elasticstate.rank()}
        size = elasticstate.size()
        note("enter", **where, size=size, step=state.step, digest=digest(), **used_bytes())
        use_a_new_group(where["rank"], size)
        steps: dict[tuple[int, int], int] = {}  # commit id -> step
        while state.last < 0 or state.step < state.last:
            state.last = until(state.step, state.last)
            lose_device()
            stay_away()
            one_step(state.step, where["rank"], size)
            state.step += 1
            before = state.commits[0]
            steps[where["generation"], committer_of(state).session.ticks + 1] = state.step
            state.commit()
            if (newest := state.commits[0]) in steps and newest != before:  # sealed, perhaps that of an earlier step
                note("commit", **where, step=steps[newest])
            finish_step(where, state.step)

    train(state)
    note("final", generation=elasticstate.generation(), rank=elasticstate.rank(), step=state.step, digest=digest())


if args.restarted:
    restarted()
else:
    elastic()
