"""Groups that user code makes inside ``train``, in a world in which some members received the state in a sync."""

from __future__ import annotations

import os
import signal

import elasticstate as elastic


def test_a_group_made_by_its_members_alone_is_the_same_on_all_of_them() -> None:
    """torch names such a group by the number of groups made in the process. Groups of a sync must not count."""

    def main() -> tuple[int, float]:
        import torch
        import torch.distributed as dist

        @elastic.run
        def train(state: elastic.ObjectState) -> tuple[int, float]:
            while elastic.generation() == 1:
                dist.all_reduce(torch.ones(1))
                state.step += 1
                if state.step == 5 and elastic.rank() == 2:
                    os.kill(os.getpid(), signal.SIGKILL)  # the other ranks have one more commit
                state.commit()
            total = torch.ones(1)
            if elastic.rank() > 0:
                pair = dist.new_group([1, 2], use_local_synchronization=True)
                dist.all_reduce(total, group=pair)
            return elastic.generation(), total.item()

        return train(elastic.ObjectState(step=0))

    results = elastic.launch(main, np=3, collective_timeout=20)
    assert results == [(2, 1.0), (2, 2.0), (2, 2.0)]
