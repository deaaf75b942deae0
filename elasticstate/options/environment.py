"""Environment variables: those that this process reads, and those of the processes that it starts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticstate.core.ids import WorkerId
from elasticstate.errors import OptionError
from elasticstate.options import kinds
from elasticstate.options.options import PREFIX

if TYPE_CHECKING:
    from elasticstate.core.types import PlainPlace

COMMIT_DEVICE_MEMORY = PREFIX + "COMMIT_DEVICE_MEMORY"
ANY_NCCL = PREFIX + "ANY_NCCL"  # 1: versions of NCCL that are known not to survive a failure are permitted
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # the name that torch uses


def agent_variable(mark: str) -> tuple[str, str]:
    """Return name and value of the environment variable that marks all processes started by one agent."""
    return PREFIX + "AGENT", mark


def has_cursor_control() -> bool:
    """Return False if the terminal cannot move its cursor, according to TERM."""
    return os.environ.get("TERM", "") not in ("", "dumb", "unknown")


_PLAIN_VARIABLES = PREFIX + "PLAIN_VARIABLES"
_GLOO_INTERFACE, _NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_PLAIN_INTERFACE = PREFIX + "PLAIN_INTERFACE"
_NO_LIMIT = 2**31 - 1  # for TORCHELASTIC_MAX_RESTARTS, which must be a number


def plain_variables(
    place: PlainPlace, run_id: str, given: Mapping[str, str], interface: str | None = None
) -> dict[str, str]:
    """Return the variables that torchrun sets for a worker, with their meaning there (torch 2.13, LocalElasticAgent).

    ``given``: the worker's other variables, which override those that torchrun only sets by default. ``interface``: the
    one by which other hosts reach this one, if any do: Gloo would use the address to which the host's name resolves.
    """
    address, _, port = place.store.rpartition(":")
    variables = {
        "LOCAL_RANK": place.local_place,
        "RANK": place.rank,
        "GROUP_RANK": place.cross_rank,
        "ROLE_RANK": place.rank,
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": place.local_size,
        "WORLD_SIZE": place.size,
        "GROUP_WORLD_SIZE": place.cross_size,
        "ROLE_WORLD_SIZE": place.size,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": place.restarts,
        "TORCHELASTIC_MAX_RESTARTS": _NO_LIMIT if place.max_restarts is None else place.max_restarts,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    if "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in given:
        variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = 1
    texts = {name: str(value) for name, value in variables.items()}
    texts[_PLAIN_VARIABLES] = " ".join(texts)
    if interface is not None and not given.get(_GLOO_INTERFACE):
        texts |= {_GLOO_INTERFACE: interface, _PLAIN_INTERFACE: interface}
    return texts


def interface_variables(interface: str) -> dict[str, str]:
    """Return the variables that let Gloo and NCCL use this interface; none without one."""
    return {_GLOO_INTERFACE: interface, _NCCL_INTERFACE: f"={interface}"} if interface else {}


def forget_plain_variables() -> bool:
    """Remove the variables for plain workers from this process, which uses ``run``. Return False if there are none."""
    names = os.environ.pop(_PLAIN_VARIABLES, "").split()
    for name in names:
        os.environ.pop(name, None)
    interface = os.environ.pop(_PLAIN_INTERFACE, "")
    if interface and os.environ.get(_GLOO_INTERFACE) == interface:  # else the script has chosen another one
        del os.environ[_GLOO_INTERFACE]
    return bool(names)


@dataclass(frozen=True, slots=True)
class WorkerEnvironment:
    """Environment variables that an agent sets for a worker that it starts."""

    socket: str  # path of the agent's Unix socket
    agent: str  # the mark of all processes that this agent starts
    worker: WorkerId
    job: str
    job_id: str  # unique among all jobs
    local_address: str  # the address at which other hosts reach this one
    commits: str  # the beginning of the paths of its slot's files
    preemption_signals: tuple[int, ...]
    backend: str
    reserve_bytes: int = 0  # the size of a commit of the job, as far as it is known
    one_copy: bool = False  # with --one-copy-per-host
    start_size: int = 0  # the number of workers to start with

    @property
    def error_file(self) -> str:
        """Path of the file to which the worker writes the exception that ends it."""
        return f"{self.commits}.error"

    def variables(self) -> dict[str, str]:
        """Return the environment variables; :func:`worker_environment` reads them."""
        host, slot, incarnation = self.worker
        texts = {name: str(getattr(self, name)) for name in _WORKER_VARIABLES}
        texts["worker"] = f"{host}:{slot}:{incarnation}"
        texts["preemption_signals"] = " ".join(str(int(number)) for number in self.preemption_signals)
        texts["one_copy"] = "1" if self.one_copy else ""
        return {_ERROR_FILE: self.error_file, **{_WORKER_VARIABLES[name]: text for name, text in texts.items()}}


_WORKER_VARIABLES = {f.name: PREFIX + f.name.upper() for f in fields(WorkerEnvironment)}
_WORKER_VARIABLES["preemption_signals"] = PREFIX + "NOTICE_SIGNALS"  # the option has the variable of the other name


def worker_environment() -> WorkerEnvironment | None:
    """Return what the agent has set for this process; None if no agent started it.

    Raises OptionError if variables are missing or invalid.
    """
    if not os.environ.get(PREFIX + "SOCKET"):
        return None
    try:
        found: dict[str, Any] = {name: os.environ[variable] for name, variable in _WORKER_VARIABLES.items()}
        host, slot, incarnation = found["worker"].rsplit(":", 2)
        found["worker"] = WorkerId(host, int(slot), int(incarnation))
        found["preemption_signals"] = tuple(map(int, found["preemption_signals"].split()))
        found["one_copy"] = found["one_copy"] != ""
        found |= {name: int(found[name]) for name in ("reserve_bytes", "start_size")}
        return WorkerEnvironment(**found)
    except (KeyError, ValueError):
        raise OptionError(
            f"{PREFIX}SOCKET is set, but other variables of a worker are missing or invalid. Unset {PREFIX}SOCKET, or "
            "start the script with elasticrun."
        ) from None


def commit_device_memory() -> int:
    """Return the bytes that a commit may use on each worker's devices, so that training waits less for it; 0: none.

    Raises OptionError if the variable has an invalid value.
    """
    text = os.environ.get(COMMIT_DEVICE_MEMORY) or "0"
    try:
        return kinds.parse_bytes(text)
    except ValueError:
        raise OptionError(f"{COMMIT_DEVICE_MEMORY}: {text!r}: must be {kinds.BYTES.valid}") from None


def error_file_path() -> str:
    """Return the path of the file for the exception that ends this process; "" if none is set."""
    return os.environ.get(_ERROR_FILE, "")


def inherited_environment() -> dict[str, str]:
    """Return the environment of this process, for the processes that it starts."""
    return dict(os.environ)


def replace_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Give this process, which was forked, the environment of a new process. Return the one before."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(variables)
    return before


_NEEDED_ON_OTHER_HOSTS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX")


def passed_on(asked: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the variables of this process that workers on other hosts get.

    These are the variables that they need to find the same programs, and those that match the patterns in ``asked``.
    """
    patterns = (*_NEEDED_ON_OTHER_HOSTS, *asked)
    return tuple((k, v) for k, v in os.environ.items() if any(fnmatchcase(k, pattern) for pattern in patterns))


def tunes_malloc() -> bool:
    """Return True if the environment sets options of glibc's ``malloc`` (mallopt(3))."""
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
    return any(name in os.environ for name in names) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")


_SHARED_MEMORY = "/dev/shm"


def environment_variable(name: str) -> str:
    """Return the value of an environment variable of this process; "" if it is not set."""
    return os.environ.get(name, "")


def ssh_client() -> str:
    """Return the address of the ssh client, from SSH_CONNECTION (ssh(1)); "" if ssh did not start this process."""
    return os.environ.get("SSH_CONNECTION", "").partition(" ")[0]


def temporary_directory() -> str:
    """Return the directory for temporary files: that of Python, but /dev/shm rather than none or the present directory.

    If these cannot be written to, return XDG_RUNTIME_DIR. A container with a read-only root often has neither TMPDIR
    nor a /tmp that can be written to. Raises OptionError.
    """
    try:
        found = tempfile.gettempdir()
    except FileNotFoundError:
        found = ""
    named = [os.path.abspath(value) for name in ("TMPDIR", "TEMP", "TMP") if (value := os.environ.get(name))]
    is_last_choice = found not in (*named, "/tmp", "/var/tmp", "/usr/tmp") and _is_present_directory(found)
    if found and not is_last_choice:
        return found
    for other in (_SHARED_MEMORY, found, os.environ.get("XDG_RUNTIME_DIR")):
        if other and os.access(other, os.W_OK | os.X_OK):
            return other
    raise OptionError(
        f"this user can write to no directory for temporary files: neither to /tmp, /var/tmp and {_SHARED_MEMORY}, nor "
        "to the present one. Set TMPDIR to a directory of this user."
    )


def missing_temporary_directory() -> dict[str, str]:
    """Return the variable TMPDIR for processes that would find no directory for temporary files: torch needs one."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        with suppress(OptionError):
            return {"TMPDIR": temporary_directory()}
    return {}


def _is_present_directory(path: str) -> bool:
    try:
        return os.path.samefile(path, os.curdir)
    except OSError:  # it is deleted
        return path == os.curdir


def runtime_directory() -> Path:
    """Return the directory for the records of running jobs: XDG_RUNTIME_DIR, or that for temporary files.

    Sockets are in it, whose paths the kernel limits (107 bytes, unix(7)). Batch systems give jobs a TMPDIR with a long
    name: then it is /tmp, /var/tmp or /dev/shm. Raises OptionError.
    """
    if given := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(given)
    found = temporary_directory()
    if len(os.fsencode(os.path.abspath(found))) > _LONGEST_RUNTIME_DIRECTORY and os.path.isdir(found):
        others = ("/tmp", "/var/tmp", _SHARED_MEMORY)
        found = next((other for other in others if os.access(other, os.W_OK | os.X_OK)), found)
    return Path(found)


_LONGEST_RUNTIME_DIRECTORY = 50  # bytes: the rest is for the names of jobs and sockets


def usable_runtime_directory() -> Path:
    """Return the runtime directory. Raises OptionError if this process cannot write to it."""
    path = runtime_directory()
    if path.is_dir() and os.access(path, os.W_OK | os.X_OK):
        return path
    problem = "this user cannot write to this directory" if path.is_dir() else "there is no such directory"
    if not os.environ.get("XDG_RUNTIME_DIR"):
        raise OptionError(f"the directory for temporary files, {str(path)!r}: {problem}. Set TMPDIR to another one.")
    raise OptionError(
        f"XDG_RUNTIME_DIR: {str(path)!r}: {problem}. Set the variable to a directory of this user, or unset "
        f"it to use {temporary_directory()}."
    )


_FALSE = {"n", "no", "f", "false"}  # as torch reads a flag
_TRUE = {"y", "yes", "t", "true"}


def set_unless_given(value: str, name: str, *older_names: str) -> tuple[str, str] | None:
    """Set the variable ``name``, unless it or one of its ``older_names`` is set already.

    Returns name and value of a variable that is set to something else than ``value``, or None.
    """
    for known in (name, *older_names):
        given = os.environ.get(known)
        if given is not None:
            meant = given.strip().lower()
            meant = "0" if meant in _FALSE else "1" if meant in _TRUE else meant
            return None if meant == value.lower() else (known, given)
    os.environ[name] = value
    return None
