"""Scripts that fork from one process that has imported torch, as workers do. A new process would import torch anew."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import elasticstate
from elasticstate.net.link import PADDING_VARIABLE
from tests.kit.forks.forked_job import OF_WORKERS, is_as_imported

SCRIPTS = Path(__file__).parents[2] / "integration" / "scripts"
STARTUP = Path(__file__).parents[1] / "startup"  # has a sitecustomize.py
PROGRAM = Path(__file__).with_name("script_template.py")
PACKAGE = Path(elasticstate.__file__).parents[1]  # the package under test, installed or not
_PR_SET_CHILD_SUBREAPER = 36


_PADDING = " " * 8192  # space for the command lines and variables of processes that fork, as /proc shows them


_templates: dict[tuple[str, ...], Template] = {}
_lasting: list[set[int]] = []
_before_the_tests: dict[str, str] = {}


def environment(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of scripts and jobs. ``variables``: those of the caller."""
    paths = [str(SCRIPTS), str(PACKAGE), variables.get("PYTHONPATH", "")]  # the rest of the packages may be there
    return {**variables, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}


class Forked:
    """The process of a script: a child of this process that this process has not forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle = os.pidfd_open(pid)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._handle], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a script", timeout or 0)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._handle)
        return self.returncode


class Piped(Forked):
    """A process whose stdout and stderr are pipes. ``stderr``: None, if it is the same pipe."""

    def __init__(self, pid: int, stdout: TextIO, stderr: TextIO | None) -> None:
        super().__init__(pid)
        self.stdout, self.stderr = stdout, stderr

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end of the process. Return what it has written, and nobody has read."""
        files = [self.stdout, *([self.stderr] if self.stderr else ())]
        threads = ThreadPoolExecutor(len(files))
        try:
            stdout, *stderr = [each.result(timeout) for each in [threads.submit(file.read) for file in files]]
        except FutureTimeoutError:
            threads.shutdown(wait=False)
            raise subprocess.TimeoutExpired("a job", timeout or 0) from None
        threads.shutdown()
        self.wait(timeout)
        for file in files:
            file.close()
        return stdout, "".join(stderr)


class Template:
    """The process from which scripts and jobs fork. It imports torch once for all tests of this process.

    ``modules``: further modules that it imports, in the present environment. Then it forks from the template without.
    """

    def __init__(self, *modules: str) -> None:
        self._lock = threading.Lock()
        self._link, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.environment = environment() if modules else environment(_before_the_tests)
        self._process: Forked | subprocess.Popen[bytes]
        with end, open(os.devnull, "w") as nothing:  # no terminal, as the files of scripts: Python looks at its start
            if modules:
                program = [PROGRAM, 0, os.getpid(), ",".join(modules)]
                descriptors = (end.fileno(), nothing.fileno(), 2)
                self._process = template().fork(program, {**self.environment, **OF_WORKERS}, descriptors)
            else:
                self._process = subprocess.Popen(
                    [sys.executable, str(PROGRAM), str(end.fileno()), str(os.getpid()), "", _PADDING],
                    stdout=nothing,
                    pass_fds=[end.fileno()],
                    env={**self.environment, **OF_WORKERS, PADDING_VARIABLE: _PADDING},
                )
        self.pid = self._process.pid

    def close(self) -> None:
        self._link.close()
        self._process.wait()

    def fork(
        self,
        command: Sequence[object],
        environment: Mapping[str, str] = os.environ,
        descriptors: tuple[int, int, int] = (0, 1, 2),
        agents: int = 0,
        directory: Path | None = None,
        host: int = 0,
    ) -> Forked:
        """Start a script. ``command``: its path and arguments. ``descriptors``: its stdin, stdout and stderr.

        ``agents``: the number of agents that elasticrun may start in the same way. ``directory``: the working
        directory. ``host``: a process whose namespaces the command enters.
        """
        words = list(map(str, command))
        request = json.dumps([words, dict(environment), agents, str(directory or ""), host]).encode()
        with self._lock:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._link, [request], list(descriptors))
                pid = int(self._link.recv(100))
                while _parent(pid) != os.getpid():
                    time.sleep(0.0005)
            finally:
                ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return Forked(pid)


class Started:
    """A script that a template has started. It writes into the files ``output``.out and ``output``.err."""

    def __init__(
        self,
        template: Template,
        output: Path,
        command: Sequence[object],
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._stdout, self._stderr = output.with_suffix(".out"), output.with_suffix(".err")
        with open(os.devnull) as nothing, self._stdout.open("w") as stdout, self._stderr.open("w") as stderr:
            descriptors = (nothing.fileno(), stdout.fileno(), stderr.fileno())
            self._process = template.fork(command, environment, descriptors)

    def finish(self, timeout: float) -> tuple[int, str, str]:
        """Wait for the end. Return the exit status, or -N after signal N, and what the script has printed."""
        return self._process.wait(timeout), self._stdout.read_text(), self._stderr.read_text()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def template_in_use(lasting: set[int]) -> Iterator[None]:
    """Let :func:`template` start a template. ``lasting``: the processes that the check after each test leaves alone."""
    _lasting.append(lasting)
    _before_the_tests.update(os.environ)
    yield
    _lasting.clear()
    for each in reversed(_templates.values()):
        each.close()
    _templates.clear()


def template(*modules: str) -> Template:
    """Return the template of this process, or the one that has imported further modules."""
    if modules not in _templates:
        _templates[modules] = Template(*modules)
        _lasting[0].add(_templates[modules].pid)
    return _templates[modules]


def elasticrun(
    arguments: Sequence[str],
    directory: Path,
    variables: Mapping[str, str] = os.environ,
    one_pipe: bool = False,
    stdin: int = subprocess.DEVNULL,
    imported: Sequence[str] = (),
) -> Piped | subprocess.Popen[str]:
    """Start ``elasticrun`` with pipes: forked from the template, if what that has imported is the same here.

    ``one_pipe``: stderr is the pipe of stdout. ``imported``: further modules that the template has imported.
    """
    variables = environment(variables)
    if not is_as_imported(template().environment, variables):
        return subprocess.Popen(
            [sys.executable, "-m", "elasticstate", *arguments],
            cwd=directory,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if one_pipe else subprocess.PIPE,
            env=variables,
            text=True,
        )
    out, stdout = os.pipe()
    err, stderr = (None, stdout) if one_pipe else os.pipe()
    with open(os.devnull) as nothing:
        agents = 4 if {"--host-discovery-script", "-H"} & {*arguments} else 1
        given = nothing.fileno() if stdin == subprocess.DEVNULL else stdin
        command = ["-m", "elasticstate", *arguments]
        pid = template(*imported).fork(command, variables, (given, stdout, stderr), agents, directory).pid
    for descriptor in {stdout, stderr}:
        os.close(descriptor)
    return Piped(pid, os.fdopen(out), None if err is None else os.fdopen(err))


def agent(arguments: Sequence[str], host: int) -> Piped | subprocess.Popen[str]:
    """Start ``elasticrun agent`` in the namespaces of a process, with a pipe as stderr, in the same way."""
    variables = environment()
    command = ["-m", "elasticstate", "agent", *arguments]
    if not is_as_imported(template().environment, variables):
        enter = ["nsenter", "--target", str(host), "--net", "--mount", "--uts", "--", sys.executable]
        return subprocess.Popen(
            [*enter, *command], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=variables, text=True
        )
    err, stderr = os.pipe()
    with open(os.devnull) as nothing:
        pid = template().fork(command, variables, (nothing.fileno(), 1, stderr), host=host).pid
    os.close(stderr)
    return Piped(pid, open(os.devnull), os.fdopen(err))


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
