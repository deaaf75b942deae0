"""Worker of bench_local_sgd.py for elasticrun: DDP, LocalSGD or DiLoCo."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import torch
from local_sgd_training import EVERY, OUTER, Meter, inner_step, make_training, read_text
from torch.nn.parallel import DistributedDataParallel

import elasticstate as elastic
from elasticstate.local_sgd import DiLoCo, LocalSGD


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--method", choices=["ddp", "local-sgd", "diloco"], required=True)
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--pace", type=float, required=True, help="seconds to wait in each step")
    args = parser.parse_args()
    text = read_text()
    model, optimizer = make_training(args.seed)
    state = elastic.TorchState(model=model, optimizer=optimizer, step=0)
    diloco: DiLoCo | None = None
    if args.method == "local-sgd":
        diloco = LocalSGD(state, every=EVERY)
    elif args.method == "diloco":
        outer = functools.partial(torch.optim.SGD, **OUTER)
        diloco = DiLoCo(state, outer=outer, every=EVERY, fragments=args.fragments)
    meter = Meter(args.folder, elastic.local_rank())

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        trained = state.model
        if diloco is None:
            trained = DistributedDataParallel(state.model, init_sync=False)
        while state.step < args.steps:
            inner_step(trained, optimizer, text, args.seed, elastic.rank(), state.step, args.pace)
            state.step += 1
            try:
                diloco.step() if diloco is not None else state.commit(every=EVERY)
            finally:
                if state.step % EVERY == 0:
                    meter.mark(state.step)
        if args.fragments > 1 and diloco is not None:
            diloco.outer_step()

    train(state)
    meter.write_result(model, text)


if __name__ == "__main__":
    main()
