"""A real Slurm on this machine: munged, slurmctld, and one slurmd for each of two nodes, n1 and n2."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

NODES = ("n1", "n2")
CPUS = 2
_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sbatch", "scontrol")
_LIMIT_S = 60.0

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/%n-spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/%n.log
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=2
SchedulerParameters=sched_interval=1
{nodes}
PartitionName=main Nodes={names} Default=YES
"""


def missing() -> str:
    """Return why there can be no Slurm here, or ""."""
    programs = [program for program in _PROGRAMS if not shutil.which(program, path=_PATH)]
    if programs:
        return f"Slurm is not installed: no {', '.join(programs)}"
    return "" if os.geteuid() == 0 else "slurmd needs root"


_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin"))


class Slurm:
    """A cluster of two nodes. Use it as a context manager: it starts and ends the daemons."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "slurm"
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.configuration = self._directory / "slurm.conf"

    def __enter__(self) -> Slurm:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        munge = self._directory / "munge"
        munge.mkdir(parents=True, mode=0o700)
        (self._directory / "state").mkdir()
        key = munge / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        host = socket.gethostname().partition(".")[0]
        controller, *ports = free_ports(1 + len(NODES))
        nodes = (
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS}"
            for node, port in zip(NODES, ports, strict=True)
        )
        self.configuration.write_text(
            _CONFIGURATION.format(
                host=host,
                directory=self._directory,
                controller=controller,
                nodes="\n".join(nodes),
                names=",".join(NODES),
            )
        )
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self._daemon(
            "munged", "--foreground", "--force", *(f"--{option}={munge / file}" for option, file in files.items())
        )
        wait_for("socket of munged", (munge / "socket").exists)
        self._daemon("slurmctld", "-D", "-f", str(self.configuration))
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node, "-f", str(self.configuration))
        wait_for("idle nodes", lambda: [self.state(node) for node in NODES] == ["idle"] * len(NODES))

    def _daemon(self, program: str, *arguments: str) -> None:
        path = shutil.which(program, path=_PATH)
        assert path is not None
        with open(self._directory / f"{program}.out", "ab") as output:
            daemon = subprocess.Popen(
                [path, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment,
            )
        self._daemons.append(daemon)

    def __exit__(self, *_: object) -> None:
        if len(self._daemons) > 1 and self._jobs():
            self.call("scancel", "--quiet", "--user=root")
            wait_for("end of all jobs", lambda: not self._jobs())
        for daemon in reversed(self._daemons):  # munged last: the others ask it
            daemon.terminate()
            try:
                daemon.wait(_LIMIT_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.configuration)}

    def call(self, *command: str) -> str:
        """Run one of Slurm's programs; return its output."""
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, env=self.environment)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def start_now(self, job: str) -> None:
        """Move the start of a job that waits to now. An error, if it has started meanwhile, is of no interest."""
        command = ["scontrol", "update", f"jobid={job}", "starttime=now"]
        subprocess.run(command, env=self.environment, stderr=subprocess.DEVNULL)

    def signal(self, step: str, name: str) -> None:
        """Send a signal to a step. scancel of Slurm 22.05 does so, and yet reports an error."""
        subprocess.run(["scancel", f"--signal={name}", step], env=self.environment, stderr=subprocess.DEVNULL)

    def state(self, node: str) -> str:
        """Return the state of a node, for example idle; "" while the controller does not answer."""
        command = ["sinfo", "--noheader", f"--nodes={node}", "--format=%T"]
        return subprocess.run(command, capture_output=True, text=True, env=self.environment).stdout.strip()

    def _jobs(self) -> str:
        return self.call("squeue", "--noheader")

    def job_state(self, job: str) -> str:
        """Return the state of a job, for example RUNNING."""
        fields = dict(
            field.split("=", 1) for field in self.call("scontrol", "show", "job", job).split() if "=" in field
        )
        return fields["JobState"]

    def steps(self, node: str) -> list[str]:
        """Return the ids of the steps of srun on a node."""
        lines = self.call("squeue", "--steps", "--noheader", f"--nodelist={node}", "--format=%i").split()
        return [step for step in lines if step.rpartition(".")[2].isdigit()]


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def wait_for(what: str, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {_LIMIT_S:g} s"
        time.sleep(0.05)
