"""Options of a job inside an allocation of Slurm, as its environment variables describe it."""

from __future__ import annotations

import pytest

from elasticstate.errors import OptionError
from elasticstate.options import Options, read_options, slots_of_step, slurm_allocation, slurm_node

# As salloc -N3 -n5 of Slurm 22.05 sets them
ALLOCATION = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2],m1",
    "SLURM_JOB_CPUS_PER_NODE": "8(x2),4",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
}


def read(environ: dict[str, str], **given: str) -> Options:
    return read_options(given, ["train.py"], environ)


def test_the_workers_of_an_allocation_are_whole_groups() -> None:
    options = read(ALLOCATION, np_multiple="2")
    assert (options.np, options.min_np, options.max_np) == (4, 2, None)


@pytest.mark.parametrize(
    ("more", "slots_per_host", "slots"),
    [
        ({}, None, (2, 2, 1)),  # tasks
        ({"SLURM_GPUS_PER_NODE": "4"}, None, (4, 4, 4)),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, None, (4, 4, 4)),
        ({"SLURM_GPUS_ON_NODE": "2"}, None, (2, 2, 2)),
        ({}, 3, (3, 3, 3)),
        ({"SLURM_GPUS_PER_NODE": "4"}, 3, (3, 3, 3)),
        ({}, 0, (8, 8, 4)),  # auto: CPUs
        ({"SLURM_GPUS_PER_NODE": "4"}, 0, (4, 4, 4)),
        ({"SLURM_TASKS_PER_NODE": "1"}, None, (1, 1, 1)),  # within a step: it describes the step
        ({"SLURM_TASKS_PER_NODE": "x"}, None, (1, 1, 1)),
    ],
)
def test_slots(more: dict[str, str], slots_per_host: int | None, slots: tuple[int, ...]) -> None:
    allocation = slurm_allocation({**ALLOCATION, **more})
    assert allocation is not None
    assert allocation.slots(slots_per_host) == slots


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_CPUS_PER_NODE"])
def test_without_one_of_its_variables_there_is_no_allocation(name: str) -> None:
    assert slurm_allocation({**ALLOCATION, name: ""}) is None
    assert read({**ALLOCATION, name: ""}, np="2").discovery is None


def test_inside_an_allocation_hosts_and_sizes_come_from_it() -> None:
    options = read(ALLOCATION)
    assert (options.discovery, options.np, options.min_np, options.max_np) == ("slurm", 5, 1, None)
    options = read(ALLOCATION, np="4")
    assert (options.discovery, options.np, options.min_np, options.max_np) == ("slurm", 4, 4, None)
    assert read(ALLOCATION, slots_per_host="auto").np == 20


@pytest.mark.parametrize(
    "given",
    [
        {"hosts": "a:4"},
        {"hostfile": "f"},
        {"host_discovery_script": "s"},
        {"listen": "0.0.0.0:1", "token_file": "t"},
        {"launcher": "local"},
        {"discovery": "list"},
        {"discovery": "mycloud"},
    ],
)
def test_an_option_that_says_where_hosts_are_is_stronger(given: dict[str, str]) -> None:
    assert read(ALLOCATION, np="2", **given).discovery == given.get("discovery")


def test_more_workers_than_the_allocation_has_slots_are_an_error() -> None:
    with pytest.raises(OptionError, match="-np: 6: the allocation of Slurm has 5 slots"):
        read(ALLOCATION, np="6")


def test_one_elasticrun_in_each_task_of_srun_is_an_error() -> None:
    step = {**ALLOCATION, "SLURM_STEP_NUM_TASKS": "3"}
    with pytest.raises(OptionError, match="srun has started 3 processes of elasticrun, and one is enough"):
        read(step)
    assert read({**step, "SLURM_STEP_NUM_TASKS": "1"}).discovery == "slurm", "an interactive shell: srun --pty bash"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"discovery": "slurm", "hosts": "a:2"}, "--discovery: 'slurm': excludes -H/--hosts"),
        ({"discovery": "script"}, "--discovery: 'script': requires --host-discovery-script. Add it"),
        ({"discovery": "hostfile", "hosts": "a:2"}, "--discovery: 'hostfile': excludes -H/--hosts"),
        ({"discovery": "dial-in"}, "--discovery: 'dial-in': requires --listen. Add it"),
        ({"discovery": "mycloud", "hostfile": "f"}, "--discovery: 'mycloud': excludes --hostfile"),
    ],
)
def test_discovery_and_options_that_name_hosts_contradict_each_other(given: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        read({}, np="2", **given)


def test_an_agent_in_a_step_takes_name_and_slots_from_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_STEP_ID", "SLURM_GPUS_ON_NODE", "SLURM_CPUS_PER_TASK", "SLURMD_NODENAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    assert (slurm_node(), slots_of_step()) == ("", 0), "a batch script is no step of srun"
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert (slurm_node(), slots_of_step()) == ("n2", 0)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "6")
    assert slots_of_step() == 6
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    assert slots_of_step() == 2
