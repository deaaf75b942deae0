"""What the environment tells this process, and what it tells the processes that it starts."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from elasticstate import kinds
from elasticstate.config.options import PREFIX
from elasticstate.core.ids import WorkerId
from elasticstate.errors import OptionError

COMMIT_DEVICE_MEMORY = PREFIX + "COMMIT_DEVICE_MEMORY"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torch's own name for it


def socket_variable(path: str) -> tuple[str, str]:
    """The environment variable, and its value, that all workers of one agent have."""
    return PREFIX + "SOCKET", path


@dataclass(frozen=True, slots=True)
class WorkerEnvironment:
    """What an agent tells the worker that it starts."""

    socket: str  # path of the agent's Unix socket
    worker: WorkerId
    job: str
    job_id: str  # unlike that of any other job
    local_address: str  # at which other hosts reach this one
    commits: str  # what the names of the files of its slot begin with: its page, its two buffers
    reserve_bytes: int = 0  # what a commit of the job takes, as far as is known
    notice_signals: tuple[int, ...] = (signal.SIGTERM,)
    backend: str = "auto"

    @property
    def error_file(self) -> str:
        """Where it says by which exception it ends."""
        return f"{self.commits}.error"

    def variables(self) -> dict[str, str]:
        """As environment variables; :func:`worker_environment` reads them."""
        host, slot, incarnation = self.worker
        return {
            **dict([socket_variable(self.socket)]),
            PREFIX + "WORKER": f"{host}:{slot}:{incarnation}",
            PREFIX + "JOB": self.job,
            PREFIX + "JOB_ID": self.job_id,
            PREFIX + "LOCAL_ADDRESS": self.local_address,
            PREFIX + "COMMITS": self.commits,
            _ERROR_FILE: self.error_file,
            PREFIX + "RESERVE_BYTES": str(self.reserve_bytes),
            PREFIX + "NOTICE_SIGNALS": " ".join(map(str, map(int, self.notice_signals))),
            PREFIX + "BACKEND": self.backend,
        }


def worker_environment() -> WorkerEnvironment | None:
    """What the agent has told this process; None when it was not started by one. Raises OptionError on rubbish."""
    socket = os.environ.get(PREFIX + "SOCKET")
    if not socket:
        return None
    try:
        host, slot, incarnation = os.environ[PREFIX + "WORKER"].rsplit(":", 2)
        worker = WorkerId(host, int(slot), int(incarnation))
        names = ("JOB", "JOB_ID", "LOCAL_ADDRESS", "COMMITS")
        told = {name.lower(): os.environ[PREFIX + name] for name in names}
        reserve_bytes = int(os.environ.get(PREFIX + "RESERVE_BYTES", 0))
        signals = tuple(map(int, os.environ.get(PREFIX + "NOTICE_SIGNALS", "").split()))
        backend = os.environ.get(PREFIX + "BACKEND", "auto")
        return WorkerEnvironment(
            socket, worker, **told, reserve_bytes=reserve_bytes, notice_signals=signals, backend=backend
        )
    except (KeyError, ValueError):
        raise OptionError(f"{PREFIX}SOCKET is set, but the other variables of a worker are not") from None


def commit_device_memory() -> int:
    """Bytes that a commit may take on each worker's devices, so that training waits less for it; 0: none.

    Raises OptionError on rubbish.
    """
    text = os.environ.get(COMMIT_DEVICE_MEMORY) or "0"
    try:
        return kinds.parse_bytes(text)
    except ValueError:
        raise OptionError(f"{COMMIT_DEVICE_MEMORY}: {text!r}: takes {kinds.BYTES.takes}") from None


def error_file_path() -> str:
    """Where this process says by which exception it ends; "" if nobody has asked for it."""
    return os.environ.get(_ERROR_FILE, "")


def inherited_environment() -> dict[str, str]:
    """The environment of this process, for the processes that it starts."""
    return dict(os.environ)


_NEEDED_ON_OTHER_HOSTS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX")


def passed_on(asked: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The environment that workers on other hosts get from this process: what they need to find the same programs, and
    what ``asked`` (patterns) names."""
    patterns = (*_NEEDED_ON_OTHER_HOSTS, *asked)
    return tuple((k, v) for k, v in os.environ.items() if any(fnmatchcase(k, pattern) for pattern in patterns))


def ssh_client() -> str:
    """The address that ssh was called from, as ssh(1) says it; "" when this process was not started by it."""
    return os.environ.get("SSH_CONNECTION", "").partition(" ")[0]


def runtime_directory() -> Path:
    """Where a running job keeps its record: XDG_RUNTIME_DIR, or the directory for temporary files."""
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())


def foreign_world_size() -> int:
    """The world size that another launcher (torchrun, mpirun with wrappers) has set; 1 if none has."""
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdigit() else 1


_FALSE = {"n", "no", "f", "false"}  # as torch reads a flag
_TRUE = {"y", "yes", "t", "true"}


def set_unless_given(value: str, name: str, *older_names: str) -> tuple[str, str] | None:
    """Set the variable ``name``, unless it or one of its ``older_names`` is set already. If that says something else
    than ``value``: its name, and what it says."""
    for known in (name, *older_names):
        given = os.environ.get(known)
        if given is not None:
            meant = given.strip().lower()
            meant = "0" if meant in _FALSE else "1" if meant in _TRUE else meant
            return None if meant == value.lower() else (known, given)
    os.environ[name] = value
    return None
