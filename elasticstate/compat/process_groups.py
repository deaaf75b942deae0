"""Private names of torch.distributed. Checked with torch 2.11 to 2.15.

- ``distributed_c10d._new_process_group_helper``: creates the groups of ``init_process_group``, ``new_group`` and
  ``DeviceMesh``. ``ProcessGroup.split_group``, which is public, creates the others. torch has no public hook for both.
- ``distributed_c10d._world``: ``group_count`` is a part of the next group's name; ``pg_map`` has all groups,
  ``pg_names`` those that ``destroy_process_group`` shuts down.
- ``distributed_c10d._set_pg_timeout``: changes a group's timeout after its creation. Where torch has the public
  ``torch.distributed.set_timeout`` (torch 2.15 has), that function is used.
- ``ProcessGroup._get_backend``, and ``_ProcessGroupWrapper.wrapped_pg``: the part of a group for one type of device.
- ``Backend.get_error`` (torch 2.7 and later, builds with NCCL), and ``Backend._set_default_timeout``, which torch 2.13
  calls ``set_timeout``. torch 2.14 and 2.15: seen in their wheels.
- ``ProcessGroupGloo._Options`` with ``_devices`` and ``_timeout``: torch offers no public way to give the address at
  which a Gloo group listens. Its default is the one that the host's name resolves to, or 127.0.0.1.
- ``distributed_c10d.ProcessGroupMPI`` and ``_MPI_AVAILABLE``: the class that creates the groups of torch's MPI backend.
- ``torch._C._distributed_c10d._dump_fr_trace_json``: returns the records of torch's flight recorder as JSON, also with
  Gloo. torch records if ``TORCH_FR_BUFFER_SIZE`` is set when the first group is created.
- The stores, and ``rendezvous``, which makes one, are documented. torch does not list some of them in
  ``torch.distributed.__all__``, so type checkers take these for private names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib.metadata import entry_points
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore, distributed_c10d, rendezvous  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from elasticstate.compat import CHECKED, warn_absent
from elasticstate.core.types import Collective
from elasticstate.errors import UsageError

__all__ = ["HashStore", "PrefixStore", "Store", "TCPStore", "rendezvous"]

DEFAULT_TIMEOUTS = (
    None,
    distributed_c10d.default_pg_timeout,
    getattr(distributed_c10d, "default_pg_nccl_timeout", None),  # of a build with NCCL
)
"""Values of the argument ``timeout`` of a group for which the caller has not chosen a timeout."""


GroupCreator = Callable[[Callable[..., Any], int, Sequence[Any], dict[str, Any]], Any]
"""Called with (create, size of the group, args, kwargs), it creates the group by ``create(*args, **kwargs)``."""


def replace_group_creation(creator: GroupCreator) -> Callable[[], None]:
    """Let ``creator`` create all groups of torch from now on. Return the function that ends this.

    Raises UsageError if this torch creates groups in another way.
    """
    helper = _required(distributed_c10d, "_new_process_group_helper", "register the process groups of a world")
    split: Any = dist.ProcessGroup.split_group

    def split_by_creator(group: Any, ranks: Any, *more: Any, **kwargs: Any) -> Any:
        named = dict(zip(_SPLIT_ARGUMENTS, more, strict=False))
        return creator(split, len(ranks), (group, ranks), named | kwargs)

    distributed_c10d._new_process_group_helper = lambda *args, **kwargs: creator(helper, args[0], args, kwargs)
    _set(dist.ProcessGroup, "split_group", split_by_creator)

    def restore() -> None:
        distributed_c10d._new_process_group_helper = helper
        _set(dist.ProcessGroup, "split_group", split)

    return restore


def use_gloo_address(address: Callable[[], str], warn: Callable[[str], None]) -> Callable[[], None]:
    """Let all Gloo groups that this process creates from now on listen at ``address()``; "": where torch chooses.

    ``warn`` is called if that address cannot be used. Groups whose creator gives options of its own keep these. Return
    the function that ends this.
    """
    gloo: Any = dist.ProcessGroupGloo
    create: Any = gloo.__init__

    def create_at_address(group: Any, store: Any, rank: int, size: int, *more: Any, **kwargs: Any) -> None:
        settings = {**dict(zip_longest(_GLOO_ARGUMENTS[: len(more)], more, fillvalue="a further argument")), **kwargs}
        has_options = any(isinstance(value, getattr(gloo, "_Options", ())) for value in settings.values())
        options = None if has_options else _gloo_options(gloo, address(), settings, warn)
        if options is None:
            create(group, store, rank, size, *more, **kwargs)
        else:
            create(group, store, rank, size, options)

    _set(gloo, "__init__", create_at_address)
    return lambda: _set(gloo, "__init__", create)


_SPLIT_ARGUMENTS = ("timeout", "opts", "group_name", "group_desc", "device_types")  # after the ranks
_GLOO_ARGUMENTS = ("timeout", "enable_reconfigure")  # after store, rank and size; torch 2.14 added the second


def _gloo_options(gloo: Any, address: str, settings: dict[str, Any], warn: Callable[[str], None]) -> Any:
    """Return options for a group with these settings that listens at ``address``; None if that is impossible."""
    if not address:
        return None
    try:
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address)]
        for name, value in settings.items():
            field = "_timeout" if name == "timeout" else name
            if value or hasattr(options, field):
                getattr(options, field)  # an unknown one is an error
                setattr(options, field, value)
    except AttributeError as error:
        effect = "Gloo uses the address to which the name of the host resolves"
        warn_absent("torch", f"torch.distributed.ProcessGroupGloo with {error.name}", effect)
        return None
    except RuntimeError as error:
        warn(f"Gloo cannot use {address}, the address of this host: {error}")
        return None
    return options


def reset_group_count() -> None:
    """Let the names of torch's groups begin anew. torch also counts groups whose creation has failed."""
    world: Any = getattr(distributed_c10d, "_world", None)
    if hasattr(world, "group_count"):
        world.group_count = 0
    else:
        effect = "new_group() may hang after a failure, because its group gets another name on each rank"
        warn_absent("torch", "torch.distributed.distributed_c10d._world.group_count", effect)


def set_default_group_timeout(timeout: timedelta) -> None:
    """Set the timeout of the collectives of the default group, which was created with another timeout."""
    set_timeout: Any = getattr(dist, "set_timeout", None) or getattr(distributed_c10d, "_set_pg_timeout", None)
    if set_timeout is not None:
        set_timeout(timeout, dist.group.WORLD)
    else:
        effect = "collectives of the default group time out after --regroup-timeout"
        warn_absent("torch", "torch.distributed.distributed_c10d._set_pg_timeout", effect)


def require_group_parts() -> None:
    """Raise UsageError if :func:`all_groups` and :func:`part_for` do not work with this torch."""
    feature = "abort the communicators of NCCL"
    _required(_required(distributed_c10d, "_world", feature), "pg_map", feature)
    _required(dist.ProcessGroup, "_get_backend", feature)


def all_groups() -> list[Any]:
    """Return all groups that torch manages in this process; none if this torch does not keep them where it did."""
    return list(getattr(getattr(distributed_c10d, "_world", None), "pg_map", ()))


def part_for(group: Any, device: torch.device) -> Any:
    """Return the part of a group for this type of device; None if it has none."""
    try:
        part = group._get_backend(device)
    except RuntimeError:
        return None
    return getattr(part, "wrapped_pg", part)  # wrapped with TORCH_DISTRIBUTED_DEBUG=DETAIL


def torch_backend(*names: str) -> str:
    """Return the first of these backends that torch has; "" if it has none.

    torch 2.14 and later know some backends by the entry points of the installed package only, until one is used.
    """
    known = {*dist.Backend.backend_list, *(entry.name for entry in entry_points(group="torch.distributed.backends"))}
    return next((name for name in names if name in known), "")


def set_part_timeout(part: Any, timeout: timedelta) -> None:
    """Set the timeout of later operations of a part, and of those that the part itself waits for."""
    set_timeout: Any = getattr(part, "set_timeout", None) or getattr(part, "_set_default_timeout", None)
    if set_timeout is not None:
        set_timeout(timeout)


def error_of(part: Any) -> str:
    """Return the error that a part has found by itself (COMM_ERROR, REMOTE_ERROR, TIMEOUT); "" if none is known."""
    get_error: Any = getattr(part, "get_error", None)
    if get_error is None:
        return ""
    try:
        name = str(get_error().name)
    except RuntimeError:  # this backend has none, or it is gone
        return ""
    return "" if name == "SUCCESS" else name


def destroy_groups(warn: Callable[[str], None]) -> None:
    """Destroy all groups that torch manages. If one refuses to shut down, tell ``warn``, and let torch forget it."""
    try:
        dist.destroy_process_group()
    except Exception as error:  # of any backend
        warn(f"torch could not shut down a process group, and forgets it: {error}")
        # torch shuts down the groups in this map, then clears all its maps. Those of NCCL are aborted already.
        _required(_required(distributed_c10d, "_world", "leave a world"), "pg_names", "leave a world").clear()
        dist.destroy_process_group()


def use_as_mpi_backend(maker: Any) -> Callable[[], None]:
    """Let ``maker.create(ranks)`` create the groups of torch's MPI backend, which torch's wheels do not contain.

    torch calls it without ranks for the default group. Return the function that ends this. Raises UsageError if this
    torch has no place for an MPI backend.
    """
    was_available = _required(distributed_c10d, "_MPI_AVAILABLE", "run collectives over MPI")
    before: Any = getattr(distributed_c10d, "ProcessGroupMPI", None)
    _set(distributed_c10d, "ProcessGroupMPI", maker)
    distributed_c10d._MPI_AVAILABLE = True

    def restore() -> None:
        _set(distributed_c10d, "ProcessGroupMPI", before)
        distributed_c10d._MPI_AVAILABLE = was_available

    return restore


def _required(owner: Any, name: str, feature: str) -> Any:
    """Return a private attribute. ``feature``: what elasticstate cannot do without it."""
    found = getattr(owner, name, None)
    if found is None:
        raise UsageError(
            f"torch {torch.__version__} has no {name}, without which elasticstate cannot {feature}. Install torch "
            f"{CHECKED['torch']}, or a newer version of elasticstate."
        )
    return found


def _set(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


_MOST = 128  # records in one report


def last_collectives(since_ns: int) -> tuple[Collective, ...]:
    """Return the last collectives that this process has entered since ``since_ns`` (unix time), oldest first."""
    c10d: Any = getattr(torch._C, "_distributed_c10d", None)
    dump: Callable[[], bytes] | None = getattr(c10d, "_dump_fr_trace_json", None)
    if dump is None:
        name = "torch._C._distributed_c10d._dump_fr_trace_json"
        warn_absent("torch", name, "the collective in which ranks hung is not reported")
        return ()
    entries = json.loads(dump()).get("entries", [])
    recent = (entry for entry in entries if entry["time_created_ns"] >= since_ns and not entry["is_p2p"])
    return tuple(map(_record, recent))[-_MOST:]


def _record(entry: dict[str, Any]) -> Collective:
    name, description = entry["process_group"]
    operation = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    inputs = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    tensors = ", ".join(f"{kind}{sizes}" for kind, sizes in inputs)
    group = description if description == "default_pg" else f"{description or 'group'} {name}"
    return Collective(group, entry["collective_seq_id"], f"{operation}({tensors})")
