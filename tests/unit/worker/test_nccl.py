"""The parts of the NCCL backend that need no GPU. The other parts are in tests/integration/test_nccl.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from elasticstate.compat import process_groups
from elasticstate.core.ids import WorkerId
from elasticstate.errors import CollectiveError, UsageError
from elasticstate.options import WorkerEnvironment, set_unless_given
from elasticstate.worker import contexts
from elasticstate.worker.contexts import Context, Fault, nccl
from elasticstate.worker.contexts.gloo import TorchGroups
from elasticstate.worker.contexts.nccl import NcclBackend, NcclContext

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
DEVICE = torch.device("cuda", 0)
NAMES = [name for names, _, _ in nccl._SETTINGS for name in names]


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Unset the variables of NCCL for the test, and also after it."""
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that monkeypatch removes the variable at the end, whoever sets it
        monkeypatch.delenv(name)
    return monkeypatch


# ----------------------------------------------------------------------------------------------- environment variables


def test_what_the_user_has_not_set_is_set(clean: pytest.MonkeyPatch) -> None:
    assert nccl.apply_settings() == []
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0"
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert os.environ["TORCH_NCCL_USE_COMM_NONBLOCKING"] == "0"
    assert "NCCL_ASYNC_ERROR_HANDLING" not in os.environ, "an old name"


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", "0"),
        ("NCCL_ASYNC_ERROR_HANDLING", "1", "0"),
        ("TORCH_NCCL_ENABLE_MONITORING", "true", "0"),
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "60", "86400"),
        ("TORCH_NCCL_USE_COMM_NONBLOCKING", "1", "0"),
    ],
)
def test_what_defeats_recovery_is_kept_and_warned_of(
    clean: pytest.MonkeyPatch, name: str, value: str, wanted: str
) -> None:
    clean.setenv(name, value)
    (warning,) = nccl.apply_settings()
    assert warning.startswith(f"{name}={value} in the environment: ")
    assert warning.endswith(f". Unset the variable, or set it to {wanted}.")
    assert os.environ[name] == value
    if name == "NCCL_ASYNC_ERROR_HANDLING":
        assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ, "it would hide what the user has set"


@pytest.mark.parametrize("value", ["0", "no", "False", " f "])
def test_the_same_in_other_words_is_no_warning(clean: pytest.MonkeyPatch, value: str) -> None:
    clean.setenv("TORCH_NCCL_ENABLE_MONITORING", value)
    assert set_unless_given("0", "TORCH_NCCL_ENABLE_MONITORING") is None
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == value


# ------------------------------------------------------------------------------------------------ choice of the backend


def test_auto_goes_by_the_devices() -> None:
    expected = "nccl" if dist.is_nccl_available() and torch.cuda.device_count() else "gloo"
    assert contexts.by_devices() == expected
    assert type(contexts.choose("auto")) is type(contexts.choose(expected))
    name = nccl.torch_name("nccl")
    assert contexts.for_torch() == {"gloo": "gloo", "nccl": f"cpu:gloo,cuda:{name}"}[expected]


def test_processgroupnccl_is_used_whatever_torch_means_by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    def torch_has(*names: str) -> None:
        monkeypatch.setattr(
            process_groups, "entry_points", lambda group: [SimpleNamespace(name=name) for name in names]
        )

    monkeypatch.setattr(dist.Backend, "backend_list", ["undefined", "gloo", "nccl"])  # each torch begins with these
    torch_has()  # torch 2.13
    assert nccl.torch_name("nccl") == "nccl"
    assert nccl.torch_name("nccl2") == ""
    torch_has("nccl", "nccl-legacy", "nccl2", "nccl-lazy")  # torch 2.14 and 2.15, before one of them is used
    assert nccl.torch_name("nccl") == "nccl-legacy"
    assert nccl.torch_name("nccl2") == "nccl2"


def test_this_torch_has_the_name_that_a_job_would_use() -> None:
    named = set(dist.Backend.backend_list) | {e.name for e in entry_points(group="torch.distributed.backends")}
    assert nccl.torch_name("nccl") in named
    assert (nccl.torch_name("nccl") == "nccl-legacy") == ("nccl-legacy" in named)


def test_an_abort_has_a_limit_of_its_own() -> None:
    assert 10 <= nccl._ABORT_TIMEOUT_S <= 15


def test_what_the_watchdog_of_torch_has_found_in_words() -> None:
    def found(error: str) -> str:
        return process_groups.error_of(SimpleNamespace(get_error=lambda: SimpleNamespace(name=error)))

    assert [found(name) for name in ("SUCCESS", "TIMEOUT", "COMM_ERROR")] == ["", "TIMEOUT", "COMM_ERROR"]
    assert process_groups.error_of(SimpleNamespace()) == "", "torch 2.6"
    assert "--collective-timeout of 1800 s" in nccl._in_words("TIMEOUT", timedelta(seconds=1800))
    assert "REMOTE_ERROR" in nccl._in_words("REMOTE_ERROR", timedelta(seconds=1800))


@pytest.mark.parametrize("version", [(2, 21, 5), (2, 26, 1), (2, 28, 3), (2, 28, 8)])
def test_a_version_that_does_not_survive_is_refused(clean: pytest.MonkeyPatch, version: tuple[int, ...]) -> None:
    clean.delenv("ELASTICSTATE_ANY_NCCL", raising=False)
    with pytest.raises(UsageError, match=rf"^--backend: 'nccl': NCCL {'.'.join(map(str, version))}: .*ANY_NCCL=1"):
        nccl.require_usable("nccl", version)
    clean.setenv("ELASTICSTATE_ANY_NCCL", "1")
    (warning,) = nccl.require_usable("nccl", version)
    assert warning.endswith(". ELASTICSTATE_ANY_NCCL=1 permits it.")


@pytest.mark.parametrize("version", [(2, 26, 2), (2, 27, 7), (2, 28, 2), (2, 28, 9), (2, 30, 7)])
def test_other_versions_are_not_refused(clean: pytest.MonkeyPatch, version: tuple[int, ...]) -> None:
    assert nccl.require_usable("nccl", version) == []


def test_rccl_has_versions_of_its_own(clean: pytest.MonkeyPatch) -> None:
    clean.setattr(torch.version, "hip", "7.0")
    assert nccl.require_usable("nccl", (2, 22, 3)) == []


@NO_CUDA
def test_without_a_device_the_remedy_is_told() -> None:
    environment = WorkerEnvironment("", "", WorkerId("a", 0, 1), "job", "id", "127.0.0.1", "/nowhere", (15,), "nccl")
    with pytest.raises(UsageError, match=r"^--backend: 'nccl': .*\. .*--backend gloo\.$"):
        contexts.choose("nccl").prepare(environment, lambda message: None)


def test_the_context_is_one() -> None:
    context: Context = NcclBackend().context()
    assert context.severs_in_python
    assert not context.broken()
    context.destroy()


# --------------------------------------------------------------------------------------------- classification of errors


def cuda_error(code: int) -> BaseException:
    """Make an error as torch does (torch/csrc/Exceptions.cpp)."""
    error = torch.AcceleratorError("CUDA error: what it is called may change")
    error.error_code = code  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (cuda_error(710), Fault.DEVICE),  # a device-side assert
        (cuda_error(700), Fault.DEVICE),  # an illegal address
        (cuda_error(214), Fault.DEVICE),  # an uncorrectable error of the memory
        (cuda_error(220), Fault.DEVICE),  # of NVLink
        (cuda_error(226), Fault.DEVICE),  # contained by the device
        (cuda_error(721), Fault.DEVICE),  # tensor memory that a kernel has not freed
        (cuda_error(1), Fault.UNKNOWN),  # an invalid value: the device can still be used
        (cuda_error(701), Fault.UNKNOWN),  # too many resources for a launch
        (dist.DistBackendError("NCCL error"), Fault.GENERATION),
        (dist.DistNetworkError("gone"), Fault.GENERATION),
        (RuntimeError("NCCL communicator was aborted after a previous error"), Fault.GENERATION),  # of nccl2
        (RuntimeError("NCCL operation timed out"), Fault.GENERATION),
        (ValueError("NCCL operation timed out"), Fault.UNKNOWN),
        (RuntimeError("NCCL is not initialized"), Fault.UNKNOWN),
        (torch.OutOfMemoryError("too much"), Fault.UNKNOWN),
        (RuntimeError("CUDA error: device-side assert triggered"), Fault.UNKNOWN),  # the text must not decide
    ],
)
def test_an_error_is_judged_by_type_and_number(error: BaseException, fault: Fault) -> None:
    assert NcclContext(None, DEVICE).classify(error) is fault


@NO_CUDA
def test_a_device_that_cannot_be_asked_does_not_answer() -> None:
    assert not contexts.answers(torch.zeros(1), DEVICE, timedelta(seconds=5))


def test_a_call_comes_even_if_the_device_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def set_device(index: int) -> None:
        raise cuda_error(710)

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    called = threading.Event()
    assert contexts.Aside(called.set, 1).join(10)
    assert called.is_set(), "an abort frees the other ranks"


def test_whoever_waits_for_what_hangs_does_not() -> None:
    never = threading.Event()
    aside = contexts.Aside(never.wait, None)
    assert not aside.join(0.01)
    never.set()
    assert aside.join(10)
    assert aside.error is None


# ----------------------------------------------------------------------------------- groups and the end of a generation


def test_a_split_group_is_noted_like_any_other() -> None:
    """DeviceMesh splits a default group that is bound to a device. torch crashes when it splits a Gloo group."""
    sizes: list[int] = []

    def begin(size: int) -> bool:
        sizes.append(size)
        return len(sizes) == 1

    ends: list[None] = []
    groups = TorchGroups(begin, lambda: ends.append(None))
    original = dist.ProcessGroup.split_group
    try:
        groups.create("gloo", timedelta(seconds=77), store=HashStore(), rank=0, world_size=1)
        with pytest.raises(CollectiveError):
            dist.group.WORLD.split_group([0], group_name="another")
        assert (sizes, len(ends)) == ([1, 1], 1)
    finally:
        groups.destroy()
    assert dist.ProcessGroup.split_group is original


def test_a_group_of_gloo_is_not_aborted() -> None:
    """A Gloo group also accepts CUDA tensors, and is severed through its sockets."""
    groups = TorchGroups(lambda size: True, lambda: None)
    try:
        groups.create("gloo", timedelta(seconds=7), store=HashStore(), rank=0, world_size=1)
        assert nccl._nccl_of(dist.group.WORLD) is None
    finally:
        groups.destroy()


def test_no_group_begins_after_the_end() -> None:
    context = NcclContext(None, DEVICE)
    assert context._begin_group(2)
    context.sever()
    assert context.broken()
    context._end_group()
    assert not context._begin_group(2)
    context.sever()
    context.destroy()


def test_an_error_after_the_begin_of_a_planned_end_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members that abort earlier than this one make its NCCL report a lost connection."""
    part = SimpleNamespace(name=lambda: "nccl", get_error=lambda: SimpleNamespace(name="REMOTE_ERROR"))
    monkeypatch.setattr(process_groups, "all_groups", lambda: [object()])
    monkeypatch.setattr(process_groups, "part_for", lambda group, device: part)

    def context_in_a_world() -> Any:
        context: Any = NcclContext(None, DEVICE)
        context._rendezvous = SimpleNamespace(collective_timeout=timedelta(seconds=7))
        return context

    assert "REMOTE_ERROR" in context_in_a_world().own_failure()
    leaving = context_in_a_world()
    leaving._part_together()
    assert leaving.own_failure() == ""


def test_whoever_is_replaced_ends_by_a_signal_and_says_why() -> None:
    program = (
        "import atexit\nfrom elasticstate.worker.script import exit_for_replacement\n"
        "atexit.register(print, 'tidied up')\nprint('before', end='')\nexit_for_replacement('no device')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == "before"
    assert done.stderr == "elasticstate: this worker is restarted: no device\n"
