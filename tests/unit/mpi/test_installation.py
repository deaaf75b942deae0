"""Version texts of MPI libraries, and the error for an unusable MPI. Trials are in tests/integration/test_check.py."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest

from elasticstate.errors import OptionError
from elasticstate.mpi import installation
from elasticstate.mpi.installation import MpiInstallation, require_mpi, short_version


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11\0", "Open MPI 5.0.11"),
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n", "Open MPI 5.0.11"),
        ("MPICH Version:      4.2.0\nMPICH Release date: Fri Feb  9\n", "MPICH 4.2.0"),
        ("HYDRA build details:\n    Version:                                 4.2.0\n", "MPICH 4.2.0"),
        ("Intel(R) MPI Library 2021.13 for Linux* OS\n", "Intel(R) MPI Library 2021.13 for Linux* OS"),
        ("", "an unknown MPI"),
    ],
)
def test_a_version_in_short(text: str, short: str) -> None:
    assert short_version(text) == short


@pytest.mark.parametrize("problem", ["", "there is no mpirun. Run pip."])
def test_a_problem_names_option_and_value(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def search(timeout_s: float) -> MpiInstallation:
        return MpiInstallation(mpi4py="4.1.2", problem=problem)

    monkeypatch.setattr(installation, "search", search)
    expected = rf"^--backend: 'mpi': {re.escape(problem)}$"
    with pytest.raises(OptionError, match=expected) if problem else nullcontext():
        require_mpi(1.0)
