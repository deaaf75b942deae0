"""The lower bound: bare Gloo without a framework, in processes that know the coming change in advance.

Ranks below ``--size`` train from the start; the rank above boots and waits to join. All know from the command line
which rank will be killed, or when the newcomer joins: no process decides or asks anything.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel
from workload import StepLog, make_training, train_step, warm_up


def tcp_connections() -> Iterator[tuple[str, socket.socket]]:
    """Return the connected TCP sockets of this process: a name for each, and a duplicate of it.

    Listening sockets are left out: a shutdown of one of Gloo's listening sockets ends the process.
    """
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        # OSError: the descriptor is no socket, or Gloo has closed it meanwhile.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as duplicate:
            tcp = duplicate.family in (socket.AF_INET, socket.AF_INET6)
            if tcp and not duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield os.readlink(f"/proc/self/fd/{duplicate.fileno()}"), duplicate


def sever(kept: set[str]) -> None:
    """Shut down all connections except the kept ones, so that no peer waits for this rank."""
    for name, duplicate in tcp_connections():
        if name not in kept:
            with contextlib.suppress(OSError):  # the peer has closed it first
                duplicate.shutdown(socket.SHUT_RDWR)


def init(store: TCPStore, generation: int, rank: int, size: int) -> None:
    """Join a generation. Its keys have a prefix, so that it reads no key of earlier generations."""
    prefixed = PrefixStore(f"g{generation}", store)
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=size, timeout=timedelta(seconds=30))


def broadcast(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Broadcast the state of rank 0 to all, into existing tensors."""
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.empty_like(parameter)
        dist.broadcast(parameter.data, 0)
        dist.broadcast(state["momentum_buffer"], 0)


class Worker:
    """One rank: trains in generation 1, goes through the change, trains in generation 2."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rank, self.size, self.folder = args.rank, args.size, args.folder
        self.model, self.optimizer = make_training()
        warm_up()
        self.log = StepLog(args.folder)
        self.marks: list[tuple[str, int]] = []
        self.store = TCPStore("127.0.0.1", args.port, is_master=self.rank == 0, wait_for_workers=False)

    def mark(self, part: str) -> None:
        """Record that a part of the change has ended."""
        self.marks.append((part, time.monotonic_ns()))

    def train(self, generation: int, step: int, stop: int) -> int:
        """Train until ``stop``, or until a peer is gone. Return the number of completed steps."""
        ddp = DistributedDataParallel(self.model, init_sync=False)
        self.mark("DDP")
        while step < stop:
            try:
                end_ns = train_step(ddp, self.optimizer, step, self.rank)
            except RuntimeError:
                break
            step += 1
            self.log.write(step, generation, self.rank, end_ns)
        return step

    def meet(self) -> None:
        """Wait until all ranks of generation 1 are connected to the store."""
        self.store.set(f"here/{self.rank}", "")
        self.store.wait([f"here/{rank}" for rank in range(self.size)], timedelta(seconds=60))

    def generation_1(self, stop: int, victim: int | None) -> int:
        """Train, and leave after ``stop`` steps or when the victim has died. Return the number of completed steps."""
        self.meet()
        kept = {name for name, _ in tcp_connections()}  # connections to the store
        init(self.store, 1, self.rank, self.size)
        step = self.train(1, 0, stop)
        self.marks.clear()
        self.mark("detect")
        if victim is not None:
            sever(kept)
            self.rank -= self.rank > victim
        dist.destroy_process_group()
        self.mark("destroy")
        return step

    def generation_2(self, step: int, size: int, stop: int) -> None:
        """Form the new world, send the state to a newcomer, and train on."""
        init(self.store, 2, self.rank, size)
        self.mark("init")
        if size > self.size:
            broadcast(self.model, self.optimizer)
            self.mark("broadcast")
        self.train(2, step, stop)
        (self.folder / f"{os.getpid()}.marks").write_text("".join(f"{part} {at}\n" for part, at in self.marks))
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True, help="of generation 1")
    parser.add_argument("--port", type=int, required=True, help="for the store of rank 0")
    parser.add_argument("--folder", type=Path, required=True, help="for logs")
    parser.add_argument("--steps-after", type=int, required=True)
    change = parser.add_mutually_exclusive_group(required=True)
    change.add_argument("--victim", type=int, help="the rank that is going to be killed")
    change.add_argument("--join-at", type=int, help="the step after which a newcomer is taken in")
    args = parser.parse_args()

    worker = Worker(args)
    step = args.join_at
    if args.rank < args.size:
        step = worker.generation_1(args.join_at or sys.maxsize, args.victim)
    worker.generation_2(step, args.size + (1 if args.join_at else -1), step + args.steps_after)


if __name__ == "__main__":
    main()
