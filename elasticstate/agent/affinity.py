"""The cores of each worker of a host (``--bind``): a part of those that the agent may use, as cpuset and taskset allow.

Linux places memory on the node of the core that writes it first, so a bound worker needs no policy for memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from elasticstate.core.types import number_of


class Machine(NamedTuple):
    """The cores of a host that a process may use, and the devices near them."""

    nodes: tuple[frozenset[int], ...]  # logical cores of each NUMA node that has any
    siblings: tuple[frozenset[int], ...]  # logical cores of each physical core, in the order of the nodes
    gpus: tuple[int | None, ...]  # index in ``nodes`` of each visible GPU; None: not known


def read_machine(allowed: frozenset[int], visible: str | None, root: Path = Path("/")) -> Machine:
    """Return the machine below ``root``, as far as it is known.

    ``allowed``: logical cores. ``visible``: CUDA_VISIBLE_DEVICES, or None.
    """
    system = root / "sys/devices/system"
    numbered = sorted((int(path.name[4:]), path) for path in system.glob("node/node[0-9]*"))
    found = {number: _cores(path / "cpulist") & allowed for number, path in numbered}
    nodes = {number: cores for number, cores in found.items() if cores}
    if frozenset[int]().union(*nodes.values()) != allowed:  # this kernel does not show them
        nodes = {0: allowed}
    seen: dict[frozenset[int], None] = {}
    for cores in nodes.values():
        for core in sorted(cores):
            topology = system / f"cpu/cpu{core}/topology/thread_siblings_list"
            seen[(_cores(topology) & cores) | {core}] = None
    order = list(nodes)
    gpus = (_node_of(device, root) for device in _visible(visible, root))
    places = tuple(order.index(node) if node in nodes else None for node in gpus)
    return Machine(tuple(nodes.values()), tuple(seen), places)


def _cores(path: Path) -> frozenset[int]:
    """Read a list like ``0-3,8``; empty if there is none."""
    with suppress(OSError, ValueError):
        parts = (part.partition("-") for part in path.read_text().strip().split(",") if part)
        return frozenset(core for first, _, last in parts for core in range(int(first), int(last or first) + 1))
    return frozenset()


def _visible(visible: str | None, root: Path) -> list[Path | None]:
    """Return the directories of the NVIDIA driver for the GPUs that CUDA shows, in its order; None: not known.

    The order of CUDA is that of the PCI bus where all GPUs are alike, or with CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    devices = sorted((root / "proc/driver/nvidia/gpus").glob("*:*"))
    if visible is None:
        return list(devices)
    return [_device(name.strip(), devices) for name in visible.split(",") if name.strip()]


def _device(name: str, devices: Sequence[Path]) -> Path | None:
    """Return the GPU with this number, or with a UUID that begins so."""
    if name.isdecimal():
        return devices[int(name)] if int(name) < len(devices) else None
    for device in devices:
        with suppress(OSError):
            match = re.search(r"^GPU UUID:\s*(\S+)", (device / "information").read_text(), re.MULTILINE)
            if match is not None and match[1].startswith(name):
                return device
    return None


def _node_of(device: Path | None, root: Path) -> int | None:
    if device is not None:
        with suppress(OSError, ValueError):
            return int((root / "sys/bus/pci/devices" / device.name / "numa_node").read_text())
    return None


def cores_of(mode: str, slot: int, slots: int, machine: Machine) -> frozenset[int]:
    """Return the cores of the worker in this of ``slots`` slots; empty: the host has fewer cores than workers.

    ``numa``: the node of its GPU, whose number is the slot; without GPUs, the slots are divided among the nodes.
    ``cores``: its share of these cores, or without GPUs, of all. Physical cores stay whole if there are enough.
    """
    near, pools = [node for node in machine.gpus[:slots] if node is not None], machine.nodes
    if len(near) < slots:  # without GPUs, or their places
        pools = pools if mode == "numa" else (frozenset[int]().union(*pools),)
        near = [i * len(pools) // slots for i in range(slots)]
    pool, mates = pools[near[slot]], near.count(near[slot])
    if mode == "numa":
        return pool
    if any(near.count(node) > len(pools[node]) for node in near):
        return frozenset()
    units = [cores for cores in machine.siblings if cores <= pool]
    if len(units) < mates:
        units = [frozenset({core}) for cores in units for core in sorted(cores)]
    place = near[:slot].count(near[slot])
    return frozenset[int]().union(*units[place * len(units) // mates : (place + 1) * len(units) // mates])


class Binding:
    """The binding of the workers of this host."""

    def __init__(self, mode: str, environment: Mapping[str, str], warn: Callable[[str], None]) -> None:
        """``environment``: of the workers."""
        self._mode = mode
        self._warn = warn
        allowed = frozenset(os.sched_getaffinity(0))
        self._machine = read_machine(allowed, environment.get("CUDA_VISIBLE_DEVICES")) if mode != "none" else None
        self._has_warned = False

    def cores(self, slot: int, slots: int) -> frozenset[int]:
        """Return the cores of a worker; empty: it is not bound. ``slots``: those of this host."""
        if self._machine is None or slot >= slots:
            return frozenset()
        found = cores_of(self._mode, slot, slots, self._machine)
        if not found and not self._has_warned:
            self._has_warned = True
            count = number_of(sum(map(len, self._machine.nodes)), "core")
            self._warn(f"--bind {self._mode}: {count} for {number_of(slots, 'worker')}, so none is bound")
        return found & os.sched_getaffinity(0)  # a cpuset may have shrunk


@contextmanager
def bound(cores: Collection[int]) -> Iterator[None]:
    """Bind this thread to these cores, if there are any, so that processes that it starts meanwhile are bound."""
    before = os.sched_getaffinity(0)
    try:
        if cores:
            os.sched_setaffinity(0, cores)
        yield
    finally:
        if cores:
            os.sched_setaffinity(0, before)
