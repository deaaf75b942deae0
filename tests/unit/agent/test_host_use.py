"""Use of a host: of this one, of one whose control group has limits, and of GPUs by NVML's calls."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from elasticstate.agent.host_use import Meter
from elasticstate.machine import cores_of_this_machine

LIBRARY = """
#include <stdint.h>
typedef struct { unsigned gpu, memory; } Use;
typedef struct { unsigned long long total, free, used; } Memory;
int nvmlInit_v2(void) { return FAILS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = COUNT; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(uintptr_t)(index + 1); return 0; }
int nvmlDeviceGetUtilizationRates(void *device, Use *use) {
    if ((uintptr_t)device == 3) return 3;  /* NVML_ERROR_NOT_SUPPORTED: with MIG */
    use->gpu = 40 * (unsigned)(uintptr_t)device; use->memory = 1; return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
    memory->total = 80000000000ULL; memory->used = 10000000000ULL; memory->free = 70000000000ULL; return 0;
}
"""


def library(folder: Path, count: int, fails: int = 0) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source, target = folder / "nvml.c", folder / "libnvml.so"
    source.write_text(LIBRARY)
    flags = [f"-DCOUNT={count}", f"-DFAILS={fails}", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-o", str(target), str(source)], check=True)
    return str(target)


def test_this_host() -> None:
    meter = Meter()
    first = meter.measure()
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        pass
    use = meter.measure()
    assert first.cpu is None, "there is no time between two looks yet"
    assert use.cpu is not None
    assert 0.3 / cores_of_this_machine() / 3 <= use.cpu <= 1.0
    assert 0 < use.memory_bytes < use.memory_total_bytes


def group(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text + "\n")
    return folder


def test_limits_of_a_control_group_of_a_parent_count(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("1:name=systemd:/x\n0::/job/step\n")
    (proc / "meminfo").write_text("MemTotal: 64000000 kB\nMemFree: 1 kB\nMemAvailable: 32000000 kB\n")
    (proc / "stat").write_text("cpu  100 0 100 800 0 0 0 0 0 0\n")
    groups = tmp_path / "groups"
    group(groups / "job" / "step", cpu_max="max 100000", memory_max="max", memory_current="5")
    job = group(groups / "job", cpu_max="50000 100000", cpu_stat="usage_usec 1000000", memory_max="2000000000")
    group(job, memory_current="1500000000", memory_stat="anon 7\ninactive_file 500000000")
    meter = Meter("", groups, proc)
    assert meter.measure()[1:3] == (1_000_000_000, 2_000_000_000)
    time.sleep(0.2)
    group(job, cpu_stat="usage_usec 1050000")  # 0.05 s of 0.5 cores
    cpu = meter.measure().cpu
    assert cpu is not None
    assert 0.0 < cpu <= 0.5
    (proc / "self" / "cgroup").write_text("2:memory:/x\n")  # version 1: the machine counts
    meter = Meter("", groups, proc)
    meter.measure()
    (proc / "stat").write_text("cpu  175 0 100 825 0 0 0 0 0 0\n")
    assert meter.measure()[:3] == (0.75, 1024 * 32_000_000, 1024 * 64_000_000)


def test_gpus(tmp_path: Path) -> None:
    use = Meter(library(tmp_path, 3)).measure()
    assert (use.gpus, use.gpu) == (3, 0.6), "the mean of those that give a number"
    assert (use.gpu_memory_bytes, use.gpu_memory_total_bytes) == (30_000_000_000, 240_000_000_000)


@pytest.mark.parametrize(("count", "fails"), [(0, 0), (2, 9)])
def test_a_host_without_gpus_or_driver_has_none(tmp_path: Path, count: int, fails: int) -> None:
    assert Meter(library(tmp_path, count, fails)).measure().gpus == 0


def test_a_library_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "libnvml.so").write_text("")
    assert Meter(str(tmp_path / "libnvml.so")).measure().gpus == 0
