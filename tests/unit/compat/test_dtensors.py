"""Private names of torch.distributed.tensor are as compat/dtensors.py needs them. A world of one is enough."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch._subclasses import fake_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, placement_types
from torch.distributed.tensor.debug import _get_python_sharding_prop_cache_info

from elasticstate.compat import dtensors


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dtensors.clear_mesh_caches()
    dist.destroy_process_group()
    gc.collect()


def test_the_local_tensor_is_an_object_that_stays_the_same(mesh: DeviceMesh) -> None:
    local = torch.zeros(3)
    tensor = DTensor.from_local(local, mesh, [Shard(0)])
    assert dtensors.is_dtensor(tensor)
    assert not dtensors.is_dtensor(local)
    assert dtensors.local_of(tensor).data_ptr() == local.data_ptr()
    assert dtensors.local_of(tensor) is dtensors.local_of(tensor)


def test_writes_through_a_dtensor_are_counted_there_alone(mesh: DeviceMesh) -> None:
    """A commit from a device uses the versions of DTensors (state/async_commit.py)."""
    local = torch.zeros(3)
    tensor = torch.nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)]))
    version = tensor._version
    with torch.no_grad():
        tensor.add_(1)
    assert tensor._version > version
    assert local.tolist() == [1, 1, 1]
    assert dtensors.local_of(tensor)._version == 0


def test_placements_are_described_and_made_again(mesh: DeviceMesh) -> None:
    for placement, split in (
        (Shard(1), (1, 0)),
        (Replicate(), None),
        (placement_types._StridedShard(1, split_factor=3), (1, 3)),
    ):
        tensor = DTensor.from_local(torch.zeros(2, 3), mesh, [placement], run_check=False)
        assert dtensors.splits_of(tensor) == (split,)
        for made in (
            dtensors.like(tensor, None, torch.ones(2, 3), (2, 3)),
            dtensors.like(tensor, (split,), torch.ones(2, 3), (2, 3)),
        ):
            assert made.placements == (placement,)
            assert made.shape == (2, 3)
            assert made.device_mesh is mesh


def test_a_partial_placement_is_refused(mesh: DeviceMesh) -> None:
    tensor = DTensor.from_local(torch.zeros(2), mesh, [Partial()])
    with pytest.raises(ValueError, match=r"P\(sum\) is neither Shard nor Replicate"):
        dtensors.splits_of(tensor)


def test_all_caches_that_keep_meshes_are_found_and_cleared(caplog: pytest.LogCaptureFixture) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    tensor = DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0)])
    total = (tensor @ tensor.redistribute(mesh, [Replicate()])).sum().full_tensor()
    assert total == 64
    assert _get_python_sharding_prop_cache_info().currsize > 0 or len(gc.get_referrers(mesh)) > 1
    kept = weakref.ref(mesh)
    del tensor, total, mesh
    dist.destroy_process_group()
    gc.collect()
    assert kept() is not None, "the caches keep the mesh alive: otherwise this test shows nothing"
    dtensors.clear_mesh_caches()
    gc.collect()
    if dtensors._operations_are_kept():
        pytest.skip("this torch itself loses each operation's operands, with their mesh: see the next test")
    assert kept() is None
    assert not caplog.records


def test_no_group_of_an_ended_world_is_kept() -> None:
    """Also if the mesh is, which torch 2.11 never frees."""
    for _ in range(2):  # the first group of a process is kept elsewhere, with any torch
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        tensor = DTensor.from_local(torch.ones(4), mesh, [Shard(0)])
        assert tensor.sum().full_tensor() == 4
        dtensors.clear_mesh_caches()
        assert tensor.sum().full_tensor() == 4, "the present world goes on"
        group = weakref.ref(mesh.get_group())
        del tensor, mesh
        dist.destroy_process_group()
        dtensors.clear_mesh_caches()
        gc.collect()
    assert group() is None


def test_results_of_operations_do_not_pile_up(mesh: DeviceMesh) -> None:
    """Each world stores those of operations with other numbers anew, because its sharding caches are empty."""
    tensor = DTensor.from_local(torch.ones(4), mesh, [Shard(0)])
    cache = fake_tensor.FakeTensorMode.cache
    sizes = []
    for number in range(1200):
        tensor * (number + 0.5)
        sizes.append(len(cache))
        dtensors.clear_mesh_caches()
    assert 900 < max(sizes) < 1100, "a world adds entries"
    assert sizes[-1] < 300, "which are removed"
