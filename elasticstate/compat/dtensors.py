"""Private names of torch.distributed.tensor. Checked with torch 2.11 to 2.15.

- ``DTensor._local_tensor``: the public ``to_local()`` goes through autograd, and takes ten times as long.
- ``placement_types._StridedShard``: placement of a parameter with FSDP2 on top of tensor parallelism. It has no public
  name, and is no ``Shard``.
- ``debug._clear_sharding_prop_cache``, ``_redistribute._gen_transform_infos``,
  ``_sharding_prop.ShardingPropagator._propagate_tensor_meta_cached``, ``_collective_utils.MeshTopoInfo``: caches whose
  keys contain device meshes. Two meshes of different process groups are equal (``DeviceMesh.__eq__`` compares ranks and
  names), so after a regroup a cache could return a mesh whose groups are gone; and its keys keep them alive.
- ``_op_schema.OpSchema``, ``DeviceMesh._pg_registry``: torch 2.11 never frees a tuple that it makes for each operation
  that is new to its caches. It refers to the meshes of the operands, and these to their groups, with sockets and
  threads. So the groups of ended worlds are taken out of the meshes.
- ``_subclasses.fake_tensor.FakeTensorMode.cache``: after these caches have been cleared, torch computes the result of
  each operation anew, and stores it here with the operation's numbers, such as a bias correction of Adam. So each world
  would add entries that no later one uses.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from elasticstate.compat import warn_absent
from elasticstate.compat.process_groups import HashStore, all_groups

Split: TypeAlias = "tuple[int, int] | None"
"""Placement on one dimension of a mesh: (dimension of the tensor, split factor), or None if the tensor is replicated.

Split factor: 0 for a ``Shard``. That of a ``_StridedShard`` is the number of shards into which later dimensions of the
mesh have split the same dimension of the tensor before.
"""

_MOST_RESULTS = 1000  # of operations, about 2 kB each

_LOCAL = "_local_tensor"
local_of: Callable[[Any], torch.Tensor] = attrgetter(_LOCAL)
"""Return the local tensor of a DTensor."""


def is_dtensor(value: object) -> bool:
    """Return True for a DTensor. Does not import torch's module for them."""
    api: Any = sys.modules.get("torch.distributed.tensor")
    return api is not None and isinstance(value, api.DTensor)


def splits_of(dtensor: Any) -> tuple[Split, ...]:
    """Return the placements. Raises ValueError that names one that cannot be described, such as Partial."""
    return tuple(map(_split_of, dtensor.placements))


def like(dtensor: Any, splits: tuple[Split, ...] | None, local: torch.Tensor, shape: tuple[int, ...]) -> Any:
    """Return a DTensor on the mesh of another one, with its placements, or with ``splits`` if these are given."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    placements = dtensor.placements if splits is None else tuple(map(_placement_of, splits))
    return DTensor.from_local(
        local, dtensor.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _split_of(placement: Any) -> Split:
    from torch.distributed.tensor import Replicate, Shard

    strided = _strided_shard()
    if strided is not None and isinstance(placement, strided):
        return placement.dim, int(placement.split_factor)
    if isinstance(placement, Shard):
        return placement.dim, 0
    if isinstance(placement, Replicate):
        return None
    raise ValueError(f"its placement {placement} is neither Shard nor Replicate")


def _placement_of(split: Split) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    if split is None:
        return Replicate()
    dim, factor = split
    return _strided_shard()(dim, split_factor=factor) if factor else Shard(dim)


def _strided_shard() -> Any:
    from torch.distributed.tensor import placement_types

    return getattr(placement_types, "_StridedShard", None)


def clear_mesh_caches() -> None:
    """Clear torch's caches that contain device meshes: when a mesh is no longer used, and before a new one is."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    for name, clear in _clearers():
        if clear is None:
            warn_absent("torch", name, "the process groups of earlier worlds with attached values are not released")
        else:
            clear()
    if _operations_are_kept():
        _release_ended_groups()
    _limit_results()


@functools.cache
def _operations_are_kept() -> bool:
    """Return True if this torch never frees the operands of an operation: see above."""
    from torch.distributed.tensor import _op_schema

    class Operand:
        pass

    operand = Operand()
    exists = weakref.ref(operand)
    try:
        _op_schema.OpSchema(torch.ops.aten.mm.default, (operand,), {}, _op_schema.RuntimeSchemaInfo(0))
    except (AttributeError, TypeError):
        return False
    del operand
    return exists() is not None


def _release_ended_groups() -> None:
    """Take the groups that torch no longer knows out of all meshes. A mesh without them can communicate no more."""
    from torch.distributed.device_mesh import DeviceMesh

    known = set(all_groups())
    for mesh in [found for found in gc.get_objects() if type(found) is DeviceMesh]:
        groups: dict[str, Any] = getattr(mesh, "_pg_registry", {})
        for name in [name for name, group in groups.items() if group not in known]:
            # Without any backend. torch would look for an absent name in the present world.
            groups[name] = dist.ProcessGroup(HashStore(), 0, 1)


def _limit_results() -> None:
    """Clear the cache of results of operations, which is never cleared by torch, if it is large."""
    mode: Any = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensorMode", None)
    clear = getattr(mode, "cache_clear", None)
    if clear is not None and len(getattr(mode, "cache", ())) > _MOST_RESULTS:
        clear()


def _clearers() -> Iterator[tuple[str, Any]]:
    """Yield the names of the caches, and the functions that clear them; None if torch has no such function."""
    from torch.distributed.tensor import _collective_utils, _redistribute, _sharding_prop, debug

    yield "debug._clear_sharding_prop_cache", getattr(debug, "_clear_sharding_prop_cache", None)
    yield "_redistribute._gen_transform_infos", _cache_clear(_redistribute, "_gen_transform_infos")
    yield (
        "_redistribute.clear_redistribute_planner_cache",
        getattr(_redistribute, "clear_redistribute_planner_cache", None),
    )
    propagator = getattr(_sharding_prop, "ShardingPropagator", None)
    yield "ShardingPropagator._propagate_tensor_meta_cached", _cache_clear(propagator, "_propagate_tensor_meta_cached")
    topology = getattr(_collective_utils, "MeshTopoInfo", None)
    yield "MeshTopoInfo.build_from_mesh", _cache_clear(topology, "build_from_mesh")


def _cache_clear(owner: Any, name: str) -> Any:
    return getattr(getattr(owner, name, None), "cache_clear", None)
