"""Two or three workers, some of which end by an error of a selected kind; see test_errors.py."""

from __future__ import annotations

import argparse
import atexit
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import errors as torch_errors

import elasticstate as elastic

parser = argparse.ArgumentParser()
parser.add_argument(
    "what",
    choices=["raise", "both", "segv", "exit", "unpicklable", "record", "torch", "hog", "import", "mesh", "no-run"],
)
args = parser.parse_args()


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("with a lock")
        self.lock = threading.Lock()


def together(at_ns: int) -> None:
    """Fail on both ranks, on rank 1 0.1 s earlier than on rank 0. The process of rank 1 then takes 0.5 s to exit."""
    agreed = torch.tensor([at_ns])
    dist.broadcast(agreed, 0)
    at_s = agreed.item() / 1e9 + (0.0 if elastic.rank() == 1 else 0.1)
    time.sleep(max(0.0, at_s - time.time()))
    if elastic.rank() == 1:
        atexit.register(time.sleep, 0.5)
    raise ValueError(f"of rank {elastic.rank()}")


def fail() -> None:
    if args.what == "both":
        together(time.time_ns() + 300_000_000)
    if elastic.rank() == 1:
        if args.what == "raise":
            raise ValueError("of rank 1 alone")
        if args.what == "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        if args.what == "exit":
            sys.exit(3)
        if args.what == "unpicklable":
            raise Unpicklable
        if args.what == "hog":
            hoard = []
            while True:
                hoard.append(bytearray(os.urandom(1 << 20) * 16))
    dist.all_reduce(torch.ones(1))  # fails on the other ranks


@elastic.run
def train(state: elastic.ObjectState) -> None:
    dist.all_reduce(torch.ones(1))
    fail()


@elastic.record
def recorded() -> None:
    raise ValueError("of a script without run")


@torch_errors.record
def recorded_by_torch() -> None:
    raise ValueError("that torch wrote down")


if args.what == "import":
    import no_such_module  # noqa: F401
elif args.what == "record":
    recorded()
elif args.what == "torch":
    recorded_by_torch()
elif args.what == "mesh":
    torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
elif args.what == "no-run":
    elastic.ObjectState(step=0).commit()
else:
    train(elastic.ObjectState(step=0))
