"""Checks of elasticstate.horovod on three ranks, without elastic.run; see test_horovod.py.

All ranks call each function ``check_...``, in order. Each rank writes the names of the checks that passed, a line each,
into ``<log>/<rank>.txt``. The first check that fails ends the job with its traceback.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from horovod_join_checks import *  # noqa: F403 - the loop below finds the checks by name
from horovod_mismatch_checks import *  # noqa: F403
from horovod_name_checks import *  # noqa: F403
from horovod_optimizer_checks import *  # noqa: F403
from horovod_sparse_checks import *  # noqa: F403
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import elasticstate.horovod as hvd
from elasticstate import NotInWorldError, UsageError
from elasticstate.horovod import optimizer

# ------------------------------------------------------------------------------------------------------- collectives


def check_world() -> None:
    assert hvd.size() == hvd.local_size() == 3
    assert hvd.rank() == hvd.local_rank()
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_homogeneous()
    assert hvd.gloo_enabled()
    assert not hvd.mpi_enabled()


def check_allreduce() -> None:
    mine = torch.arange(4.0) + hvd.rank()
    assert hvd.allreduce(mine).tolist() == [1, 2, 3, 4]
    assert mine.tolist() == [hvd.rank() + i for i in range(4)], "left as it was"
    assert hvd.allreduce(mine, average=False).tolist() == [3, 6, 9, 12]
    assert hvd.allreduce(mine, op=hvd.Min).tolist() == [0, 1, 2, 3]
    assert hvd.allreduce(mine, op=hvd.Max).tolist() == [2, 3, 4, 5]
    assert hvd.allreduce(mine + 1, op=hvd.Product).tolist() == [6, 24, 60, 120]
    assert hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4).tolist() == [6, 12, 18, 24]
    assert hvd.allreduce(mine.view(2, 2).t()).tolist() == [[1, 3], [2, 4]]
    assert hvd.allreduce(torch.tensor(float(hvd.rank()))).item() == 1
    half = hvd.allreduce(mine, compression=hvd.Compression.fp16)
    assert half.dtype == torch.float32
    assert half.tolist() == [1, 2, 3, 4]


def check_integers_are_rounded_towards_zero() -> None:
    rank = hvd.rank()
    assert hvd.allreduce(torch.tensor([rank, 1, -rank - 1, 5])).tolist() == [1, 1, -2, 5]
    assert hvd.allreduce(torch.tensor([(-4, -1, 0)[rank], (4, 1, 0)[rank]])).tolist() == [-1, 1]
    assert hvd.allreduce(torch.tensor([-1 if rank == 0 else 0])).tolist() == [0]
    assert hvd.allreduce(torch.tensor([5]), op=hvd.Sum, postscale_factor=0.5).tolist() == [7]
    assert hvd.allreduce(torch.tensor([rank + 4]), postscale_factor=0.5).tolist() == [2]
    assert hvd.allreduce(torch.tensor([(5, 2, 1)[rank]]), postscale_factor=3).tolist() == [8], "rounded once"
    assert hvd.allreduce(torch.tensor([2**60 + 3 * rank])).tolist() == [2**60 + 3], "exactly"


def check_in_place_and_asynchronous() -> None:
    mine = torch.full((3,), float(hvd.rank()))
    assert hvd.allreduce_(mine) is mine
    assert mine.tolist() == [1, 1, 1]
    rows = torch.full((4, 4), float(hvd.rank()))
    hvd.allreduce_(rows[:, 1], op=hvd.Sum)
    assert rows[0].tolist() == [hvd.rank(), 3, hvd.rank(), hvd.rank()]
    handles = [hvd.allreduce_async(torch.tensor([i + hvd.rank()]), op=hvd.Sum) for i in range(5)]
    assert [hvd.synchronize(handle).item() for handle in reversed(handles)] == [15, 12, 9, 6, 3]
    assert all(hvd.poll(handle) for handle in handles)
    assert hvd.synchronize(handles[0]).item() == 3, "and once more"
    handle = hvd.allreduce_async_(mine, op=hvd.Sum)
    assert hvd.synchronize(handle) is mine
    assert mine.tolist() == [3, 3, 3]
    grouped = hvd.grouped_allreduce([torch.ones(2) * hvd.rank(), torch.ones(3) * 3])
    assert [tensor.tolist() for tensor in grouped] == [[1, 1], [3, 3, 3]]


def check_allgather() -> None:
    rank = hvd.rank()
    assert hvd.allgather(torch.full((2, 2), rank)).tolist() == [[r, r] for r in (0, 0, 1, 1, 2, 2)]
    uneven = hvd.allgather(torch.full((rank, 3), float(rank)))
    assert uneven.tolist() == [[r] * 3 for r in (1.0, 2.0, 2.0)]
    assert hvd.allgather(torch.empty(0, 5)).shape == (0, 5)
    handle = hvd.allgather_async(torch.arange(3 - rank), name="unlike")
    assert hvd.synchronize(handle).tolist() == [0, 1, 2, 0, 1, 0]
    for different in (torch.zeros(1, 1 + rank), torch.zeros(1, dtype=(torch.int32, torch.int64)[rank % 2])):
        with pytest.raises(UsageError, match="same dtype"):
            hvd.allgather(different)
    with pytest.raises(UsageError, match="dimensions"):
        hvd.allgather(torch.tensor(1.0))


def check_broadcast() -> None:
    mine = torch.full((2, 3), float(hvd.rank()))
    assert hvd.broadcast(mine, 1).tolist() == [[1] * 3] * 2
    assert mine[0, 0] == hvd.rank()
    assert hvd.synchronize(hvd.broadcast_async(mine, 2)).tolist() == [[2] * 3] * 2
    across = mine.t()
    assert hvd.broadcast_(across, 2) is across
    assert mine.tolist() == [[2] * 3] * 2
    assert hvd.synchronize(hvd.broadcast_async_(mine, 0)) is mine
    with pytest.raises(UsageError, match="rank of the world, 0 to 2"):
        hvd.broadcast(mine, 3)


def check_objects() -> None:
    rank = hvd.rank()
    assert hvd.broadcast_object({"from": rank, "list": [1, 2]}, root_rank=2) == {"from": 2, "list": [1, 2]}
    assert hvd.broadcast_object(None if rank else "hers", 0) == "hers"
    assert hvd.allgather_object("x" * rank) == ["", "x", "xx"]


def check_alltoall() -> None:
    rank = hvd.rank()
    mine = torch.arange(3) + 10 * rank
    assert torch.equal(hvd.alltoall(mine), torch.tensor([rank, 10 + rank, 20 + rank]))
    received, counts = hvd.alltoall(torch.full((3, 2), rank), splits=torch.tensor([0, 1, 2]))
    assert counts.tolist() == [rank] * 3
    assert received.tolist() == [[r, r] for r in range(3) for _ in range(rank)]
    received, counts = hvd.alltoall(mine, splits=torch.empty(0, dtype=torch.int32))
    assert torch.equal(received, torch.tensor([rank, 10 + rank, 20 + rank]))
    assert counts.tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="add up to the first dimension"):
        hvd.alltoall(torch.zeros(4))


def check_splits_of_alltoall() -> None:
    rank = hvd.rank()
    rows = torch.arange(5.0, requires_grad=True)
    received, counts = hvd.alltoall(rows, splits=[0, 1, 2])
    assert received.tolist() == [[], [0] * 3, [1, 2] * 3][rank], "the last two rows are not sent"
    assert counts.tolist() == [rank] * 3
    received.sum().backward()
    assert rows.grad is not None
    assert rows.grad.tolist() == [1, 1, 1, 0, 0]
    wrong: list[tuple[Any, str]] = [
        (torch.empty(3), r"float32\[3\]: must have one dimension and integers"),
        (torch.full((3,), torch.nan), "integers"),
        (torch.ones(3, dtype=torch.bool), "integers"),
        (torch.ones(1, 3, dtype=torch.int32), "one dimension"),
        (torch.tensor([1, 1], dtype=torch.int32), "must be 3 numbers"),
        (torch.tensor([1, 1, 2], dtype=torch.int32), "add up to the first dimension, 3, or less"),
        ([2, 2, -1], "must be 3 numbers"),
        ([1.0, torch.inf, 1.0], "infinity"),
        (3, "int"),
    ]
    for splits, match in wrong:
        with pytest.raises(ValueError, match=match):
            hvd.alltoall(torch.zeros(3), splits)
        with pytest.raises(ValueError, match=match):
            hvd.alltoall(torch.zeros(3), splits if rank == 1 else None)
    assert hvd.allgather(torch.ones(1)).tolist() == [1, 1, 1]


def check_gradients_flow() -> None:
    rank = hvd.rank()
    mine = torch.ones(2, requires_grad=True)
    (hvd.allreduce(mine, op=hvd.Sum) * (rank + 1)).sum().backward()
    assert mine.grad is not None
    assert mine.grad.tolist() == [6, 6]
    mine = torch.ones(rank + 1, requires_grad=True)
    (hvd.allgather(mine) * torch.arange(6.0)).sum().backward()
    assert mine.grad is not None
    assert mine.grad.tolist() == [[0], [1, 2], [3, 4, 5]][rank], "the average, as in Horovod"
    mine = torch.ones(2, requires_grad=True)
    (hvd.broadcast(mine, 1) * (rank + 1)).sum().backward()
    assert mine.grad is not None
    assert mine.grad.tolist() == ([2, 2] if rank == 1 else [0, 0]), "the average, as in Horovod"
    mine = torch.ones(3, 2, requires_grad=True)
    output, counts = hvd.alltoall(mine, splits=[0, 1, 2])
    assert counts.dtype == torch.int32
    assert not counts.requires_grad
    (output * (rank + 1)).sum().backward()
    assert mine.grad is not None
    assert mine.grad.tolist() == [[2, 2], [3, 3], [3, 3]], "of the rank that each row went to"
    mine = torch.ones(3, requires_grad=True)
    output = hvd.alltoall(mine)
    (output * (rank + 1)).sum().backward()
    assert mine.grad is not None
    assert mine.grad.tolist() == [1, 2, 3]


def check_barrier() -> None:
    hvd.barrier()


def check_the_length_of_a_sampler_is_fixed_until_a_reset() -> None:
    """Warm the learning rate up as in Horovod's ImageNet example. The last epoch ends with its full value."""
    data = range(24)
    sampler = hvd.elastic.ElasticSampler(data)
    loader = DataLoader(data, 2, sampler=sampler)  # type: ignore[arg-type]  # a range is a dataset
    rates, seen = [], []
    for epoch in range(2):  # without set_epoch for one of the epochs
        for i, indices in enumerate(loader):
            rates.append((epoch + (i + 1) / len(loader)) * (hvd.size() - 1) / 2 + 1)
            sampler.record_batch(i, len(indices))
            seen += indices.tolist()
    assert rates == [1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0]
    assert sorted(i for own in hvd.allgather_object(seen) for i in own) == sorted([*data, *data])
    sampler.reset()
    assert len(loader) == 0


# --------------------------------------------------------------------------------------------------------------- start


def check_parameters_of_the_root() -> None:
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model(torch.randn(5, 3))
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    assert len(set(hvd.allgather_object(digest(model.state_dict().values())))) == 1
    with torch.no_grad():
        model[0].weight.add_(hvd.rank())
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    assert len(set(hvd.allgather_object(digest(model.state_dict().values())))) == 1
    with pytest.raises(UsageError, match=r"rank 1: .* w: float32\[2\]"):
        hvd.broadcast_parameters({"w": torch.zeros(2 if hvd.rank() == 1 else 3)})


def check_optimizer_state_of_the_root() -> None:
    """Broadcast the optimizer state of the root. No other rank makes a step: weight decay would change weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].weight = nn.Parameter(torch.randn(3, 4).t())  # a fused optimizer needs its strides
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (1 + hvd.rank()), weight_decay=0.1, fused=True)
    before = digest(model.parameters())
    if hvd.rank() == 2:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    mine = digest(model.parameters())
    hvd.broadcast_optimizer_state(hvd.DistributedOptimizer(optimizer), root_rank=2)
    assert digest(model.parameters()) == mine
    assert (mine == before) == (hvd.rank() != 2)
    assert len(optimizer.state) == 4
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.3)
    moments = [value for entry in optimizer.state.values() for value in entry.values()]
    assert len(set(hvd.allgather_object(digest(moments)))) == 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=2)
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert len(set(hvd.allgather_object(digest(model.parameters())))) == 1, "and goes on alike"


# ----------------------------------------------------------------------------------------------------------- optimizer


class Net(nn.Module):
    """Model with many parameters of several sizes. Two layers share a weight, and one layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(6, 40)
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(6))
        self.output = nn.Linear(40, 40)
        self.output.weight = self.layers[0].weight
        self.unused = nn.Linear(3, 3)
        self.sometimes = nn.Linear(40, 40)

    def forward(self, x: torch.Tensor, branch: bool = False) -> torch.Tensor:
        x = torch.tanh(self.inputs(x))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.output(self.sometimes(x) if branch else x)


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + hvd.rank()))


def compare(tolerance: float, passes: int = 1, branches: bool = False, **options: Any) -> None:
    """Check that five steps with DistributedOptimizer give the same result as with DDP."""
    torch.manual_seed(1)
    mine, theirs = Net(), Net()
    theirs.load_state_dict(mine.state_dict())
    ddp = DistributedDataParallel(theirs, find_unused_parameters=True)

    def two_groups(model: Net) -> torch.optim.Optimizer:
        late = [*model.output.parameters(), *model.unused.parameters(), *model.sometimes.parameters()]
        known = set(map(id, late))
        rest = [p for p in model.parameters() if id(p) not in known]
        return torch.optim.SGD([{"params": rest}, {"params": late, "lr": 0.02}], lr=0.05, momentum=0.9)

    optimizer: Any = two_groups(mine)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=mine.named_parameters(), backward_passes_per_step=passes, **options
    )
    reference = two_groups(theirs)
    for step in range(5):
        optimizer.zero_grad()
        reference.zero_grad()
        for part in range(passes):
            branch = branches and (step + hvd.rank()) % 3 == 0
            x = batch(step * passes + part)
            mine(x, branch).square().sum().backward()
            if part < passes - 1:
                with ddp.no_sync():
                    ddp(x, branch).square().sum().backward()
            else:
                ddp(x, branch).square().sum().backward()
        optimizer.synchronize()
        for (name, p), q in zip(mine.named_parameters(), theirs.parameters(), strict=True):
            wanted = torch.zeros_like(q) if q.grad is None else q.grad
            assert p.grad is not None, name
            error = (p.grad - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)
            assert error <= tolerance, f"step {step}, {name}: {error}"
        optimizer.step()
        reference.step()
        for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=tolerance * float(q.detach().abs().max()))
        theirs.load_state_dict(mine.state_dict())  # ignore the effect of rounding on later steps
    assert len(set(hvd.allgather_object(digest(mine.parameters())))) == 1


def check_like_ddp() -> None:
    compare(1e-6)


def check_like_ddp_in_many_buckets() -> None:
    first, optimizer.FIRST_BYTES, most, optimizer.BYTES = optimizer.FIRST_BYTES, 1000, optimizer.BYTES, 10000
    try:
        compare(1e-6)
        compare(1e-6, branches=True)
    finally:
        optimizer.FIRST_BYTES, optimizer.BYTES = first, most


def check_like_ddp_with_unlike_branches() -> None:
    compare(1e-6, branches=True)


def check_like_ddp_with_two_passes() -> None:
    compare(1e-6, passes=2)


def check_like_ddp_with_predivision() -> None:
    compare(1e-6, gradient_predivide_factor=2.0)


def check_like_ddp_in_half_precision() -> None:
    compare(5e-3, compression=hvd.Compression.fp16)


def digest(tensors: Iterable[torch.Tensor]) -> bytes:
    return b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in copy.copy(list(tensors)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, required=True)
    folder = parser.parse_args().log
    torch.set_num_threads(1)
    with pytest.raises(NotInWorldError, match="init"):
        hvd.rank()
    hvd.init()
    with open(folder / f"{hvd.rank()}.txt", "w", buffering=1) as log:
        for name, check in list(globals().items()):
            if name.startswith("check_") and isinstance(check, Callable):  # type: ignore[arg-type]
                check()
                log.write(f"{name}\n")


main()
