"""All collectives of DDP and FSDP jobs, on the default group and on a sub-group, with checks of the values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)


def check_all(device: torch.device, directory: Path) -> None:
    for group in (None, _pairs_of_neighbours()):
        check_group(device, group)
        check_point_to_point(device, group)
    check_functional(device)
    check_ddp(device)
    check_fsdp(device)


def _pairs_of_neighbours() -> Any:
    """Return the group of this rank among (0, 1), (2, 3) ...; the last rank may be alone."""
    mine = None
    for begin in range(0, dist.get_world_size(), 2):
        ranks = [rank for rank in (begin, begin + 1) if rank < dist.get_world_size()]
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    return mine


def check_group(device: torch.device, group: Any) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    total = size * (size + 1) // 2  # sum of rank + 1

    def mine(shape: Any = (5, 3), dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(shape, rank + 1, dtype=dtype, device=device)

    def same(tensor: torch.Tensor, value: float) -> None:
        assert torch.equal(tensor, torch.full_like(tensor, value)), (tensor, value)

    for dtype in DTYPES:
        tensor = mine(dtype=dtype)
        dist.all_reduce(tensor, group=group)
        same(tensor, total)
    for op, value in ((dist.ReduceOp.MAX, size), (dist.ReduceOp.MIN, 1)):
        tensor = mine()
        dist.all_reduce(tensor, op, group=group)
        same(tensor, value)
    works = []
    tensors = [mine((1 << shift,)) for shift in range(0, 18, 3)]  # reduced concurrently, like the buckets of DDP
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for work, tensor in zip(works, tensors, strict=True):
        work.wait()
        same(tensor, total)
    if device.type == "cpu":  # NCCL refuses tensors that are not contiguous
        strided = torch.zeros(6, 4, device=device).t()
        strided += rank + 1
        dist.all_reduce(strided, group=group)
        same(strided, total)
    dist.all_reduce(torch.empty(0, device=device), group=group)

    for root in range(size):
        tensor = mine()
        dist.broadcast(tensor, group=group, group_src=root)
        same(tensor, root + 1)
        tensor = mine()
        dist.reduce(tensor, group=group, group_dst=root)
        if rank == root:
            same(tensor, total)
        rows = [torch.empty(4, device=device) for _ in range(size)] if rank == root else None
        dist.gather(mine((4,)), rows, group=group, group_dst=root)
        for number, row in enumerate(rows or ()):
            same(row, number + 1)
        parts = [torch.full((4,), float(number), device=device) for number in range(size)] if rank == root else None
        part = torch.empty(4, device=device)
        dist.scatter(part, parts, group=group, group_src=root)
        same(part, rank)

    rows = [torch.empty(2, 3, device=device) for _ in range(size)]
    dist.all_gather(rows, mine((2, 3)), group=group)
    for number, row in enumerate(rows):
        same(row, number + 1)
    for dtype in (torch.float32, torch.bfloat16):
        whole = torch.empty(size * 4, dtype=dtype, device=device)
        dist.all_gather_into_tensor(whole, mine((4,), dtype), group=group)
        assert whole.view(size, 4)[:, 0].tolist() == [number + 1 for number in range(size)]
        share = torch.empty(4, dtype=dtype, device=device)
        dist.reduce_scatter_tensor(share, torch.arange(size * 4, device=device).to(dtype), group=group)
        assert share.tolist() == [size * (4 * rank + index) for index in range(4)]
    share = torch.empty(3, device=device)
    dist.reduce_scatter(share, [torch.full((3,), float(number), device=device) for number in range(size)], group=group)
    same(share, size * rank)
    got = torch.empty(size, device=device)
    dist.all_to_all_single(got, torch.full((size,), float(rank), device=device), group=group)
    assert got.tolist() == list(range(size))
    sent = [torch.full((number + 1,), float(rank), device=device) for number in range(size)]
    taken = [torch.empty(rank + 1, device=device) for _ in range(size)]
    if device.type != "cpu" or dist.get_backend(group) != "gloo":  # Gloo has no all_to_all on lists of tensors
        dist.all_to_all(taken, sent, group=group)
        for number, tensor in enumerate(taken):
            same(tensor, number)
    dist.barrier(group=group)
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank, "text": "x" * 1000 * rank}, group=group)
    assert [item["rank"] for item in found] == list(range(size))
    objects = [("from", rank)]
    dist.broadcast_object_list(objects, group=group, group_src=0)
    assert objects == [("from", 0)]


def check_point_to_point(device: torch.device, group: Any) -> None:
    """Send and receive, also in a new group: one of NCCL's is split from the world's, which once made that hang.

    See https://github.com/pytorch/pytorch/pull/138527.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return
    tensor = torch.full((10,), float(rank), device=device)
    got = torch.empty(10, device=device)
    after, before = (rank + 1) % size, (rank - 1) % size
    work = [
        dist.P2POp(dist.isend, tensor, group=group, group_peer=after),
        dist.P2POp(dist.irecv, got, group=group, group_peer=before),
    ]
    for request in dist.batch_isend_irecv(work):
        request.wait()
    assert got.tolist() == [float(before)] * 10
    if rank == 0:
        dist.send(tensor, group=group, group_dst=1)
    elif rank == 1:
        dist.recv(got, group=group, group_src=0)
        assert got.tolist() == [0.0] * 10


def check_functional(device: torch.device) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    tensor = torch.full((4,), float(rank + 1), device=device)
    assert functional.all_reduce(tensor, "sum", world).tolist() == [size * (size + 1) / 2] * 4
    assert functional.all_gather_tensor(tensor, 0, world).view(size, 4)[:, 0].tolist() == list(range(1, size + 1))
    shared = functional.reduce_scatter_tensor(torch.ones(4 * size, device=device), "sum", 0, world)
    assert shared.tolist() == [float(size)] * 4


def check_ddp(device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).to(device)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.02)
    batch = torch.full((4, 64), float(dist.get_rank()), device=device)
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(batch).square().mean().backward()
    gradient = model[0].weight.grad
    _same_everywhere(gradient)
    own = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).to(device)
    own.load_state_dict(model.state_dict())
    mean = torch.zeros_like(gradient)
    for rank in range(dist.get_world_size()):
        own.zero_grad()
        own(torch.full((4, 64), float(rank), device=device)).square().mean().backward()
        mean += own[0].weight.grad / dist.get_world_size()
    torch.testing.assert_close(gradient, mean)


def check_fsdp(device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
    reference = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
    reference.load_state_dict(model.state_dict())
    fully_shard(model, mesh=mesh)
    for of in (model, reference):
        optimizer = torch.optim.SGD(of.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            of(torch.ones(4, 32, device=device)).square().mean().backward()
            optimizer.step()
    for sharded, whole in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(sharded.full_tensor(), whole)


def _same_everywhere(tensor: torch.Tensor) -> None:
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor)
    assert all(torch.equal(row, rows[0]) for row in rows)
