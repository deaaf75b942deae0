"""Report lines for this machine: ssh, commit storage, ports, open files; and torch, CUDA, NCCL and Gloo.

A probe, a child process which may crash or hang (worker/probe.py), reports the latter.
"""

from __future__ import annotations

import dataclasses
import os
import pwd
import re
import resource
import shlex
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

from elasticstate import commits, processes
from elasticstate.check import Line, facts_of, last_line
from elasticstate.compat.nccl_versions import known_bugs, refusal
from elasticstate.failures import how_it_ended, signal_name
from elasticstate.machine import format_bytes
from elasticstate.net.names import LOCALHOST, listen_error, own_addresses
from elasticstate.options import ANY_NCCL, environment_variable
from elasticstate.options.kinds import split_address

# --------------------------------------------------------------------------------------------------------------- logind
# Deletion of a job's files by systemd-logind when its user logs out (logind.conf(5), RemoveIPC=).


_FIRST_USER_ID = 1000  # logind spares the IPC objects of root and of system users
_NO = {"no", "n", "false", "f", "off", "0"}
_PLACES = ("usr/lib", "usr/local/lib", "run", "etc")  # the last file that sets an option counts
_SHARED_MEMORY = "/dev/shm"


def deletion_note(base: str, uid: int, user: str, root: Path = Path("/")) -> str:
    """Return a warning with the remedy; "" if logind deletes no files of this user in ``base``."""
    real = os.path.realpath(base)
    if (
        uid < _FIRST_USER_ID
        or not (real + "/").startswith(_SHARED_MEMORY + "/")
        or not (root / "run/systemd/seats").is_dir()  # logind does not run here
        or (root / "var/lib/systemd/linger" / user).exists()
        or not _removes_ipc(root)
    ):
        return ""
    return (
        f"systemd-logind deletes all files of {user} there when the last session of {user} ends (RemoveIPC=yes). The "
        f"job continues, but is lost if all its processes end before its next commit. Use loginctl enable-linger "
        f"{user}, or RemoveIPC=no in /etc/systemd/logind.conf, or another --commit-dir."
    )


def name_of(uid: int) -> str:
    """Return the name of a user, or the number of a user without a name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _removes_ipc(root: Path) -> bool:
    mains = [root / place / "systemd/logind.conf" for place in _PLACES]
    more = [path for place in _PLACES for path in (root / place / "systemd/logind.conf.d").glob("*.conf")]
    found = True
    for path in (*mains, *sorted(more, key=lambda path: path.name)):
        with suppress(OSError):
            for line in path.read_text(errors="replace").splitlines():
                name, _, value = line.partition("=")
                if name.strip() == "RemoveIPC":
                    found = value.strip().lower() not in _NO
    return found


_SMALL_BYTES = 1 << 30
_FEW_FILES = 4096
_IN_MEMORY = {"tmpfs", "ramfs", "hugetlbfs"}


async def ssh_line(timeout_s: float) -> Line:
    """Return the line for the ssh client that connects to other hosts."""
    path = shutil.which("ssh")
    if path is None:
        return Line(False, "ssh", "install OpenSSH's client, to start agents on other hosts")
    try:
        answer = await processes.ask(shlex.join([path, "-V"]), timeout_s)
    except (OSError, TimeoutError) as error:
        return Line(False, f"ssh ({path}): {error}")
    version = last_line(answer.stderr) or last_line(answer.stdout)
    return Line(answer.exit_code == 0, f"ssh: {version} ({path})" if version else f"ssh ({path})")


def commit_line(base: str) -> Line:
    """Return the line for the commit directory: its file system, size and free space."""
    if reason := commits.refuse(base):
        return Line(False, f"--commit-dir {base}: {reason}", "choose another --commit-dir")
    found = os.statvfs(base)
    kind = file_system(base, Path("/proc/self/mountinfo").read_text())
    line = shared_memory_line(base, kind, found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)
    note = deletion_note(base, os.getuid(), name_of(os.getuid()))
    return dataclasses.replace(line, notes=(*line.notes, note)) if note else line


def shared_memory_line(base: str, kind: str, size_bytes: int, free_bytes: int) -> Line:
    """Return the line for a commit directory on a file system of type ``kind``."""
    notes = []
    if free_bytes < _SMALL_BYTES:
        notes.append(
            "low space: each worker needs twice the size of its state. Use docker run --shm-size=16g, "
            f"mount -o remount,size=16g {base}, or another --commit-dir."
        )
    if kind not in _IN_MEMORY:
        notes.append("not in memory: each commit waits for the file system. Use a directory in /dev/shm.")
    text = f"--commit-dir {base}: {kind}, {format_bytes(free_bytes)} of {format_bytes(size_bytes)} free"
    return Line(True, text, notes=tuple(notes))


def file_system(path: str, mounts: str) -> str:
    """Return the type of a directory's file system: that of the last deepest mount in proc_pid_mountinfo(5)."""
    place = os.path.realpath(path)
    best, kind = -1, "unknown"
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        point = before.split()[4].encode().decode("unicode_escape")
        if len(point) >= best and (place + "/").startswith(point.rstrip("/") + "/"):
            best, kind = len(point), after.split()[0]
    return kind


def port_lines(listen: str | None) -> list[Line]:
    """Return the lines for the addresses on which this process can listen: for agents, and for ``--listen``."""
    places = [(address, 0) for address in (LOCALHOST, *own_addresses())]
    lines = [_port_line("", *place) for place in places]
    if listen is not None:
        lines.append(_port_line("--listen: ", *split_address(listen)))
    return lines


def _port_line(name: str, address: str, port: int) -> Line:
    shown = f"{name}ports of {address}" if not port else f"{name}port {port} of {address}"
    reason = listen_error(address, port)
    return Line(not reason, f"{shown}: {f'cannot listen ({reason})' if reason else 'can listen'}")


def files_line() -> Line:
    """Return the line for the limit on open files. Agents and workers raise it as far as they may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_few = most != resource.RLIM_INFINITY and most < _FEW_FILES
    note = "low limit: each process group of a worker opens one file for each other worker. Raise ulimit -Hn."
    shown = "unlimited" if most == resource.RLIM_INFINITY else str(most)
    return Line(True, f"open files: {shown} for each process", notes=(note,) if is_few else ())


# ---------------------------------------------------------------------------------------------------------------- torch

_OURS = str(Path(__file__).parents[2])  # first in the path of the probe, so that the probe is part of this package
_NO_CUDA_BUILD = "install a build of torch for CUDA: https://pytorch.org/get-started"


@dataclass(frozen=True, slots=True)
class Torch:
    """Facts that the probe has printed, and its failure, if any."""

    facts: dict[str, Any] = field(default_factory=dict)
    failure: str = ""

    @property
    def has_gloo(self) -> bool:
        """True if an all-reduce with Gloo gave the right result."""
        return bool(self.facts.get("gloo_works"))

    @property
    def has_nccl(self) -> bool:
        """True if torch has NCCL and sees CUDA devices."""
        return bool(self.facts.get("nccl") and self.facts.get("devices"))

    def problem_of_nccl(self, backend: str) -> str:
        """Return the reason why no worker can use ``backend``, nccl or nccl2; "" if there is none."""
        if not self.has_nccl:
            return "torch has no NCCL, or sees no CUDA device"
        if not self.facts.get("nccl_names", {}).get(backend, backend):
            return f"torch {self.facts.get('torch')} has no backend {backend}"
        return "no worker starts with this version of NCCL" if _refusal(self.facts) else ""

    @property
    def auto(self) -> str:
        """Backend that ``--backend auto`` selects here."""
        return "nccl" if self.has_nccl else "gloo"


async def probe(timeout_s: float) -> Torch:
    """Run the probe, which may take ``timeout_s`` (the value of ``--start-timeout``); return its facts."""
    command = shlex.join([sys.executable, "-m", "elasticstate.worker.probe", f"{0.9 * timeout_s:g}"])
    try:
        answer = await processes.ask(command, timeout_s, directory=_OURS, whole_session=True)
    except processes.CommandTimedOut as error:
        answer = error.answer
        return read(answer, timeout_s, is_late=True)
    return read(answer, timeout_s)


def read(answer: processes.Answer, timeout_s: float, is_late: bool = False) -> Torch:
    """Return the facts from the output of a probe. ``is_late``: the probe was killed after the timeout."""
    facts = facts_of(answer.stdout)
    step = facts.get("at", "the start of Python")
    stacks = answer.stderr.rpartition("Timeout (")[2] if "Timeout (" in answer.stderr else ""
    if stacks or is_late:
        where = _where(stacks)
        return Torch(
            facts, f"{step} takes longer than --start-timeout of {timeout_s:g} s" + (f": {where}" if where else "")
        )
    if answer.exit_code == 0 and not step:
        return Torch(facts)
    killed = f" ({signal_name(-answer.exit_code)})" if answer.exit_code < 0 else ""
    last = last_line(answer.stderr) or how_it_ended(answer.exit_code)
    return Torch(facts, f"{step} failed{killed}: {last}")


def _where(stacks: str) -> str:
    """Return the first line of the main thread's stack, which is the last stack."""
    frames = stacks.rpartition("Thread 0x")[2].splitlines()[1:2]
    return frames[0].strip() if frames else ""


def torch_lines(torch: Torch, needed: str, machine: str, driver: str) -> list[Line]:
    """Return the lines for torch, CUDA, NCCL and Gloo.

    ``needed``: the smallest usable version of torch. ``machine``: for example ``x86_64``. ``driver``: the version of
    NVIDIA's driver.
    """
    facts = torch.facts
    if "torch" not in facts:
        remedy = f"pip install 'torch>={needed}'" if "No module named 'torch'" in torch.failure else "reinstall torch"
        return [Line(False, f"torch ({torch.failure})", remedy)]
    version, remedy = facts["torch"], f"pip install 'torch>={needed}'"
    is_new = _numbers(version) >= _numbers(needed)
    lines = [Line(is_new, f"torch {version} ({needed} or later is required)", remedy)]
    lines += [_cuda(facts, driver), _nccl(facts, machine)]
    if torch.has_gloo:
        lines.append(Line(True, "Gloo: an all-reduce in a world of one"))
    elif facts.get("has_gloo") is False:
        lines.append(Line(False, "Gloo: this torch is built without Gloo", "install a build of torch for Linux"))
    else:
        why = facts.get("no_gloo") or torch.failure or "an all-reduce gave a wrong result"
        lines.append(Line(False, f"Gloo: {why}", "set GLOO_SOCKET_IFNAME to the network interface that Gloo must use"))
    if torch.failure and torch.has_gloo:
        lines.append(Line(False, torch.failure))
    return lines


def _cuda(facts: dict[str, Any], driver: str) -> Line:
    build = facts.get("cuda_build", "")
    if facts.get("rocm_build"):
        return Line(bool(facts.get("devices")), f"ROCm {facts['rocm_build']}: not tested with elasticstate")
    if not build:
        with_driver = f", but NVIDIA's driver {driver} is installed" if driver else ""
        return Line(False, f"CUDA: this torch is built without CUDA{with_driver}", _NO_CUDA_BUILD)
    text = f"CUDA {build}" + (f", driver {driver}" if driver else "")
    devices = facts.get("devices")
    if not devices:
        remedy = "install NVIDIA's driver; in a container: docker run --gpus all"
        if driver:
            remedy = "check nvidia-smi and CUDA_VISIBLE_DEVICES, and that the driver is new enough for this CUDA"
        return Line(False, f"{text}: {facts.get('no_cuda') or 'torch finds no device'}", remedy)
    names = dict.fromkeys(devices)
    return Line(True, f"{text}: " + ", ".join(f"{devices.count(name)} x {name}" for name in names))


def _nccl(facts: dict[str, Any], machine: str) -> Line:
    version = facts.get("nccl", "")
    if not version:
        return Line(False, "NCCL: this torch is built without NCCL", _NO_CUDA_BUILD)
    names = {backend: name for backend, name in facts.get("nccl_names", {}).items() if name}
    uses = "; ".join(f"--backend {backend} is torch's {name}" for backend, name in names.items())
    bugs = tuple(f"known bug: {bug}" for bug in known_bugs(_numbers(version), machine))
    notes = (*((uses,) if uses else ()), *bugs)
    remedy = f"no worker starts with it, unless {ANY_NCCL}=1: install a torch with another NCCL"
    return Line(not _refusal(facts), f"NCCL {version}", remedy, notes)


def _refusal(facts: dict[str, Any]) -> str:
    if facts.get("rocm_build") or environment_variable(ANY_NCCL) == "1":
        return ""
    return refusal(_numbers(facts.get("nccl", "")))


def needed_torch() -> str:
    """Return the smallest version of torch that the installed package requires; "0" if it names none."""
    try:
        texts = requires("elasticstate") or []
    except PackageNotFoundError:
        texts = []
    found = [match[1] for text in texts if (match := re.match(r"torch\s*>=\s*([\d.]+)", text))]
    return found[0] if found else "0"


def nvidia_driver(path: str = "/proc/driver/nvidia/version") -> str:
    """Return the version of NVIDIA's driver; "" if it is not loaded."""
    try:
        # "NVIDIA UNIX x86_64 Kernel Module  550.54.15  …", "NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  …"
        match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", Path(path).read_text(errors="replace"))
    except OSError:
        return ""
    return match[1] if match else ""


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: (2, 13, 0) for ``2.13.0+cpu``."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
