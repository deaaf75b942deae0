"""MPI, line by line, from what mpi_build.py has found."""

from __future__ import annotations

from elasticstate.check.report import Line
from elasticstate.mpi_build import INSTALL, Mpi


def mpi_lines(found: Mpi) -> list[Line]:
    """mpi4py, its library, mpirun, ULFM, threads. The first that is missing says why; later ones were not tried."""
    lines = [
        Line(bool(found.mpi4py), f"mpi4py {found.mpi4py}".rstrip(), INSTALL),
        Line(bool(found.library), f"{found.version} ({found.library})" if found.library else "MPI library", INSTALL),
        _mpirun(found),
        Line(
            found.has_ulfm,
            "ULFM: of two processes one was killed, and the other one went on" if found.has_ulfm else "ULFM",
        ),
        Line(found.has_thread_multiple, "MPI_THREAD_MULTIPLE"),
    ]
    if found.problem:
        first = next((i for i, line in enumerate(lines) if not line.is_there), len(lines) - 1)
        lines[first] = Line(False, lines[first].text, f"needs {found.problem}")
        lines[first + 1 :] = [
            Line(line.is_there, line.text, "" if line.is_there else "not tried") for line in lines[first + 1 :]
        ]
    return lines


def _mpirun(found: Mpi) -> Line:
    if not found.mpirun:
        return Line(False, "mpirun", INSTALL)
    if found.version and found.mpirun_version and found.mpirun_version != found.version:
        return Line(False, f"mpirun ({found.mpirun}, {found.mpirun_version})")
    same = f"mpirun ({found.mpirun}), of that library" if found.library else f"mpirun ({found.mpirun})"
    return Line(bool(found.mpirun_version), same)
