"""Worker for elasticrun: a sharded training that carries out requests of bench_sharded.py, or logs its steps."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_commit import Memcpy
from sharded_training import SIZES, Size, init_weights, make_training, train_step
from workload import StepLog

import elasticstate as elastic
from elasticstate.state.base import committer_of


class Training:
    """The training in one world."""

    def __init__(self, state: elastic.TorchState, size: Size) -> None:
        self.state, self.size = state, size
        self.model, self.optimizer = make_training(size, elastic.device(), elastic.size())
        init = lambda: init_weights(self.model, elastic.rank())  # noqa: E731
        state.attach(model=self.model, optimizer=self.optimizer, init=init)

    def step(self) -> None:
        train_step(self.model, self.optimizer, self.size, elastic.device(), self.state.step, elastic.rank())
        self.state.step += 1

    def local_tensors(self) -> list[torch.Tensor]:
        """Return what a commit copies: the shards of the parameters and of the moments."""
        found = [parameter.detach().to_local() for parameter in self.model.parameters()]
        moments = [value for values in self.optimizer.state.values() for value in values.values()]
        return found + [value.to_local() for value in moments if value.dim()]


# ------------------------------------------------------------------------------------------------------- on request


def asked(requests: Connection | None) -> Any:
    """Return the request that rank 0 has received; the same on all ranks."""
    request = [requests.recv() if requests is not None else None]
    dist.broadcast_object_list(request, 0)
    return request[0]


def copier(tensors: list[torch.Tensor]) -> Callable[[], None]:
    """Return a plain copy of as many bytes: memcpy, or for a device torch's copy into pinned memory."""
    if tensors[0].is_cpu:
        return Memcpy(sum(tensor.nbytes for tensor in tensors))
    pinned = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]

    def copy() -> None:
        torch._foreach_copy_(pinned, tensors, non_blocking=True)
        torch.cuda.synchronize()

    return copy


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds and the CPU seconds of this process. All ranks begin together."""
    dist.barrier()
    begin, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begin, time.process_time() - cpu


def serve(training: Training, requests: Connection | None) -> None:
    """Carry out requests, and let rank 0 answer with the times."""
    training.step()  # AdamW makes its moments in the first step
    copy: Callable[[], None] | None = None

    def commit() -> None:
        training.state.commit()
        committer_of(training.state).settle()

    def steps(count: int) -> None:
        for number in range(1, count + 1):
            training.step()
            if number % 10 == 5:
                training.state.commit()
            else:
                training.state.check_host_updates()

    while (request := asked(requests)) is not None:
        if request == "commit":
            found = timed(commit)
        elif request == "memcpy":
            copy = copy or copier(training.local_tensors())
            found = timed(copy)
        else:
            found = timed(lambda: steps(request))
        if requests is not None:
            requests.send(found)


# ------------------------------------------------------------------------------------------------------ until a loss


def train_through_loss(training: Training, log: StepLog, every: int, steps_after: int) -> None:
    """Train; in generation 2 for a few more steps."""
    state = training.state
    if elastic.generation() > 1 and state.last is None:
        state.last = state.step + steps_after
    while state.last is None or state.step < state.last:
        training.step()
        end_ns = time.monotonic_ns()
        try:
            state.commit(every=every)
        finally:  # the step is complete, even if its commit is the last of the generation
            log.write(state.step, elastic.generation(), elastic.rank(), end_ns, time.monotonic_ns() - end_ns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--requests", help="address of a socket; else log the steps")
    parser.add_argument("--folder", type=Path, help="for logs")
    parser.add_argument("--every", type=int, help="steps between two commits")
    parser.add_argument("--steps-after", type=int, help="steps in generation 2, the last one")
    args = parser.parse_args()
    state = elastic.TorchState(step=0, last=None)
    log = StepLog(args.folder) if args.folder else None

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        training = Training(state, SIZES[args.size])
        if log is not None:
            train_through_loss(training, log, args.every, args.steps_after)
        else:
            serve(training, Client(args.requests, "AF_UNIX") if elastic.rank() == 0 else None)

    train(state)


if __name__ == "__main__":
    main()
