"""Ranks of bare torch on one device, without elasticstate: what holds by itself.

``bare_torch.py DEVICE BACKEND SIZE FOLDER``. DEVICE: cuda:0, or fake (fake_nccl.py, for tensors of the CPU). BACKEND:
torch's name of it. Starts SIZE ranks of itself, prints a line of JSON with what rank 0 has measured, and ends with
status 1 if a rank has failed. Each rank
makes a group, all-reduces, hangs in a collective in which the last rank has no part, is freed by an abort from another
thread, and makes another group in its process. At last it is freed from the first collective of a group, which has no
connections yet.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

LIMIT_S = 40.0  # of all steps of a rank, from its import of torch on
IMPORT_S = 60.0  # longest import of torch, on a loaded machine
HANG_S = 0.5  # from the hung collective to the abort


def main() -> None:
    if len(sys.argv) == 5:
        start(int(sys.argv[3]), Path(sys.argv[4]))
    name, backend, size, folder, rank = sys.argv[1:]
    os.environ["NCCL_HOSTID"] = str(os.getpid())
    import torch

    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    if name == "fake":
        import fake_nccl

        fake_nccl.install()
    device = torch.device("cpu" if name == "fake" else name)
    measured = run(f"cpu:gloo,cuda:{backend}", device, int(size), Path(folder), int(rank))
    assert measured
    os._exit(0)  # the last group of a hung device may not be destroyed in time


def start(size: int, folder: Path) -> None:
    """Run the ranks, and end with their status."""
    ranks = [subprocess.Popen([sys.executable, __file__, *sys.argv[1:], str(rank)]) for rank in range(size)]
    deadline = time.monotonic() + LIMIT_S + IMPORT_S
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    for rank in ranks:
        rank.kill()  # no effect on those that have ended
    statuses = [rank.wait() for rank in ranks]
    if any(statuses):
        sys.exit(f"the ranks have ended with {statuses}")
    sys.exit()


def run(backend: str, device: Any, size: int, folder: Path, rank: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    measured: dict[str, Any] = {}
    is_cuda = device.type == "cuda"
    began = time.monotonic()
    if is_cuda:
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        measured["context"] = lap(began)

    def synchronize() -> None:
        if is_cuda:
            torch.cuda.synchronize(device)

    def init(name: str) -> None:
        store = dist.FileStore(str(folder / name), size)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT_S), device_id=device
        )

    def all_reduce(numbers: int) -> None:
        tensor = torch.full((numbers,), float(rank + 1), device=device)
        dist.all_reduce(tensor)
        synchronize()
        assert tensor[-1].item() == size * (size + 1) / 2

    for number in range(2):
        began = time.monotonic()
        init(f"group{number}")
        measured[f"init {number}"] = lap(began)
        began = time.monotonic()
        all_reduce(1)
        measured[f"first all_reduce {number}"] = lap(began)
        began = time.monotonic()
        for _ in range(10):
            all_reduce(256)
        measured[f"all_reduce of 1 KB {number}"] = lap(began) / 10
        began = time.monotonic()
        all_reduce(1 << 20)
        measured[f"all_reduce of 4 MB {number}"] = lap(began)
        part = dist.group.WORLD._get_backend(torch.device("cuda"))
        measured[f"part {number}"] = part.name()
        if number == 0:
            measured |= hang(part, device, is_last=rank == size - 1)
        began = time.monotonic()
        dist.destroy_process_group()
        measured[f"destroy {number}"] = lap(began)
        say(rank, measured)
    init("first")
    part = dist.group.WORLD._get_backend(torch.device("cuda"))
    found = hang(part, device, is_last=rank == size - 1)
    measured |= {f"first collective: {name}": value for name, value in found.items()}
    say(rank, measured)
    return measured


def say(rank: int, measured: dict[str, Any]) -> None:
    """Print what is known so far: the last line counts."""
    if rank == 0:
        print(json.dumps(measured), flush=True)


def hang(part: Any, device: Any, is_last: bool) -> dict[str, Any]:
    """Hang in a collective, and abort it from another thread. Return the times of that in seconds."""
    import torch
    import torch.distributed as dist

    measured: dict[str, Any] = {}

    def abort() -> None:
        time.sleep(HANG_S)
        began = time.monotonic()
        try:
            part.abort()
        except Exception as error:
            measured["abort raised"] = f"{type(error).__name__}: {error}"[:300]
        measured["abort"] = lap(began)

    aborting = threading.Thread(target=abort)
    began = time.monotonic()
    aborting.start()
    if not is_last:
        try:
            dist.all_reduce(torch.ones(1 << 20, device=device))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            measured["hung collective"] = "ended without an error"
        except Exception as error:
            measured["hung collective"] = f"{type(error).__name__}: {error}"[:300]
        measured["from the abort to the end of the collective"] = lap(began) - HANG_S
    aborting.join()
    if hasattr(part, "get_error"):
        measured["error after the abort"] = str(part.get_error())
    try:
        dist.all_reduce(torch.ones(1, device=device))
        measured["collective after the abort"] = "no error"
    except Exception as error:
        measured["collective after the abort"] = f"{type(error).__name__}: {error}"[:300]
    if device.type == "cuda":
        began = time.monotonic()
        torch.zeros(1, device=device).add_(1).item()
        measured["kernel after the abort"] = lap(began)
    return measured


def lap(began: float) -> float:
    return round(time.monotonic() - began, 4)


if __name__ == "__main__":
    main()
