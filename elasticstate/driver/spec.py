"""Messages made from the options: what agents run, and what the workers of a world receive."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import msgspec

from elasticstate import backends
from elasticstate.core import types as t
from elasticstate.net import messages
from elasticstate.options import COMMIT_DEVICE_MEMORY, Options, inherited_environment

_MOST_SOURCES = 1000
CALL_FILE = "call"
"""File in the directory of ``launch()``: the function with its arguments, as worker/call.py reads it."""


def job_spec(job: str, job_id: str, epoch: int, options: Options) -> messages.JobSpec:
    """Return the first message to each agent."""
    return messages.JobSpec(
        job=job,
        job_id=job_id,
        epoch=epoch,
        options=replace(
            options,
            commit_dir=str(Path(options.commit_dir).absolute()),
            log_dir=str(Path(options.log_dir).absolute()) if options.log_dir else None,
        ),
        environment=tuple(environment_of_workers(options)),
        call=function_to_call(options),
    )


def function_to_call(options: Options) -> bytes:
    """Return the function that ``launch()`` has written for its workers; empty if they run a command."""
    path = Path(options.call_directory or "", CALL_FILE)
    return path.read_bytes() if options.call_directory is not None and path.exists() else b""


def environment_of_workers(options: Options) -> Iterator[tuple[str, str]]:
    """Yield the environment variables of all workers."""
    if one_thread_each(options):
        yield "OMP_NUM_THREADS", "1"
    yield COMMIT_DEVICE_MEMORY, str(options.commit_device_memory)
    yield from options.timeline_variables().items()
    yield from backends.driver_part(options.backend).worker_variables().items()


def one_thread_each(options: Options) -> bool:
    """Return True if each worker gets one thread, as with torchrun: several workers would compete for the cores."""
    return options.max_np != 1 and "OMP_NUM_THREADS" not in inherited_environment()


def spare_garbage_collection(workers: int) -> None:
    """Raise the threshold of the garbage collector for many workers.

    The driver of a thousand hosts keeps a million objects. With Python's own thresholds (700, 10, 10) it would search
    all of them for cycles in each regroup, for 0.1 s at a time. With few workers garbage is not kept for long.
    """
    gc.set_threshold(max(700, 10 * workers), 10, 10)


def parts_of(world: t.World, options: Options, copy_servers: Mapping[str, str]) -> Iterator[tuple[str, t.World]]:
    """Yield, by host, the part of a world that its members receive. ``copy_servers``: by host, the address."""
    sources = _first_sources(world.sources)
    hosts = dict.fromkeys(source.copy.host for source in sources)
    world = msgspec.structs.replace(
        world,
        sources=sources,
        copy_servers=tuple((host, copy_servers.get(host, "")) for host in hosts),
        options=t.MemberOptions(
            collective_timeout_s=options.collective_timeout_s,
            regroup_timeout_s=options.regroup_timeout_s,
            verify_sync=options.verify_sync,
            records_ticks=options.tick_records and options.lease_s is None,
        ),
    )
    for host, on_host in groupby(world.members, key=lambda placement: placement.worker.host):
        members = tuple(on_host)
        keepers = set(world.keepers).intersection(member.rank for member in members)
        yield host, msgspec.structs.replace(world, members=members, keepers=tuple(sorted(keepers)))


def _first_sources(sources: tuple[t.ShardSource, ...]) -> tuple[t.ShardSource, ...]:
    """Return the first copies of each digest, as many as fit into a datagram, in their order."""
    if len(sources) <= _MOST_SOURCES:
        return sources
    number: Counter[int] = Counter()
    places: list[tuple[int, int]] = []
    for source in sources:
        places.append((number[source.digest], len(places)))
        number[source.digest] += 1
    return tuple(sources[place] for place in sorted(place for _, place in sorted(places)[:_MOST_SOURCES]))
