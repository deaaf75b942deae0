"""Host sources and launchers of other packages, found by their entry points."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.forks import PACKAGE, SCRIPTS
from tests.kit.job import Job

ENTRY_POINTS = """
[elasticstate.discovery]
mycloud = my_cloud:MyHosts
none = my_cloud:no_class
gone = my_cloud_that_is_gone:MyHosts

[elasticstate.launchers]
mycloud = my_cloud:MyLauncher
none = my_cloud:no_class
"""


@pytest.fixture
def environment(tmp_path: Path) -> list[str]:
    """Return a prefix for commands with an environment where the package ``mycloud`` is installed."""
    package = tmp_path / "site" / "mycloud-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: mycloud\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(ENTRY_POINTS)
    path = os.pathsep.join(map(str, (package.parent, SCRIPTS, PACKAGE)))
    return ["env", f"PYTHONPATH={path}", f"MY_CLOUD={tmp_path}"]


def test_a_job_finds_its_hosts_and_starts_its_agents_by_another_package(environment: list[str], tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("here 127.0.0.2")
    options = ("-np", "2", "--min-np", "1", "--discovery", "mycloud", "--launcher", "mycloud")
    fast = ("--discovery-interval", "0.1", "--min-interrupt-distance", "0.1")
    with Job(tmp_path, *options, *fast, within=environment, until=tmp_path / "stop", steps=5) as job:
        job.wait_for_event("world_formed", size=2)
        hosts.write_text("127.0.0.2")
        job.wait_for_event("world_formed", size=1)
        hosts.unlink()
        job.wait_for("warning", lambda: "host discovery failed: MyHosts raised FileNotFoundError" in job.output)
        job.stop_file.touch()
        job.finish()
        job.check_survival()
    assert sorted((tmp_path / "started").read_text().split()) == ["127.0.0.2", "here"]


@pytest.mark.parametrize(
    ("option", "name", "message"),
    [
        (
            "--discovery",
            "my",
            "there is no such plug-in. Choose one of dial-in, gone, hostfile, kubernetes, list, mycloud,",
        ),
        ("--launcher", "my", "there is no such plug-in. Choose one of local, mycloud, none, ray, slurm, ssh, or"),
        ("--discovery", "gone", "my_cloud_that_is_gone:MyHosts cannot be imported: ModuleNotFoundError"),
        ("--discovery", "none", "does not name a subclass of elasticstate.discovery.HostSource"),
        ("--launcher", "none", "does not name a subclass of elasticstate.launchers.Launcher"),
        ("--discovery", "slurm", "this process runs in no allocation of Slurm"),
        ("--launcher", "slurm", "this process runs in no allocation of Slurm"),
    ],
)
def test_a_name_without_a_usable_plug_in_is_a_usage_error(
    environment: list[str], tmp_path: Path, option: str, name: str, message: str
) -> None:
    command = [*environment, sys.executable, "-m", "elasticstate", "-np", "1", option, name, "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert f"elasticrun: {option}: '{name}': " in done.stderr
    assert message in done.stderr
