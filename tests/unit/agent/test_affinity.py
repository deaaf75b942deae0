"""The cores of workers, on machines that are made up as trees of files, and on this one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from elasticstate.agent.affinity import Binding, Machine, bound, cores_of, read_machine

Cores = frozenset[int]


def tree(root: Path, nodes: Sequence[str], siblings: Sequence[str] = (), gpus: Mapping[str, int] | None = None) -> Path:
    """Make the files of a machine. ``nodes`` and ``siblings``: lists of cores; ``gpus``: nodes by PCI address."""
    for number, cores in enumerate(nodes):
        write(root / f"sys/devices/system/node/node{number}/cpulist", cores)
    for cores in siblings:
        for core in cores.split(","):
            write(root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list", cores)
    for number, (device, node) in enumerate((gpus or {}).items()):
        write(root / f"proc/driver/nvidia/gpus/{device}/information", f"Model: X\nGPU UUID:\t GPU-{number}abc\n")
        write(root / f"sys/bus/pci/devices/{device}/numa_node", str(node))
    return root


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(f"{text}\n")


def shares(mode: str, slots: int, machine: Machine) -> list[list[int]]:
    return [sorted(cores_of(mode, slot, slots, machine)) for slot in range(slots)]


EIGHT = frozenset(range(8))
SMT = ("0,4", "1,5", "2,6", "3,7")  # cores 0, 1 and their siblings are node 0
TWO_NODES = ("0-1,4-5", "2-3,6-7")


@pytest.mark.parametrize(
    ("slots", "found"),
    [
        (1, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (2, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (3, [[0, 4], [1, 5], [2, 3, 6, 7]]),
        (4, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (8, [[0], [4], [1], [5], [2], [6], [3], [7]]),
        (9, [[]] * 9),
    ],
)
def test_cores_are_shared_and_physical_ones_stay_whole(tmp_path: Path, slots: int, found: list[list[int]]) -> None:
    machine = read_machine(EIGHT, None, tree(tmp_path, TWO_NODES, SMT))
    assert shares("cores", slots, machine) == found


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 9])
def test_without_gpus_the_slots_are_divided_among_the_nodes(tmp_path: Path, slots: int) -> None:
    machine = read_machine(EIGHT, None, tree(tmp_path, TWO_NODES))
    found = shares("numa", slots, machine)
    assert found == sorted(found)
    counts = [found.count(cores) for cores in ([0, 1, 4, 5], [2, 3, 6, 7])]
    assert (sum(counts), max(counts) - min(counts) <= 1) == (slots, True)


GPUS = {"0000:1b:00.0": 1, "0000:3b:00.0": 1, "0000:af:00.0": 0}


@pytest.mark.parametrize(
    ("visible", "numa", "cores"),
    [
        (None, [[2, 3], [2, 3], [0, 1]], [[2], [3], [0, 1]]),
        ("2,0,1", [[0, 1], [2, 3], [2, 3]], [[0, 1], [2], [3]]),
        ("GPU-2ab, GPU-0abc,GPU-1", [[0, 1], [2, 3], [2, 3]], [[0, 1], [2], [3]]),
        ("2,0", [[0, 1], [0, 1], [2, 3]], [[0], [1], [2, 3]]),  # one slot without a GPU: as if there were none
        ("2,0,7", [[0, 1], [0, 1], [2, 3]], [[0], [1], [2, 3]]),
    ],
)
def test_a_worker_is_near_its_gpu(
    tmp_path: Path, visible: str | None, numa: list[list[int]], cores: list[list[int]]
) -> None:
    machine = read_machine(frozenset(range(4)), visible, tree(tmp_path, ("0-1", "2-3"), gpus=GPUS))
    assert (shares("numa", 3, machine), shares("cores", 3, machine)) == (numa, cores)


def test_more_workers_near_a_gpu_than_cores_bind_nothing(tmp_path: Path) -> None:
    machine = read_machine(frozenset(range(3)), None, tree(tmp_path, ("0-1", "2"), gpus=GPUS))
    assert shares("cores", 3, machine) == [[], [], []]
    assert shares("numa", 3, machine) == [[2], [2], [0, 1]]


@pytest.mark.parametrize("node", [-1, 1])
def test_a_gpu_of_an_unknown_node_or_of_one_without_permitted_cores_has_no_place(tmp_path: Path, node: int) -> None:
    """The kernel says -1 on machines with one node, and in many virtual ones."""
    machine = read_machine(frozenset({0, 1}), None, tree(tmp_path, ("0-1", "2-3"), gpus={"0000:1b:00.0": node}))
    assert machine.gpus == (None,)
    assert shares("numa", 1, machine) == [[0, 1]]


def test_only_permitted_cores_count(tmp_path: Path) -> None:
    machine = read_machine(frozenset({1, 5, 6, 7}), None, tree(tmp_path, TWO_NODES, SMT))
    assert shares("cores", 2, machine) == [[1, 5], [6, 7]]
    assert shares("numa", 2, machine) == [[1, 5], [6, 7]]
    assert shares("cores", 4, machine) == [[1], [5], [6], [7]]


def test_a_kernel_that_shows_nothing_has_one_node(tmp_path: Path) -> None:
    machine = read_machine(frozenset({3, 9}), None, tmp_path)
    assert shares("numa", 2, machine) == [[3, 9], [3, 9]]
    assert shares("cores", 2, machine) == [[3], [9]]


def test_too_few_cores_are_reported_once() -> None:
    warnings: list[str] = []
    own, binding = os.sched_getaffinity(0), Binding("cores", {}, warnings.append)
    assert binding.cores(0, 1) == own
    for slot in range(2):
        assert not binding.cores(slot, len(own) + 1)
    (text,) = warnings
    assert text.startswith("--bind cores: ")
    assert text.endswith(f" for {len(own) + 1} workers, so none is bound")
    assert not binding.cores(3, 2), "a slot that the host has no more"
    assert not Binding("none", {}, warnings.append).cores(0, 1)


def test_processes_that_start_meanwhile_are_bound() -> None:
    own = os.sched_getaffinity(0)
    program = "import os; print(sorted(os.sched_getaffinity(0)))"
    for cores in ({min(own)}, set[int]()):
        with bound(cores):
            out = subprocess.run([sys.executable, "-ISc", program], capture_output=True, text=True, check=True).stdout
        assert out.strip() == str(sorted(cores or own))
        assert os.sched_getaffinity(0) == own
