"""Checks of each collective of elasticstate.horovod on any number of ranks; see test_horovod_operations.py.

Each rank knows the tensors of all ranks, and computes the expected result with plain torch. The checks are written and
reported as in horovod_checks.py.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elasticstate.horovod as hvd
from elasticstate import UsageError
from elasticstate.horovod import world

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [*INTEGERS, *FLOATS]


def of(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the tensor of a rank: small numbers, which all dtypes hold exactly."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def of_all(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.stack([of(rank, *shape, dtype=dtype) for rank in range(hvd.size())])


def average(total: torch.Tensor, ranks: int) -> torch.Tensor:
    return total / ranks if total.is_floating_point() else total.div(ranks, rounding_mode="trunc")


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected)


def check_environment_variables() -> None:
    expected = {"RANK": hvd.rank(), "SIZE": hvd.size(), "LOCAL_RANK": hvd.local_rank(), "LOCAL_SIZE": hvd.local_size()}
    expected |= {"CROSS_RANK": hvd.cross_rank(), "CROSS_SIZE": hvd.cross_size(), "HOSTNAME": "localhost"}
    assert {name: os.environ[f"HOROVOD_{name}"] for name in expected} == {n: str(v) for n, v in expected.items()}


# --------------------------------------------------------------------------------------------------------- operations


def check_every_dtype_is_reduced() -> None:
    for dtype in DTYPES:
        mine, total = of(hvd.rank(), 2, 3, dtype=dtype), of_all(2, 3, dtype=dtype).sum(0, dtype=dtype)
        same(hvd.allreduce(mine, op=hvd.Sum), total)
        same(hvd.allreduce(mine), average(total, hvd.size()))
        same(hvd.allreduce(mine, op=hvd.Min), of_all(2, 3, dtype=dtype).amin(0))
        same(hvd.allreduce(mine, op=hvd.Max), of_all(2, 3, dtype=dtype).amax(0))
        same(hvd.allreduce(mine, op=hvd.Product), of_all(2, 3, dtype=dtype).prod(0, dtype=dtype))
        target = mine.clone()
        assert hvd.allreduce_(target, op=hvd.Sum) is target
        same(target, total)


def check_every_dtype_is_sent() -> None:
    for dtype in [*DTYPES, torch.bool]:
        everything = of_all(hvd.size(), 2, dtype=dtype)
        mine = everything[hvd.rank()]
        same(hvd.allgather(mine), everything.flatten(0, 1))
        same(hvd.allgather(mine[: hvd.rank()]), torch.cat([rows[:rank] for rank, rows in enumerate(everything)]))
        same(hvd.broadcast(mine, hvd.size() - 1), everything[-1])
        same(hvd.broadcast(mine[0, 0], 0), everything[0, 0, 0])
        same(hvd.alltoall(mine), everything[:, hvd.rank()])  # type: ignore[arg-type]  # without splits: a tensor


def check_int16_wraps_as_in_torch() -> None:
    mine = torch.full((3,), 30000, dtype=torch.int16)
    same(hvd.allreduce(mine, op=hvd.Sum), torch.stack([mine] * hvd.size()).sum(0, dtype=torch.int16))
    same(hvd.allreduce(mine), mine)


def check_what_cannot_be_reduced() -> None:
    with pytest.raises(UsageError, match="no average of bool"):
        hvd.allreduce(torch.ones(2, dtype=torch.bool))
    with pytest.raises(UsageError, match="Max of complex"):
        hvd.allreduce(torch.ones(2, dtype=torch.complex64), op=hvd.Max)
    assert hvd.allreduce(torch.tensor([hvd.rank() == 0]), op=hvd.Sum).tolist() == [True]


def check_reducescatter() -> None:
    rank, ranks = hvd.rank(), hvd.size()
    for dtype in DTYPES:
        for rows in (ranks, 2 * ranks + 1, 1, 0):  # one row more for the first ranks
            lengths = [rows // ranks + (r < rows % ranks) for r in range(ranks)]
            total = of_all(rows, 2, dtype=dtype).sum(0, dtype=dtype).split(lengths)[rank]
            mine = of(rank, rows, 2, dtype=dtype)
            before = mine.clone()
            same(hvd.reducescatter(mine, op=hvd.Sum), total)
            same(hvd.reducescatter(mine), average(total, ranks))
            same(mine, before)
    mine = of(rank, ranks)
    found = hvd.reducescatter(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    same(found, 2 * of_all(ranks).sum(0)[rank : rank + 1])
    same(mine, of(rank, ranks))
    same(hvd.reducescatter(mine, compression=hvd.Compression.fp16), of_all(ranks).mean(0)[rank : rank + 1])
    same(hvd.synchronize(hvd.reducescatter_async(mine)), of_all(ranks).mean(0)[rank : rank + 1])
    for op in (hvd.Max, hvd.Adasum):
        with pytest.raises(UsageError, match=r"(must be|Use) Average or Sum"):
            hvd.reducescatter(mine, op=op)
    with pytest.raises(UsageError, match="dimensions"):
        hvd.reducescatter(torch.tensor(1.0))
    with pytest.raises(UsageError, match=r"reducescatter.*float32\[2\]"):
        hvd.reducescatter(torch.zeros(2 if rank == 0 else 3))


def check_groups_of_tensors() -> None:
    rank, ranks = hvd.rank(), hvd.size()
    shapes = [(2 * ranks,), (ranks, 3)]
    mine = [of(rank, *shape) for shape in shapes]
    totals = [of_all(*shape).sum(0) for shape in shapes]

    def all_same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
        for one, other in zip(found, expected, strict=True):
            same(one, other)

    all_same(hvd.grouped_allreduce(mine, op=hvd.Sum), totals)
    all_same(hvd.synchronize(hvd.grouped_allreduce_async(mine)), [total / ranks for total in totals])
    targets = copy.deepcopy(mine)
    assert all(a is b for a, b in zip(hvd.grouped_allreduce_(targets, op=hvd.Sum), targets, strict=True))
    all_same(targets, totals)
    targets = copy.deepcopy(mine)
    handle = hvd.grouped_allreduce_async_(targets, op=hvd.Sum)
    assert hvd.synchronize(handle)[1] is targets[1]
    assert hvd.poll(handle)
    all_same(targets, totals)
    gathered = [of_all(*shape).flatten(0, 1) for shape in shapes]
    all_same(hvd.grouped_allgather(mine), gathered)
    all_same(hvd.synchronize(hvd.grouped_allgather_async(mine)), gathered)
    lengths = [[2] * ranks, [1] * ranks]
    scattered = [total.split(length)[rank] for total, length in zip(totals, lengths, strict=True)]
    all_same(hvd.grouped_reducescatter(mine, op=hvd.Sum), scattered)
    all_same(hvd.synchronize(hvd.grouped_reducescatter_async(mine, op=hvd.Sum)), scattered)
    assert hvd.grouped_allreduce([]) == []


def check_alltoall_async() -> None:
    rank, ranks = hvd.rank(), hvd.size()
    splits = list(range(ranks))
    mine = of(rank, sum(splits), 2)
    handle = hvd.alltoall_async(mine, splits)
    output, received = hvd.synchronize(handle)
    same(output, torch.cat([rows.split(splits)[rank] for rows in of_all(sum(splits), 2)]))
    same(received, torch.full((ranks,), rank, dtype=torch.int32))


def check_sparse_allreduce() -> None:
    rank, ranks = hvd.rank(), hvd.size()

    def sparse(r: int) -> torch.Tensor:
        dense = torch.zeros(5, 2)
        dense[: r + 1] = of(r, r + 1, 2)  # another number of entries on each rank
        return dense

    total = sum((sparse(r) for r in range(ranks)), torch.zeros(5, 2))
    handle = hvd.sparse_allreduce_async(sparse(rank).to_sparse(1), name="rows", op=hvd.Sum)
    found = hvd.synchronize(handle)
    assert found.layout is torch.sparse_coo
    same(found.to_dense(), total)
    handle = hvd.sparse_allreduce_async(sparse(rank).to_sparse(), name="entries", op=hvd.Average)
    same(handle().to_dense(), total / ranks)
    with pytest.raises(UsageError, match="sparse_coo"):
        hvd.sparse_allreduce_async(torch.zeros(2), name="dense", op=hvd.Sum)
    with pytest.raises(UsageError, match="Average or Sum"):
        hvd.sparse_allreduce_async(torch.zeros(2).to_sparse(), name="max", op=hvd.Max)


def check_gradients() -> None:
    """The gradients follow Horovod's rules, which for some operations are not the derivative of the sum over ranks."""
    rank, ranks = hvd.rank(), hvd.size()
    weights = [of(100 + r, ranks, 2) for r in range(ranks)]

    def gradient(function: Callable[[torch.Tensor], torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
        mine = of(rank, ranks, 2).requires_grad_()
        (function(mine) * weight).sum().backward()
        assert mine.grad is not None
        return mine.grad

    scattered = torch.cat([weight[:1] for weight in weights])
    own = weights[rank][:1]
    same(gradient(lambda x: hvd.reducescatter(x, op=hvd.Average), own), scattered)
    same(gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), own), scattered * ranks)
    same(gradient(lambda x: hvd.grouped_reducescatter([x])[0], own), scattered)
    total = torch.stack(weights).sum(0)
    same(gradient(lambda x: hvd.grouped_allreduce([x], op=hvd.Sum)[0], weights[rank]), total)
    same(gradient(lambda x: hvd.grouped_allgather([x])[0][:ranks], weights[rank]), total / ranks * (rank == 0))


# ------------------------------------------------------------------------------------------------------- process sets


def check_process_sets() -> None:
    rank, ranks = hvd.rank(), hvd.size()
    sets = [hvd.add_process_set(range(1, ranks)), hvd.add_process_set(hvd.ProcessSet([0]))]
    assert [chosen.process_set_id for chosen in sets] == [chosen.process_set_id for chosen in world._added]
    assert len({chosen.process_set_id for chosen in (hvd.global_process_set, *world._added)}) == 3
    with pytest.raises(ValueError, match="these ranks"):
        hvd.add_process_set([0])
    for chosen, members in zip(sets, (list(range(1, ranks)), [0]), strict=True):
        assert chosen.ranks == members
        assert chosen.included() == (rank in members)
        assert chosen.size() == len(members)
        if rank in members:
            in_one_set(chosen, members)
        else:
            with pytest.raises(ValueError, match="included"):
                chosen.rank()
            with pytest.raises(UsageError, match=f"rank {rank} is not in it"):
                hvd.allreduce(torch.ones(1), process_set=chosen)
    same(hvd.allreduce(of(rank, 2), op=hvd.Sum), of_all(2).sum(0))
    same(hvd.allreduce(of(rank, 2), op=hvd.Sum, process_set=hvd.global_process_set), of_all(2).sum(0))
    with pytest.raises(UsageError, match="does not work with process sets"):
        hvd.join()
    assert all(hvd.remove_process_set(chosen) for chosen in sets)
    assert not hvd.remove_process_set(sets[0])
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert sets[0].ranks is None
    with pytest.raises(ValueError, match="was removed"):
        hvd.add_process_set(sets[0])
    with pytest.raises(UsageError, match="was not added"):
        hvd.allreduce(torch.ones(1), process_set=sets[0])
    assert world._added == []
    again = hvd.add_process_set([0])
    assert again.included() == (rank == 0)
    hvd.remove_process_set(again)


def in_one_set(chosen: hvd.ProcessSet, members: list[int]) -> None:
    """Run each collective among the members only."""
    rank, count = hvd.rank(), len(members)
    own = members.index(rank)
    assert chosen.rank() == own
    mine, everything = of(rank, count, 2), torch.stack([of(r, count, 2) for r in members])
    total = everything.sum(0)
    arguments: dict[str, Any] = {"process_set": chosen}
    same(hvd.allreduce(mine, op=hvd.Sum, **arguments), total)
    same(hvd.allreduce(mine, **arguments), total / count)
    same(hvd.allreduce_(mine.clone(), **arguments), total / count)
    same(hvd.synchronize(hvd.allreduce_async(mine, **arguments)), total / count)
    same(hvd.grouped_allreduce([mine], **arguments)[0], total / count)
    same(hvd.allgather(mine, **arguments), everything.flatten(0, 1))
    assert hvd.allgather_object(rank, **arguments) == members
    same(hvd.broadcast(mine, members[-1], **arguments), everything[-1])
    assert hvd.broadcast_object(rank, members[-1], **arguments) == members[-1]
    same(hvd.alltoall(mine, **arguments), everything[:, own])  # type: ignore[arg-type]  # without splits: a tensor
    same(hvd.reducescatter(mine, op=hvd.Sum, **arguments), total[own : own + 1])
    hvd.barrier(**arguments)
    sparse = hvd.sparse_allreduce_async(mine.to_sparse(), name="x", op=hvd.Sum, **arguments)
    same(hvd.synchronize(sparse).to_dense(), total)
    with pytest.raises(UsageError, match="one of"):
        hvd.broadcast(mine, max(members) + 1, **arguments)
    weight = mine.clone().requires_grad_()
    (hvd.allreduce(weight, **arguments) * (own + 1)).sum().backward()
    assert weight.grad is not None
    same(weight.grad, torch.full((count, 2), (count + 1) / 2))
    gathered = mine.clone().requires_grad_()
    hvd.allgather(gathered, **arguments).sum().backward()
    assert gathered.grad is not None
    same(gathered.grad, torch.ones(count, 2))
    model = nn.Linear(2, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=members[0], **arguments)
    digests = hvd.allgather_object([value.tolist() for value in model.state_dict().values()], **arguments)
    assert digests == [digests[0]] * count
    if count > 1:
        with pytest.raises(UsageError, match=r"rank 1: .*float32\[1\]"):
            hvd.allreduce(torch.ones(1 if rank == 1 else 2), **arguments)


def check_an_optimizer_of_a_process_set() -> None:
    rank, ranks = hvd.rank(), hvd.size()
    chosen = hvd.add_process_set(range(ranks - 1))
    weight = nn.Parameter(torch.zeros(2))
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), process_set=chosen)
    for _ in range(3):
        optimizer.zero_grad()
        (weight * (rank + 1)).sum().backward()
        optimizer.step()
    expected = ranks / 2 if rank < ranks - 1 else ranks  # the average of 1 to ranks - 1; or the rank's own
    assert weight.tolist() == [-3 * expected] * 2
    hvd.remove_process_set(chosen)


def check_unlike_process_sets() -> None:
    with pytest.raises(UsageError, match=r"process set \[0, 1\]"):
        hvd.add_process_set([0] if hvd.rank() == 0 else [0, 1])
    for chosen in list(world._added):
        hvd.remove_process_set(chosen)
    same(hvd.allreduce(of(hvd.rank(), 2), op=hvd.Sum), of_all(2).sum(0))


# ---------------------------------------------------------------------------------------------------------- batch norm


def check_batch_norm_over_all_ranks() -> None:
    """Compare with plain BatchNorm over the batches of all ranks, which have unequal lengths."""
    rank, ranks = hvd.rank(), hvd.size()
    for shape in ((), (3,), (3, 2)):
        for options in ({}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}):
            torch.manual_seed(5)
            batches = [torch.randn(r + 1, 4, *shape, dtype=torch.float64) for r in range(ranks)]
            weights = [torch.randn_like(batch) for batch in batches]
            arguments: dict[str, Any] = {**options, "dtype": torch.float64}
            kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d)[len(shape)]
            plain: Any = kind(4, **arguments)
            mine = hvd.SyncBatchNorm(4, **arguments)
            if plain.affine:
                nn.init.uniform_(plain.weight)
                nn.init.uniform_(plain.bias)
            mine.load_state_dict(plain.state_dict())
            for _ in range(2):
                own, whole = batches[rank].clone().requires_grad_(), torch.cat(batches).requires_grad_()
                found, expected = mine(own), plain(whole)
                begin = sum(len(batch) for batch in batches[:rank])
                torch.testing.assert_close(found, expected[begin : begin + rank + 1])
                (found * weights[rank]).sum().backward()
                (expected * torch.cat(weights)).sum().backward()
                assert own.grad is not None
                assert whole.grad is not None
                torch.testing.assert_close(own.grad, whole.grad[begin : begin + rank + 1])
            for name, value in plain.state_dict().items():
                torch.testing.assert_close(mine.state_dict()[name], value)
            for p, q in zip(mine.parameters(), plain.parameters(), strict=True):
                assert p.grad is not None
                torch.testing.assert_close(hvd.allreduce(p.grad, op=hvd.Sum), q.grad)
            mine.eval()
            plain.eval()
            if plain.track_running_stats:
                torch.testing.assert_close(mine(batches[rank]), plain(batches[rank]))
    with pytest.raises(ValueError, match="at least 2"):
        hvd.SyncBatchNorm(4)(torch.zeros(4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, required=True)
    folder = parser.parse_args().log
    torch.set_num_threads(1)
    hvd.init()
    lines = []
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check()
            lines.append(name)
            (folder / f"{hvd.rank()}.txt").write_text("\n".join(lines))
    hvd.shutdown()


if __name__ == "__main__":
    main()
