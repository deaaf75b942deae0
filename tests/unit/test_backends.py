"""The table of backends: each part can be loaded, and the main path loads no more than it needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from elasticstate.backends import BACKENDS, AgentBackend, DriverBackend, agent_part, driver_part
from elasticstate.check.run import searches
from elasticstate.options import kinds
from elasticstate.plug_ins import load_part
from elasticstate.worker import contexts
from elasticstate.worker.contexts import Backend, Context


def test_the_option_accepts_each_backend_of_the_table() -> None:
    assert [name for name in BACKENDS if kinds.BACKEND.parse(name) != name] == []
    assert kinds.BACKEND.metavar.split("|") == ["auto", *BACKENDS]
    assert kinds.BACKEND.valid == "auto, nccl, nccl2, gloo or mpi"


def test_the_option_names_the_backends_of_the_table() -> None:
    assert tuple(BACKENDS) == kinds.BACKENDS


@pytest.mark.parametrize("name", ["auto", *BACKENDS])
def test_each_backend_has_a_part_for_driver_and_agent(name: str) -> None:
    assert issubclass(driver_part(name), DriverBackend)
    assert issubclass(agent_part(name), AgentBackend)


@pytest.mark.parametrize("name", BACKENDS)
def test_each_backend_has_a_part_for_workers(name: str) -> None:
    if name == "mpi":
        pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    backend: Backend = contexts.choose(name)
    assert type(backend) is load_part(BACKENDS[name].worker)
    context: Context = backend.context()
    assert not context.broken()
    context.destroy()


def test_the_search_of_a_backend_can_be_loaded() -> None:
    assert list(searches()) == [name for name, parts in BACKENDS.items() if parts.check]


@pytest.mark.parametrize("name", ["auto", "gloo", "nccl", "nccl2"])
def test_the_parts_of_one_backend_import_no_other(name: str) -> None:
    program = (
        "import sys\nfrom elasticstate import backends\n"
        f"backends.driver_part('{name}').require_installation(1.0)\nbackends.agent_part('{name}')\n"
        "assert not [m for m in sys.modules if m.startswith(('elasticstate.mpi', 'mpi4py', 'torch'))]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
