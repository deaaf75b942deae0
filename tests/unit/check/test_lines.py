"""Report lines of ``elasticrun --check`` for each result of a search."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elasticstate.check import Line, last_line, render
from elasticstate.check.hosts import judge
from elasticstate.check.local import Torch, file_system, nvidia_driver, read, shared_memory_line, torch_lines
from elasticstate.mpi.installation import MpiInstallation, mpi_lines
from elasticstate.processes import Answer

GOOD = {"torch": "2.13.0+cpu", "has_gloo": True, "has_nccl": False, "gloo_works": True, "at": ""}
WITH_CUDA = {**GOOD, "torch": "2.13.0", "cuda_build": "13.0", "nccl": "2.28.9", "has_nccl": True}


def lines_of(facts: dict[str, object], failure: str = "", driver: str = "") -> list[str]:
    return [str(line) for line in torch_lines(Torch(facts, failure), "2.6", "x86_64", driver)]


# ------------------------------------------------------------------------------------------------------------ lines


def test_a_line_has_its_remedy_only_where_something_is_missing() -> None:
    assert str(Line(True, "a", "do b")) == "    [X] a"
    assert str(Line(False, "a", "do b")) == "    [ ] a: do b"
    assert render([Line(True, "a", notes=("c",)), Line(False, "d")]) == "    [X] a\n        c\n    [ ] d\n"


def test_the_last_line_that_says_something() -> None:
    assert last_line("a\n b \n\n") == "b"
    assert last_line("\n") == ""


# ------------------------------------------------------------------------------------------------------------ torch


def test_a_torch_for_the_cpu() -> None:
    version, cuda, nccl, gloo = lines_of(GOOD)
    assert version == "    [X] torch 2.13.0+cpu (2.6 or later is required)"
    assert "[ ] CUDA: this torch is built without CUDA: install a build of torch for CUDA" in cuda
    assert "[ ] NCCL: this torch is built without NCCL" in nccl
    assert gloo == "    [X] Gloo: an all-reduce in a world of one"


def test_a_torch_that_is_too_old() -> None:
    assert lines_of({**GOOD, "torch": "2.5.1"})[0].startswith(
        "    [ ] torch 2.5.1 (2.6 or later is required): pip install"
    )


def test_a_driver_without_a_torch_for_it() -> None:
    assert "but NVIDIA's driver 580.65.06 is installed" in lines_of(GOOD, driver="580.65.06")[1]


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024", "550.54.15"),
        ("NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (archlinux)", "580.159.04"),
        ("NVIDIA UNIX Open Kernel Module for aarch64  580.65.06  Release Build  (dvs-builder)", "580.65.06"),
        ("another maker's", ""),
    ],
)
def test_the_version_of_the_driver(tmp_path: Path, line: str, version: str) -> None:
    (tmp_path / "version").write_text(f"NVRM version: {line}\nGCC version:  gcc version 13.3.0\n")
    assert nvidia_driver(str(tmp_path / "version")) == version


def test_devices_are_counted_by_name() -> None:
    cuda, nccl = lines_of({**WITH_CUDA, "devices": ["A", "A", "B"]}, driver="580.1")[1:3]
    assert cuda == "    [X] CUDA 13.0, driver 580.1: 2 x A, 1 x B"
    assert nccl.startswith("    [X] NCCL 2.28.9\n        known bug: over InfiniBand")


def test_which_backend_of_torch_a_job_would_use() -> None:
    nccl = lines_of({**WITH_CUDA, "nccl_names": {"nccl": "nccl-legacy", "nccl2": "nccl2"}})[2]
    assert "\n        --backend nccl is torch's nccl-legacy; --backend nccl2 is torch's nccl2\n" in nccl
    assert "nccl2" not in lines_of({**WITH_CUDA, "nccl_names": {"nccl": "nccl", "nccl2": ""}})[2]


def test_a_version_of_nccl_that_no_worker_starts_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELASTICSTATE_ANY_NCCL", raising=False)
    facts = {**WITH_CUDA, "nccl": "2.28.3", "devices": ["A"]}
    assert lines_of(facts)[2].startswith(
        "    [ ] NCCL 2.28.3: no worker starts with it, unless ELASTICSTATE_ANY_NCCL=1"
    )
    assert Torch(facts).problem_of_nccl("nccl") == "no worker starts with this version of NCCL"
    assert Torch({**facts, "rocm_build": "7.0"}).problem_of_nccl("nccl") == ""
    monkeypatch.setenv("ELASTICSTATE_ANY_NCCL", "1")
    assert lines_of(facts)[2].startswith("    [X] NCCL 2.28.3\n        known bug: ")
    assert Torch(facts).problem_of_nccl("nccl") == ""


def test_a_torch_without_nccl2() -> None:
    facts = {**WITH_CUDA, "devices": ["A"], "nccl_names": {"nccl": "nccl", "nccl2": ""}}
    assert Torch(facts).problem_of_nccl("nccl") == ""
    assert Torch(facts).problem_of_nccl("nccl2") == "torch 2.13.0 has no backend nccl2"


def test_why_there_is_no_device() -> None:
    cuda = lines_of({**WITH_CUDA, "no_cuda": "Found no NVIDIA driver on your system."})[1]
    assert cuda.startswith("    [ ] CUDA 13.0: Found no NVIDIA driver on your system.: install NVIDIA's driver")
    assert "check nvidia-smi" in lines_of({**WITH_CUDA, "devices": []}, driver="580.1")[1]


def test_a_gloo_that_does_not_work() -> None:
    facts = {**GOOD, "gloo_works": False, "no_gloo": "no address for this host name"}
    assert "[ ] Gloo: no address for this host name: set GLOO_SOCKET_IFNAME" in lines_of(facts)[3]
    assert "this torch is built without Gloo" in lines_of({**GOOD, "gloo_works": False, "has_gloo": False})[3]


@pytest.mark.parametrize(
    ("facts", "backend"),
    [
        (GOOD, "gloo"),
        (WITH_CUDA, "gloo"),
        ({**WITH_CUDA, "devices": ["A"]}, "nccl"),
        ({**GOOD, "devices": ["A"]}, "gloo"),
    ],
)
def test_nccl_is_chosen_where_there_are_devices_and_nccl(facts: dict[str, object], backend: str) -> None:
    assert Torch(facts).auto == backend


# -------------------------------------------------------------------------------------------- how a probe has ended


def said(*objects: dict[str, object]) -> str:
    return "".join(json.dumps(each) + "\n" for each in objects)


def test_what_others_print_is_no_answer() -> None:
    torch = read(Answer(0, "hello\n[1]\n" + said(GOOD), ""), 600)
    assert torch == Torch(dict(GOOD))


def test_no_torch() -> None:
    stderr = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'torch'\n"
    torch = read(Answer(1, said({"at": "import torch"}), stderr), 600)
    assert torch.failure == "import torch failed: ModuleNotFoundError: No module named 'torch'"
    assert lines_of({}, torch.failure) == [f"    [ ] torch ({torch.failure}): pip install 'torch>=2.6'"]


def test_a_torch_that_crashes_is_told_with_its_last_line() -> None:
    torch = read(Answer(-11, said({"at": "import torch"}), "Fatal\n  File x, line 3\n"), 600)
    assert torch.failure == "import torch failed (SIGSEGV): File x, line 3"


def test_a_torch_that_hangs_is_told_with_the_place() -> None:
    stacks = (
        "Timeout (0:00:09)!\nThread 0x1 (most recent call first):\n  File a\nThread 0x2 (most recent call first):\n"
    )
    torch = read(Answer(1, said({"at": "import torch"}), stacks + '  File "b", line 7 in f\n  File "c"\n'), 10)
    assert torch.failure == 'import torch takes longer than --start-timeout of 10 s: File "b", line 7 in f'


def test_what_was_found_before_a_hang_is_told() -> None:
    torch = read(Answer(-9, said({**GOOD, "gloo_works": False}, {"at": "Gloo"}), ""), 10, is_late=True)
    assert lines_of(torch.facts, torch.failure)[3].startswith(
        "    [ ] Gloo: Gloo takes longer than --start-timeout of 10 s"
    )


# -------------------------------------------------------------------------------------------------------------- MPI


def test_all_of_mpi() -> None:
    found = MpiInstallation(
        mpi4py="4.1.2",
        library="/p/lib/libmpi.so.40",
        version="Open MPI 5.0.11",
        mpirun="/p/bin/mpirun",
        mpirun_version="Open MPI 5.0.11",
        has_ulfm=True,
        has_thread_multiple=True,
    )
    assert [line.is_available for line in mpi_lines(found)] == [True] * 5


def test_the_first_that_is_missing_of_mpi_says_why() -> None:
    lines = mpi_lines(MpiInstallation(mpi4py="4.1.2", problem="there is no MPI library. Run pip."))
    assert [str(line) for line in lines] == [
        "    [X] mpi4py 4.1.2",
        "    [ ] MPI library: there is no MPI library. Run pip.",
        "    [ ] mpirun: not tried",
        "    [ ] ULFM: not tried",
        "    [ ] MPI_THREAD_MULTIPLE: not tried",
    ]


# ------------------------------------------------------------------------------------------------------------ hosts


def host(answer: Answer) -> str:
    return str(
        judge(
            "h1",
            "/p/python",
            answer,
            "0.1.0",
            {"torch": "torch", "mpi4py": "'e[mpi]'"},
            lambda code: f"exited with {code}",
        )
    )


def test_a_host_that_is_well() -> None:
    facts = {"version": "0.1.0", "python": "3.12.1", "slots": 8, "has_directory": True}
    facts["has"] = {"torch": True, "mpi4py": True}
    assert host(Answer(0, "welcome\n" + said(facts), "")) == "    [X] h1: elasticstate 0.1.0, Python 3.12.1, 8 slots"
    assert "the version here is 0.1.0: install the same version there" in host(
        Answer(0, said({**facts, "version": "0.0.9"}), "")
    )
    assert "no torch: pip install torch there" in host(
        Answer(0, said({**facts, "has": {"torch": False, "mpi4py": True}}), "")
    )
    absent = {**facts, "has": {"torch": True, "mpi4py": False}}
    assert "no mpi4py: pip install 'e[mpi]' there" in host(Answer(0, said(absent), ""))
    assert "the same working directory" in host(Answer(0, said({**facts, "has_directory": False}), ""))


def test_a_host_that_is_not() -> None:
    missing = "ModuleNotFoundError: No module named 'elasticstate'\n"
    assert host(Answer(1, "", missing)).startswith(
        "    [ ] h1: /p/python on that host has no elasticstate: pip install"
    )
    assert host(Answer(0, "-m elasticstate\n", "")).startswith(
        "    [ ] h1: /p/python on that host is not a working Python"
    )
    assert host(Answer(3, "", "a\nb\n")) == "    [ ] h1: exited with 3: b"


# ------------------------------------------------------------------------------------------------------ file systems

MOUNTS = """\
21 1 0:20 / / rw - ext4 /dev/sda1 rw
22 21 0:21 / /dev rw - devtmpfs udev rw
23 22 0:22 / /dev/shm rw - tmpfs shm rw
24 21 0:23 / /a\\040b rw - xfs /dev/sdb rw
25 21 0:24 / /a\\040b rw master:1 - nfs4 x:/ rw
"""


@pytest.mark.parametrize(
    ("path", "kind"), [("/dev/shm", "tmpfs"), ("/dev/shm2", "devtmpfs"), ("/x", "ext4"), ("/a b/c", "nfs4")]
)
def test_the_type_of_a_file_system(path: str, kind: str) -> None:
    assert file_system(path, MOUNTS) == kind


def test_little_space_has_a_note_with_the_remedy() -> None:
    text = str(shared_memory_line("/dev/shm", "tmpfs", 64 << 20, 60 << 20))
    assert text.startswith("    [X] --commit-dir /dev/shm: tmpfs, 62.9 MB of 67.1 MB free\n        low space: ")
    assert "docker run --shm-size=16g" in text
    assert shared_memory_line("/dev/shm", "tmpfs", 8 << 30, 8 << 30).notes == ()
    assert "not in memory" in str(shared_memory_line("/x", "ext4", 8 << 40, 8 << 40))
