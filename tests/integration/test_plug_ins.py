"""A job imports only its own backend, and no drop-in for another library: in its driver, its agents and its workers."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.kit.forks import PACKAGE, SCRIPTS
from tests.kit.job import Job

# Each Python process of the job imports it at its start. At its end it writes the names of all imported modules. Agents
# end with os._exit().
SITECUSTOMIZE = """
import atexit, json, os, sys

def write():
    path = os.path.join(os.environ["MODULES_DIRECTORY"], f"{os.getpid()}.json")
    with open(path, "w") as file:
        json.dump({"command": sys.orig_argv, "modules": sorted(sys.modules)}, file)

def write_and_exit(status, exit=os._exit):
    write()
    exit(status)

atexit.register(write)
os._exit = write_and_exit
"""
OWN = ("mpi", "horovod", "huggingface", "lightning", "ray")
PLUG_INS = ("mpi4py", "mpi_build", "accelerate", *(f"elasticstate.{name}" for name in OWN))


def role(command: list[str]) -> str:
    """Return the role of the process with this command line."""
    if any(word.endswith("train.py") for word in command) and "elasticstate" not in command:
        return "worker"
    if any(word.endswith("worker/template.py") for word in command):
        return "template"  # and its children before they become workers
    return {"elasticstate": "driver", "elasticstate.agent": "agent"}.get(command[command.index("-m") + 1], "other")


def modules_by_role(tmp_path: Path, backend: str) -> dict[str, list[set[str]]]:
    """Run a job of two workers. Return the modules that each process has imported, by the role of the process."""
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(SITECUSTOMIZE)
    written = tmp_path / "modules"
    written.mkdir()
    path = os.pathsep.join(map(str, (tmp_path / "hook", SCRIPTS, PACKAGE)))
    within = ["env", f"PYTHONPATH={path}", f"MODULES_DIRECTORY={written}"]
    with Job(tmp_path, "-np", "2", "--backend", backend, within=within, steps=3) as job:
        job.finish(0)
    found: dict[str, list[set[str]]] = {}
    for file in written.iterdir():
        process = json.loads(file.read_text())
        found.setdefault(role(process["command"]), []).append(set(process["modules"]))
    return found


def plug_ins(modules: set[str]) -> list[str]:
    return sorted(module for module in modules if any(name in module for name in PLUG_INS))


def test_a_gloo_job_imports_no_plug_in(tmp_path: Path) -> None:
    found = modules_by_role(tmp_path, "gloo")
    counts = {name: len(processes) for name, processes in found.items() if name != "template"}
    assert counts == {"driver": 1, "agent": 1, "worker": 2}
    assert "elasticstate.driver.driver" in found["driver"][0]
    assert "elasticstate.agent.agent" in found["agent"][0]
    assert all("elasticstate.worker.contexts.gloo" in modules for modules in found["worker"])
    for name, processes in found.items():
        assert [plug_ins(modules) for modules in processes] == [[]] * len(processes), name


def test_an_mpi_job_imports_its_plug_in(tmp_path: Path) -> None:
    """Shows that the test above would find a plug-in."""
    found = modules_by_role(tmp_path, "mpi")
    for name, part, count in (("driver", "driver_part", 1), ("agent", "agent_part", 1), ("worker", "worker", 2)):
        assert [f"elasticstate.mpi.{part}" in modules for modules in found[name]] == [True] * count
