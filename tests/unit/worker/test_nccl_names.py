"""The installed torch has what the NCCL path uses of it. Skipped with builds for CPUs.

It needs no GPU: ``make test-versions`` runs it with torch's CUDA wheels of several versions.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from elasticstate.worker.contexts import nccl

if not dist.is_nccl_available():
    pytest.skip("this torch is built without NCCL", allow_module_level=True)

VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
C10D = torch._C._distributed_c10d
WITH_NCCL2 = pytest.mark.skipif(VERSION < (2, 14), reason="torch has no nccl2 before 2.14")


def contains(text: str) -> bool:
    """Return True if the text is in torch's compiled code."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text.encode()) >= 0


def test_each_backend_has_its_name() -> None:
    assert nccl.torch_name("nccl") == ("nccl-legacy" if VERSION >= (2, 14) else "nccl")
    assert nccl.torch_name("nccl2") == ("nccl2" if VERSION >= (2, 14) else "")


@pytest.mark.parametrize("part", ["ProcessGroupNCCL", pytest.param("ProcessGroupNCCL2", marks=WITH_NCCL2)])
def test_a_part_can_be_aborted_with_a_limit_and_asked_for_errors(part: str) -> None:
    methods = set(dir(getattr(C10D, part)))
    assert {"abort", "name"} <= methods
    assert methods & {"set_timeout", "_set_default_timeout"}
    assert "get_error" in methods or VERSION < (2, 7)


@pytest.mark.parametrize("name", [names[0] for names, _, _ in nccl._SETTINGS if names[0].startswith("TORCH_NCCL_")])
def test_torch_reads_the_environment_variable(name: str) -> None:
    assert contains(name)
    assert not contains(f"{name}_OF_NOBODY"), "the search itself"


@WITH_NCCL2
@pytest.mark.parametrize("text", nccl._NCCL2_ERRORS)
def test_nccl2_raises_the_error_texts_by_which_failures_are_recognized(text: str) -> None:
    assert contains(text)


def test_torch_has_the_classes_of_errors_of_the_older_backend() -> None:
    assert issubclass(dist.DistBackendError, dist.DistError)
    assert contains("NCCL communicator was aborted on rank")
