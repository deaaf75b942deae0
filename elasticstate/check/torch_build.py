"""torch and what it brings along: asked in a child (worker/probe.py), which may crash or hang without harm."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

from elasticstate import processes
from elasticstate.check.nccl import known_of
from elasticstate.check.report import Line, last_line

_OURS = str(Path(__file__).parents[2])  # first in the path of the probe: it is of this very package
_NO_CUDA_BUILD = "install a build of torch for CUDA: https://pytorch.org/get-started"


@dataclass(frozen=True, slots=True)
class Torch:
    """What the probe has said, and how it has ended if not well."""

    told: dict[str, Any] = field(default_factory=dict)
    failure: str = ""

    @property
    def has_gloo(self) -> bool:
        """It was tried."""
        return bool(self.told.get("gloo_works"))

    @property
    def has_nccl(self) -> bool:
        """It is built in, and there are devices for it."""
        return bool(self.told.get("nccl") and self.told.get("devices"))

    @property
    def auto(self) -> str:
        """What ``--backend auto`` is here."""
        return "nccl" if self.has_nccl else "gloo"


async def probe(timeout_s: float) -> Torch:
    """Ask; the probe may take ``timeout_s`` (that of ``--start-timeout``)."""
    command = shlex.join([sys.executable, "-m", "elasticstate.worker.probe", f"{0.9 * timeout_s:g}"])
    try:
        answer = await processes.ask(command, timeout_s, directory=_OURS, whole_session=True)
    except processes.TookTooLong as error:
        answer = error.answer
        return read(answer, timeout_s, is_late=True)
    return read(answer, timeout_s)


def read(answer: processes.Answer, timeout_s: float, is_late: bool = False) -> Torch:
    """The answer of a probe. ``is_late``: it was killed for that."""
    told: dict[str, Any] = {}
    for line in answer.stdout.splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue  # somebody has printed something
        if isinstance(said, dict):
            told |= said
    step = told.get("at", "the start of Python")
    stacks = answer.stderr.rpartition("Timeout (")[2] if "Timeout (" in answer.stderr else ""
    if stacks or is_late:
        where = _where(stacks)
        return Torch(
            told, f"{step} takes longer than --start-timeout of {timeout_s:g} s" + (f": {where}" if where else "")
        )
    if answer.exit_code == 0 and not step:
        return Torch(told)
    killed = f" ({processes.signal_name(-answer.exit_code)})" if answer.exit_code < 0 else ""
    said_last = last_line(answer.stderr) or f"exited with {answer.exit_code}"
    return Torch(told, f"{step} failed{killed}: {said_last}")


def _where(stacks: str) -> str:
    """Where the main thread, whose stack is the last one, is: its first line."""
    frames = stacks.rpartition("Thread 0x")[2].splitlines()[1:2]
    return frames[0].strip() if frames else ""


def torch_lines(torch: Torch, needed: str, machine: str, driver: str) -> list[Line]:
    """torch, CUDA, NCCL and Gloo. ``needed``: the least version of torch; ``driver``: the version of NVIDIA's."""
    told = torch.told
    if "torch" not in told:
        remedy = f"pip install 'torch>={needed}'" if "No module named 'torch'" in torch.failure else "install it anew"
        return [Line(False, f"torch ({torch.failure})", remedy)]
    lines = [_version(told["torch"], needed), _cuda(told, driver)]
    lines.append(_nccl(told, machine))
    if torch.has_gloo:
        lines.append(Line(True, "Gloo: an all-reduce in a world of one"))
    elif told.get("has_gloo") is False:
        lines.append(Line(False, "Gloo: it is not built into this torch", "install a build of torch for Linux"))
    else:
        why = told.get("no_gloo") or torch.failure or "its all-reduce gave another result"
        lines.append(Line(False, f"Gloo: {why}", "GLOO_SOCKET_IFNAME names the interface that it takes"))
    if torch.failure and torch.has_gloo:
        lines.append(Line(False, torch.failure))
    return lines


def _version(version: str, needed: str) -> Line:
    return Line(
        _numbers(version) >= _numbers(needed),
        f"torch {version} ({needed} or later will do)",
        f"pip install 'torch>={needed}'",
    )


def _cuda(told: dict[str, Any], driver: str) -> Line:
    build = told.get("cuda_build", "")
    if told.get("rocm_build"):
        return Line(bool(told.get("devices")), f"ROCm {told['rocm_build']}: not tried with elasticstate")
    if not build:
        with_driver = f", but NVIDIA's driver {driver} is there" if driver else ""
        return Line(False, f"CUDA: this torch is built without it{with_driver}", _NO_CUDA_BUILD)
    text = f"CUDA {build}" + (f", driver {driver}" if driver else "")
    devices = told.get("devices")
    if not devices:
        return Line(False, f"{text}: {told.get('no_cuda') or 'torch sees no device'}", _cuda_remedy(driver))
    names = dict.fromkeys(devices)
    return Line(True, f"{text}: " + ", ".join(f"{devices.count(name)} x {name}" for name in names))


def _cuda_remedy(driver: str) -> str:
    if driver:
        return "see nvidia-smi, CUDA_VISIBLE_DEVICES, and whether the driver is as new as that CUDA"
    return "install NVIDIA's driver; in a container: docker run --gpus all"


def _nccl(told: dict[str, Any], machine: str) -> Line:
    version = told.get("nccl", "")
    if not version:
        return Line(False, "NCCL: it is not built into this torch", _NO_CUDA_BUILD)
    return Line(True, f"NCCL {version}", notes=tuple(f"known: {bug}" for bug in known_of(_numbers(version), machine)))


def needed_torch() -> str:
    """The least version of torch that the installed package asks for; "0" when it does not say."""
    try:
        texts = requires("elasticstate") or []
    except PackageNotFoundError:
        texts = []
    found = [match[1] for text in texts if (match := re.match(r"torch\s*>=\s*([\d.]+)", text))]
    return found[0] if found else "0"


def nvidia_driver(path: str = "/proc/driver/nvidia/version") -> str:
    """Its version; "" when it is not loaded."""
    try:
        match = re.search(r"Kernel Module\D*(\d+[\d.]*)", Path(path).read_text(errors="replace"))
    except OSError:
        return ""
    return match[1] if match else ""


def machine_type() -> str:
    """``x86_64`` or ``aarch64``."""
    return os.uname().machine


def _numbers(version: str) -> tuple[int, ...]:
    """Of ``2.13.0+cpu``: 2, 13, 0."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
