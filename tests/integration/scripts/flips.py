"""A job with what ordinary programs have, in which one bit of a value may be flipped on one rank after a step.

``flips.py STEPS SECONDS [WHERE STEP RANK [FILE [UNTIL]]]``; WHERE: parameter, optimizer or buffer.
DistributedDataParallel overwrites a flipped buffer in the next step, so that one commit alone has it. FILE: made by the
flip, which happens once in the job. UNTIL: a file that ends the training before STEPS. At the end each rank prints a
digest of all that it has trained.
"""

import hashlib
import io
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import elasticstate as elastic

steps, seconds = int(sys.argv[1]), float(sys.argv[2])
where, at, rank = (sys.argv[3], int(sys.argv[4]), int(sys.argv[5])) if len(sys.argv) > 3 else ("", 0, 0)
marker, until = (Path(sys.argv[i]) if len(sys.argv) > i else None for i in (6, 7))

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(
    torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
)
model.register_buffer("scale", torch.ones(3))
average = AveragedModel(model, use_buffers=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
scaler = torch.amp.GradScaler("cpu")
state = elastic.TorchState(
    model=model, average=average, optimizer=optimizer, scheduler=scheduler, scaler=scaler, losses=torch.zeros(2), step=0
)


def flip() -> None:
    if marker is not None:
        if marker.exists():
            return
        marker.touch()
    target = {
        "parameter": lambda: model[3].weight,
        "optimizer": lambda: optimizer.state[model[0].weight]["exp_avg"],
        "buffer": lambda: model.scale,
    }[where]()
    target.detach().view(-1).view(torch.int32)[1] ^= 1 << 20
    print(f"flipped a bit of {where} on rank {rank} after step {at}", flush=True)


def is_over() -> bool:
    """Return True at the same step on all ranks."""
    if until is None or state.step % 10:
        return state.step >= steps
    flag = torch.tensor([int(state.step >= steps or until.exists())])
    dist.broadcast(flag, 0)
    return bool(flag)


@elastic.run
def train(state: elastic.TorchState) -> None:
    # Else the buckets have another order after the first step of each world, so sums of three numbers differ.
    ddp = DistributedDataParallel(model, init_sync=False, find_unused_parameters=True)
    while not is_over():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = ddp(torch.randn(8, 8) + elastic.rank()).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        average.update_parameters(model)
        state.losses[0] += loss.detach()
        time.sleep(seconds)
        state.step += 1
        if (state.step, elastic.rank()) == (at, rank):
            flip()
        state.commit()


train(state)
trained = io.BytesIO()
torch.save([model.state_dict(), average.state_dict(), optimizer.state_dict(), scheduler.state_dict()], trained)
print(f"rank {elastic.rank()} has trained {hashlib.sha256(trained.getvalue()).hexdigest()}", flush=True)
