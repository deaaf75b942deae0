"""Report lines of ``elasticrun --check`` for MPI, from the search in installation.py."""

from __future__ import annotations

from elasticstate.backends import BackendFindings
from elasticstate.check.report import Line
from elasticstate.mpi.installation import INSTALL, MpiInstallation, search


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
