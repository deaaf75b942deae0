"""OwnProcessGroups: protection of the default process group, which elasticstate creates."""

from __future__ import annotations

import torch.distributed as dist

from elasticstate.errors import UsageError


def _refuse_second_group(*args: object, **kwargs: object) -> None:
    raise UsageError(
        "init_process_group() was called inside a function decorated with @elasticstate.run, where elasticstate "
        "creates the default process group. Use that group, or torch.distributed.new_group()."
    )


class OwnProcessGroups:
    """Context in which ``init_process_group`` of user code raises UsageError."""

    def __enter__(self) -> None:
        self._init = dist.init_process_group
        dist.init_process_group = _refuse_second_group

    def __exit__(self, *_: object) -> None:
        dist.init_process_group = self._init
