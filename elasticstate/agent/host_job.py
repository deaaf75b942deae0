"""HostJob: facts that all parts of an agent share once it has found the driver of its job; and JobPlace, its files."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import sys
import threading
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticstate.agent.worker_output import Outputs
from elasticstate.commits import (
    ID_FILE,
    CommitDirectory,
    make_agent_directory,
    remove_agent_directories,
    remove_dead,
    remove_job_directory,
)
from elasticstate.core.ids import WorkerId
from elasticstate.errors import OptionError
from elasticstate.net.control import DriverConnection
from elasticstate.net.messages import AgentWarning, JobSpec, Launch
from elasticstate.net.names import address_on, is_loopback, outward_address
from elasticstate.net.trust import storage_key
from elasticstate.options import (
    Options,
    agent_variable,
    inherited_environment,
    interface_variables,
    missing_temporary_directory,
    runtime_directory,
    temporary_directory,
    usable_runtime_directory,
)
from elasticstate.options.kinds import split_address
from elasticstate.private import is_still, open_directory, write_file
from elasticstate.threads import in_thread

if TYPE_CHECKING:
    from elasticstate.agent.workers import WorkerHandle

_LOOK_INTERVAL_S = 0.01
HOST_VARIABLE = "ELASTICSTATE_HOST"
"""Environment variable that gives a command of the user the name of the host."""


class HostJob:
    """One job on one host."""

    def __init__(
        self,
        launch: Launch,
        spec: JobSpec,
        driver: DriverConnection,
        place: JobPlace,
        outputs: Outputs,
        handles: dict[WorkerId, WorkerHandle],
    ) -> None:
        """``handles``: the living workers; only ``Workers`` changes it. Raises OptionError."""
        self.launch = launch
        self.spec = spec
        self.options = spec.options
        self.driver = driver
        self.place = place
        self.outputs = outputs
        self.log = outputs.complain  # writes a line to the agent's stderr
        self.handles = handles
        self.local_address = launch.local_address or _seen_at(driver.local_address, spec.options)
        """Address at which other hosts reach this one."""
        self._interface = ""  # the one that the user has chosen
        if spec.options.network_interface:
            self._interface, self.local_address = address_on(spec.options.network_interface, self.local_address)
        self.key = storage_key(launch.token, spec.job_id)
        self.is_watched = is_watched(spec)
        self._tasks: set[asyncio.Task[object]] = set()

    def warn(self, text: str) -> None:
        """Show a warning to the user, at the driver."""
        self.driver.send(AgentWarning(text))

    def begin(self, work: Coroutine[Any, Any, object]) -> None:
        """Start a task that nothing waits for. asyncio itself keeps only weak references to tasks."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def environment(self) -> dict[str, str]:
        """Return the environment of the workers, with the mark of this agent."""
        name, mark = agent_variable(self.place.mark)
        found = environment_of_workers(self.launch.environment, self.spec.environment)
        return {**found, **interface_variables(self._interface), name: mark}

    def environment_of_commands(self) -> dict[str, str]:
        """Return the environment of a command that this agent runs for the user. With the mark of the agent, the
        command is killed if the agent is."""
        name, mark = agent_variable(self.place.mark)
        own = {HOST_VARIABLE: self.launch.host, name: mark}
        return {**inherited_environment(), **dict(self.launch.environment), **own}

    async def lock_host(self) -> CommitDirectory:
        """Return the commits of this host, with those that exist already, once the job's earlier agent here is gone.

        An earlier agent has ``--heartbeat-timeout`` to end, or to reconnect: then the driver refuses this one.

        Raises OSError (TimeoutError: the earlier agent did not end).
        """
        refused = threading.Event()
        locking = asyncio.get_running_loop().run_in_executor(
            None,
            lambda: CommitDirectory(
                self.options.commit_dir,
                self.spec.job_id,
                self.launch.host,
                self.place.path,
                self.place.mark,
                self.options.heartbeat_timeout_s,
                keep_s(self.options.driver_timeout_s),
                lambda: refused.wait(_LOOK_INTERVAL_S),
            ),
        )
        driver_loss = asyncio.ensure_future(self.driver.lost())
        both: set[asyncio.Future[Any]] = {locking, driver_loss}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        refused.set()
        driver_loss.cancel()
        await asyncio.wait(both)
        return locking.result()


def is_watched(spec: JobSpec) -> bool:
    """Return True if the driver shows what the scripts report, and the use of its hosts."""
    return spec.options.dashboard is not None or spec.options.metrics is not None


def _seen_at(address: str, options: Options) -> str:
    """Return the address at which other hosts reach this one. ``address``: that of its connection to the driver.

    An agent on the driver's host may dial in over the loopback interface, while other hosts cannot.
    """
    if options.listen is None or not is_loopback(address):
        return address
    listens_at, _ = split_address(options.listen)
    return address if is_loopback(listens_at) else outward_address() or address


def environment_of_workers(passed_on: Iterable[tuple[str, str]], given: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Merge this process's environment, variables from the driver's host and the job's variables.

    ``python`` is this process's, unless the job has a PATH of its own: ``venv/bin/elasticrun`` works in an environment
    that is not activated.
    """
    # The stack of a segmentation fault shows its cause.
    defaults = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    found = {**defaults, **inherited_environment(), **dict(passed_on)}
    if sys.prefix not in ("/usr", "/usr/local"):  # their programs must not come before those of the user
        programs, path = os.path.dirname(sys.executable), found.get("PATH", os.defpath)
        first = (shutil.which(name, path=path) or "" for name in ("python", "python3"))
        if any(os.path.dirname(program) != programs for program in first):
            found["PATH"] = f"{programs}{os.pathsep}{path}"
    return {**found, **dict(given), **missing_temporary_directory()}


_LEAST_INTERVAL_S = 1.0


class JobPlace:
    """Directory with the agent's socket, locked (shared with driver and other agents) until this process ends.

    It is the job's directory on the driver's machine, and the agent's own directory elsewhere.

    Raises OSError or OptionError.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._is_own = not launch.job_directory
        self.path = launch.job_directory or make_agent_directory(str(usable_runtime_directory()))
        self._fd = _locked(self.path)
        self.socket = launch.socket or f"{self.path}/agent"
        self.mark = self.socket  # never changes, even if the socket moves
        self._job_id = ""

    def serves(self, job_id: str) -> None:
        """Record the id of the job that this agent serves. Raises OSError."""
        self._job_id = job_id
        if self._is_own:
            write_file(self._fd, ID_FILE, job_id.encode())

    @property
    def is_lost(self) -> bool:
        """Return True if the directory was deleted or renamed."""
        return not is_still(self.path, self._fd)

    def make_anew(self) -> None:
        """Use the directory that the driver or another agent has created again, or create it.

        If that fails, create one in another place: all of XDG_RUNTIME_DIR may be gone. Raises OSError.
        """
        path = self.path
        try:
            with suppress(FileExistsError):
                os.mkdir(path, 0o700)
            fd = _locked(path)
        except OSError:  # another user has taken the name, or nothing can be created there
            try:
                path = make_agent_directory(temporary_directory())
            except OptionError as error:
                raise OSError(str(error)) from None
            self._is_own, fd = True, _locked(path)
        os.close(self._fd)
        self.path, self._fd = path, fd
        self.socket = f"{path}/{Path(self.socket).name}"
        if self._is_own:
            self.serves(self._job_id)

    def leave(self) -> None:
        """Remove the agent's own directory, when the agent ends."""
        if self._is_own and not self.is_lost:
            shutil.rmtree(self.path, ignore_errors=True)

    def remove_job(self) -> None:
        """Remove the job's directory, after the job has lost its driver for good."""
        if not self._is_own and not self.is_lost:
            remove_job_directory(self.path, self._fd)


def _locked(path: str) -> int:
    fd = open_directory(path)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def keep_s(driver_timeout_s: float) -> float:
    """Return the seconds for which files are kept: ``--driver-timeout`` after any death, plus one interval."""
    return driver_timeout_s + _interval_s(driver_timeout_s)


def _interval_s(driver_timeout_s: float) -> float:
    return max(_LEAST_INTERVAL_S, driver_timeout_s / 10)


async def clean_regularly(commits: CommitDirectory, driver_timeout_s: float) -> None:
    """Extend the expiry of this agent's files and remove stale files, regularly, until cancelled."""
    while True:
        commits.keep()
        await in_thread(_remove, str(commits.base))
        await asyncio.sleep(_interval_s(driver_timeout_s))


def _remove(commit_directory: str) -> None:
    remove_dead(commit_directory)
    with suppress(OptionError):  # there is no such directory on this host
        remove_agent_directories(str(runtime_directory()))
