"""Agents and template processes of a job that fork instead of importing everything anew, once for each job and host.

They run the project's own programs, and have the same parents as ever: a driver forks its agents, and an agent its
template process, before they have imported anything or started a thread. Only the starts are replaced: an agent's by
``early_agent``, a template process's in ``elasticstate.agent.template_process``. Later processes are new ones.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import types
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

import elasticstate
from elasticstate._native import exit_after_finalization
from elasticstate.options import replace_environment
from elasticstate.worker import script, template

PACKAGE = Path(elasticstate.__file__).parents[1]
_PR_SET_PDEATHSIG = 1
OF_WORKERS = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
"""Variables that the agent sets for its template process, and that are read when that starts."""
_READ_BY_OTHERS = (
    "MPI4PY_RC_INITIALIZE",
    "MPI4PY_RC_FINALIZE",
    "HF_HUB_OFFLINE",
    r"AWS_\w+",
    r"FSSPEC_\w+",
    "FAKE_NCCL",
    "OOM_GROUP",
)
"""Variables of modules that no template has imported."""
_READ_LATER = re.compile(
    "|".join(
        [
            *(r"ELASTICSTATE_\w+", r"HOROVOD_\w+", r"PYTEST_\w+", "XDG_RUNTIME_DIR", "TMPDIR", "HOME", "PATH", "TERM"),
            *OF_WORKERS,
            *_READ_BY_OTHERS,
        ]
    )
)

_HIGH = 50
"""Descriptors of an agent from here on are none that its driver passes on."""


def is_as_imported(environment: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return True if modules that were imported in one environment are the same in the other."""
    names = environment.keys() | other.keys()
    return all(environment.get(n) == other.get(n) or _READ_LATER.fullmatch(n) for n in names)


class Child:
    """A child that this process has forked, in place of a ``subprocess.Popen``."""

    def __init__(self, pid: int, stdin: IO[bytes] | None = None, stdout: IO[bytes] | None = None) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):  # reaped by the thread that waits for it, as in subprocess
                os.kill(self.pid, signal.SIGKILL)

    def communicate(self) -> None:
        """Wait for the end of a process that prints nothing to this one."""
        if self.stdin is not None:
            self.stdin.close()
        self.wait()


class _Agent(Child):
    """A process that becomes an agent when this one, its driver, lets it."""

    def __init__(self) -> None:
        # No objects of files and sockets: the next agent, and all that fork from it, inherit these, and would close
        # descriptors of other files when their script ends.
        self._link, end = (each.detach() for each in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        stdin, self._write = os.pipe()
        if (pid := _fork()) == 0:
            _become_agent(stdin, end)
        os.close(stdin)
        os.close(end)
        super().__init__(pid)

    def start(self, *inherited: int) -> Child:
        """Let it become an agent, with stdout and stderr of this process, and with further descriptors."""
        self.stdin = os.fdopen(self._write, "wb", buffering=0)
        with socket.socket(fileno=self._link) as link, suppress(OSError):  # it was killed
            socket.send_fds(link, [json.dumps(inherited).encode()], [1, 2, *inherited])
        return self

    def end(self) -> None:
        os.close(self._write)
        os.close(self._link)
        self.wait()


def prepare(agents: int) -> None:
    """Fork agents, and let the driver, which this process becomes, start these before others."""
    waiting = [_Agent() for _ in range(agents)]
    from elasticstate import launchers

    start = launchers._start

    def start_agent() -> Child | subprocess.Popen[bytes]:
        return waiting.pop().start(*launchers._stdins) if waiting else start()

    launchers._start = start_agent  # type: ignore[assignment]

    def end() -> None:
        for child in waiting:
            child.end()

    atexit.register(end)
    _watch_loops()


def _watch_loops() -> None:
    """Do what startup/sitecustomize.py does in a new process of a driver or agent."""
    if path := os.environ.get("ELASTICSTATE_TEST_SLOW_CALLBACKS"):
        from loop_watch import watch_loops

        watch_loops(path)


def _become_agent(stdin: int, link: int) -> NoReturn:
    """Do what ``python -m elasticstate.agent`` does in a new process."""
    os.setsid()
    os.dup2(stdin, 0)
    own = os.dup2(link, _HIGH, inheritable=False)
    os.closerange(3, own)
    os.closerange(own + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    _take_descriptors(own)
    prepare_template()
    os.chdir(PACKAGE)
    gc.enable()
    _watch_loops()
    script.run([sys.executable, "-m", "elasticstate.agent"])


def _take_descriptors(own: int) -> None:
    """Wait for the descriptors that a new process would inherit. End if there are none: the job needs no such agent."""
    with socket.socket(fileno=own) as link:
        request, descriptors, _, _ = socket.recv_fds(link, 1000, 3)
    if not request:
        os._exit(2)
    for number, descriptor in zip((1, 2, *json.loads(request)), descriptors, strict=True):
        if number != descriptor:
            os.dup2(descriptor, number, inheritable=number < 3)
            os.close(descriptor)


def prepare_template() -> None:
    """Fork the template process of this agent, which starts it later."""
    prepared = _Prepared()
    import elasticstate.agent.template_process as starter

    starter.subprocess = types.SimpleNamespace(**vars(subprocess))  # type: ignore[assignment]
    starter.subprocess.Popen = prepared.popen  # type: ignore[assignment, misc]


def enter(host: int) -> None:
    """Enter the namespaces of a process. The working directory is that of its mounts, and must be set again."""
    kinds = [os.open(f"/proc/{host}/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "mnt")]
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in kinds:
        if libc.setns(kind, 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespaces of process {host}")
        os.close(kind)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of OpenBLAS's threads
        return os.fork()


class _Prepared:
    """A process that becomes the template process of this agent when the agent starts one."""

    def __init__(self) -> None:
        agent = os.getpid()
        link, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = _fork()
        if self._pid == 0:
            link.close()
            _become_template(end, agent)
        end.close()
        with link:
            self._link = socket.socket(fileno=fcntl.fcntl(link, fcntl.F_DUPFD_CLOEXEC, _HIGH))

    def popen(self, arguments: list[str], **options: Any) -> Child | subprocess.Popen[bytes]:
        """Start the template process: the prepared one, if it still lives and has imported the same modules."""
        pid, self._pid = self._pid, 0
        with self._link:
            if pid and is_as_imported(os.environ, options["env"]):
                read, write = os.pipe()
                request = json.dumps([arguments, options["env"], options["cwd"]]).encode()
                try:
                    socket.send_fds(self._link, [request], [*options["pass_fds"], write])
                    return Child(pid, stdout=os.fdopen(read, "rb", buffering=0))
                except OSError:  # it was killed
                    os.close(read)
                finally:
                    os.close(write)
        return subprocess.Popen(arguments, **options)


def _end_worker(code: int) -> None:
    """End a worker. Only the first one of a job takes its modules down: that means to copy those of torch first."""
    worker = os.environ.get("ELASTICSTATE_WORKER", "")
    end = exit_after_finalization if worker.startswith("localhost:0#") else os._exit
    end(code)


def _become_template(link: socket.socket, agent: int) -> NoReturn:
    """Wait for the start, then do what exec_shim.py and worker/template.py do in a new process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent:
        os._exit(1)
    os.setsid()
    request, descriptors, _, _ = socket.recv_fds(link, 1 << 17, 2)
    if not request:
        os._exit(0)  # the agent needs no template process, or has ended
    end, stdout = descriptors
    arguments, environment, directory = json.loads(request)
    *_, limit = arguments[: arguments.index(sys.executable, 1)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(limit), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(stdout, 1)
    os.dup2(stdout, 2)
    os.close(stdout)
    link.close()
    replace_environment(environment)
    os.chdir(directory)
    program, _, *rest = arguments[arguments.index(sys.executable, 1) + 1 :]
    script.show_command([sys.executable, program, str(end), *rest])
    sys.argv = [program, str(end), *rest]
    script.exit_after_finalization = _end_worker
    template.main()
    os._exit(0)
