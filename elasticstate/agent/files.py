"""Files of an agent on its host: the directory with its socket, and removal of files that dead agents have left."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

from elasticstate.commits import (
    ID_FILE,
    CommitDirectory,
    make_agent_directory,
    remove_agent_directories,
    remove_dead,
    remove_job_directory,
)
from elasticstate.errors import OptionError
from elasticstate.net.messages import Launch
from elasticstate.options import runtime_directory, temporary_directory, usable_runtime_directory
from elasticstate.private import is_still, open_directory, write_file
from elasticstate.threads import in_thread

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
