"""A plain script as tutorials have it, whose last collective is still in flight when its function returns.

Rank 1 is killed in its first life.
"""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    for _ in range(3):
        model(torch.randn(4, 64)).sum().backward()
    if dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(5_000_000), async_op=True)
    print("trained", dist.get_rank())
    dist.destroy_process_group()


main()
