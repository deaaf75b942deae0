"""The methods of a process group over MPI, by the names that torch calls."""

from __future__ import annotations

import torch.distributed as dist

from elasticstate.mpi.worker.group import MpiGroup, Operation

CALLED_BY_TORCH = {"_allgather_base", "_reduce_scatter_base", "_set_group_name"}


def test_torch_has_each_method_that_a_group_overrides() -> None:
    """A method that torch has renamed is never called: torch would run its own, which no backend here implements."""
    own = {name for name in vars(MpiGroup) if not name.startswith("_")} | CALLED_BY_TORCH
    of_a_part = "supports_coalescing"  # a group is its own part
    absent = sorted(name for name in own if not hasattr(dist.ProcessGroup, name))
    assert absent == ["getBackendName", of_a_part]
    assert hasattr(dist.ProcessGroupGloo, of_a_part)


def test_torch_has_each_method_that_an_operation_overrides() -> None:
    own = {name for name in vars(Operation) if not name.startswith("_")} - {"complete"}
    assert sorted(name for name in own if not hasattr(dist.Work, name)) == []
