"""Three workers with a reset callback that wrongly depends on the rank. After a death two of the states differ."""

import os
import signal

import torch.distributed as dist

import elasticstate as elastic

state = elastic.ObjectState(step=0, offset=0)


def differently_on_each_rank() -> None:
    state.offset += elastic.rank()


state.register_reset_callbacks([differently_on_each_rank])


@elastic.run
def train(state: elastic.ObjectState) -> None:
    while state.step < 5:
        state.step += 1
        state.commit()
    if elastic.generation() == 1:
        dist.barrier()  # all ranks have committed equal states
        if elastic.rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()


train(state)
