"""The start of a worker's process: it forks from the agent's template process, or is a new process.

If the template process cannot serve, or ends, workers start as new processes: that costs time, nothing else. A module
of --preload with which it cannot serve is left out. See docs/decisions/worker-processes.md.
"""

from __future__ import annotations

import ast
import asyncio
import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from itertools import dropwhile
from pathlib import Path
from typing import IO, Protocol, TypeVar

from elasticstate import processes
from elasticstate.agent import exec_shim
from elasticstate.agent.host_job import HostJob
from elasticstate.failures import how_it_ended
from elasticstate.machine import is_python, is_this_python
from elasticstate.net.link import IMPORTING, PADDING_VARIABLE, READY, ForkRequest, StandardDescriptors, TemplateLink
from elasticstate.threads import in_thread

T = TypeVar("T")

_PROGRAM = Path(exec_shim.__file__).parents[1] / "worker" / "template.py"
_PADDING = " " * 4096  # space for the command line and the variables of a worker, as /proc shows them
_LOOK_INTERVAL_S = 0.5
_MOST_DEATHS = 3  # in a row, before a first worker forked
_DRAIN_TIMEOUT_S = 1.0  # for the last lines of its output
_PR_SET_CHILD_SUBREAPER = 36
_REAP_INTERVAL_S = 1.0


class Child(Protocol):
    """A started process that this process can wait for."""

    pid: int

    def wait(self) -> int: ...


def start_command(
    command: Sequence[str],
    environment: Mapping[str, str],
    directory: str,
    stdin: int,
    stdout: int,
    stderr: int,
    pass_fds: Collection[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a new process that ends with this one. Raises OSError if that fails."""
    numbers = str(os.getpid()), str(processes.descriptors_given())
    return subprocess.Popen(
        [sys.executable, "-I", "-S", exec_shim.__file__, *numbers, *command],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=dict(environment),
        cwd=directory,
        start_new_session=True,
        pass_fds=pass_fds,
    )


async def start_template(job: HostJob) -> Template | None:
    """Start the template process, unless it is switched off or of no use for this command. The script is read in a
    thread: its file system may be slow."""
    if job.options.preload is None or not is_python(job.options.command[0]):
        return None
    arguments = (job.options.command, job.launch.directory, job.environment())
    if reason := await in_thread(reason_against_template, *arguments):
        job.warn(f"workers do not fork from the template process, but import torch anew: {reason}")
        return None
    template = Template(job)
    template.start()
    return template


class TemplateError(Exception):
    """No worker can fork from the template process now; the text is the reason."""


class ForkedChild:
    """A worker process that forked from the template process. It is a child of this process; waits like Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        """Wait for the end. Return the exit code, or -N after signal N."""
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Template:
    """The template process of one host, which is started again when it ends."""

    def __init__(self, job: HostJob) -> None:
        """``--heartbeat-timeout``: a process that neither answers nor computes for so long is killed."""
        self._job = job
        self._timeout_s = job.options.heartbeat_timeout_s
        self._modules = list(dict.fromkeys(job.options.preload or ()))
        self._process: _Process | None = None
        self._deaths = 0  # since a worker forked
        self._reason = ""  # why it is not started again
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the process. It imports in parallel with everything else."""
        # Workers that fork come to this process as orphans, so that it can wait for them (prctl(2)).
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._start_process()
        self._tasks = [asyncio.ensure_future(self._live()), asyncio.ensure_future(reap_orphans(self._is_awaited))]

    def _is_awaited(self, pid: int) -> bool:
        is_worker = any(handle.process.pid == pid for handle in self._job.handles.values())
        return is_worker or (self._process is not None and self._process.pid == pid)

    def _start_process(self) -> None:
        job, directory = self._job, self._job.launch.directory
        arguments = (script_directory(job.options.command, directory), ",".join(self._modules))
        try:
            self._process = _Process(job.environment(), directory, arguments, job.log)
        except OSError as error:
            self._reason = f"could not be started: {error}"

    async def _live(self) -> None:
        """Start the process again when it has ended, unless that is of no use."""
        while (process := self._process) is not None:
            try:
                reason = await process.ended()
            finally:
                await process.close()
                self._process = None
            if process.module:
                ended = f"the template process {process.end()} while it imported this"
                self._leave_out(process.module, reason or ended)
            else:
                self._reason = reason and f"cannot be used: {reason}"
                self._deaths += 1
            if self._deaths == _MOST_DEATHS:
                self._reason = f"ended {self._deaths} times in a row"
            if not self._reason:
                self._start_process()
            process.replaced.set_result(None)

    def _leave_out(self, module: str, reason: str) -> None:
        """Let the next process not import this module."""
        self._modules.remove(module)
        self._job.warn(
            f"--preload {module}: {reason}. Workers fork from a template process that does not import {module}"
        )

    async def fork(
        self, request: ForkRequest, descriptors: StandardDescriptors, cores: Collection[int] = ()
    ) -> ForkedChild:
        """Start a worker with these descriptors, bound to these cores if there are any. Raises TemplateError.

        The first workers wait for the imports, also for those without a module. After a death of the process, workers
        do not wait for the next one.
        """
        try:
            process = await self._ready_process()
            child = await self._while_alive(process, process.fork(request, descriptors, cores))
        except OSError as error:
            raise TemplateError(str(error)) from error
        self._deaths = 0
        return child

    async def _ready_process(self) -> _Process:
        """Wait until the process can serve. Raises TemplateError or OSError."""
        while True:
            process = self._process
            if process is None or (self._deaths and not process.ready.done()):
                raise TemplateError(self._reason or "is starting again")
            answer = await self._while_alive(process, asyncio.shield(process.ready))
            if answer == READY:
                return process
            if not process.module:
                raise TemplateError(f"cannot be used: {answer}" if answer else "ended before its imports were complete")
            await self._while_alive(process, asyncio.shield(process.replaced))

    async def _while_alive(self, process: _Process, answer: Awaitable[T]) -> T:
        """Wait for an answer. Raises TimeoutError, and kills the process, if it neither answers nor computes.

        A process that waits for a core of a busy machine is not killed.
        """
        work, loop = asyncio.ensure_future(answer), asyncio.get_running_loop()
        used, since = processes.cpu_ticks(process.pid), loop.time()
        try:
            while not (await asyncio.wait({work}, timeout=_LOOK_INTERVAL_S))[0]:
                now = processes.cpu_ticks(process.pid)
                if now != used or processes.is_at_work(process.pid):
                    used, since = now, loop.time()
                elif loop.time() - since > self._timeout_s:
                    process.kill()
                    raise TimeoutError(f"did not answer within --heartbeat-timeout of {self._timeout_s:g} s; killed")
            return work.result()
        finally:
            work.cancel()

    async def close(self) -> None:
        """End the process."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _Process:
    """One template process."""

    def __init__(
        self, environment: Mapping[str, str], directory: str, arguments: Sequence[str], log: Callable[[str], None]
    ) -> None:
        """Start the process. Raises OSError if that fails."""
        self._link = TemplateLink()
        child_end = self._link.child_end
        try:
            self._process = start_command(
                [sys.executable, str(_PROGRAM), str(child_end), str(os.getpid()), *arguments, _PADDING],
                {**environment, PADDING_VARIABLE: _PADDING},
                directory,
                subprocess.DEVNULL,
                subprocess.PIPE,  # as for a worker: Python looks at the kind of file when it starts
                subprocess.STDOUT,
                [child_end],
            )
        except OSError:
            self._link.close()
            raise
        finally:
            os.close(child_end)
        assert self._process.stdout is not None
        self.pid = self._process.pid
        self.ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # READY, a reason, or "": it ended
        self.module = ""  # of --preload, while the process imports it, and if it is the reason of its end
        self.replaced: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # by the next process, if any
        self._log = log
        self._reading = asyncio.ensure_future(self._read(self._process.stdout))
        self._answering = asyncio.ensure_future(self._first_answer())

    async def _read(self, pipe: IO[bytes]) -> None:
        """Log what the process prints while it imports."""
        async with processes.reading(pipe) as reader:
            while line := await reader.readline():
                self._log(f"template process: {line.decode(errors='replace').rstrip()}")

    async def _first_answer(self) -> None:
        while (answer := await self._link.receive()).startswith(IMPORTING):
            self.module = answer.removeprefix(IMPORTING)
        if answer == READY:
            self.module = ""
        self.ready.set_result(answer)

    def end(self) -> str:
        """Return how the process has ended."""
        return how_it_ended(self._process.wait())

    async def ended(self) -> str:
        """Wait for the end of the process. Return why a worker can never fork from such a process, or ""."""
        await processes.ended_child(self.pid)
        await self._answering
        return "" if self.ready.result() == READY else self.ready.result()

    async def fork(self, request: ForkRequest, descriptors: StandardDescriptors, cores: Collection[int]) -> ForkedChild:
        """Fork a worker. Raises OSError (also ConnectionError) if the process has ended."""
        answer = self._link.request(request, descriptors)
        try:
            pid = await answer.receive()
            if cores:
                os.sched_setaffinity(pid, cores)  # it has one thread, and waits
            answer.go()
            return ForkedChild(pid)
        finally:
            answer.close()

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    async def close(self) -> None:
        """End the process and its session."""
        if self._process.returncode is None:
            await in_thread(processes.kill_session, self.pid, processes.CLEANUP_S)
            await processes.ended_child(self.pid)
            self._process.wait()
        self._answering.cancel()
        self._link.close()
        await asyncio.wait([self._reading], timeout=_DRAIN_TIMEOUT_S)
        self._reading.cancel()


async def reap_orphans(is_awaited: Callable[[int], bool]) -> None:
    """Read the exit statuses of orphans, for ever. ``is_awaited``: returns True for a process that others wait for.

    All descendants of workers come as orphans. Their exit statuses interest nobody, but unread they would stay zombies.
    A child of a finished command may be found here before the command's own wait: only the second look reaps.
    """
    before: set[int] = set()
    while True:
        await asyncio.sleep(_REAP_INTERVAL_S)
        ended = {pid for pid in await in_thread(processes.children_that_ended) if not is_awaited(pid)}
        for pid in ended & before:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        before = ended - before


# ------------------------------------------------------------------------------------------------------------- command
# The workers' command, as far as worker/script.py, which runs it, needs to understand it.


UNBUFFERED = "-u"
_IN_NEW_PROCESS = str(Path(__file__).parents[1] / "worker" / "new_process.py")

# Variables that torch and the libraries below it read when they are imported.
_READ_AT_IMPORT = re.compile(
    r"(OMP|KMP|GOMP|MKL|OPENBLAS|GOTO|NUMEXPR|VECLIB|ATEN|TORCH|TORCHDYNAMO|TORCHINDUCTOR|PYTORCH|TRITON|LD|PYTHON)_[A-Z0-9_]+"
    r"|TORCHDYNAMO_[A-Z_]+|PYTHON[A-Z]+"
)
_READ_LATER = re.compile(r"TORCH_(NCCL|GLOO|FR)_[A-Z0-9_]+|TORCHELASTIC_[A-Z0-9_]+|PYTORCH_NVML_BASED_CUDA_CHECK")


def reason_against_template(command: Sequence[str], directory: str, environment: Mapping[str, str]) -> str:
    """Return why workers with this command cannot fork from the template process, or ""."""
    if reason := _reason_in_command(command, directory, environment):
        return reason
    words = _words(command)
    return "" if words[0] == "-m" else _reason_in_script(Path(directory, words[0]))


def for_new_process(command: Sequence[str], directory: str, environment: Mapping[str, str]) -> Sequence[str]:
    """Return the command that does the same in a new process, and ends as a forked worker does, if that is possible."""
    if not is_python(command[0]) or _reason_in_command(command, directory, environment):
        return command
    words = _words(command)
    return [*command[: len(command) - len(words)], _IN_NEW_PROCESS, *words]


def _words(command: Sequence[str]) -> list[str]:
    """Return what follows the interpreter and its option."""
    return list(dropwhile(UNBUFFERED.__eq__, command[1:]))


def _reason_in_command(command: Sequence[str], directory: str, environment: Mapping[str, str]) -> str:
    """Return why worker/script.py cannot run this command, or ""."""
    # A path counts from the directory of the job, in which the worker starts, not from that of the agent.
    is_path = os.path.dirname(command[0]) != ""
    program = command[0] if is_path else shutil.which(command[0], path=environment.get("PATH"))
    if program is None or not is_this_python(os.path.join(directory, program)):
        return f"{command[0]} is another Python than {sys.executable}, which runs the agent"
    words = _words(command) if environment.get("PYTHONUNBUFFERED") else list(command[1:])
    if words[:1] == ["-m"] and len(words) > 1:
        return ""
    if not words or words[0].startswith("-"):
        return f"the interpreter has the argument {words[0]!r}" if words else "the interpreter has no script"
    try:
        is_source = b"\0" not in Path(directory, words[0]).read_bytes()
    except OSError:
        return f"{words[0]} is not a file"
    return "" if is_source else f"{words[0]} is no source file"


def _reason_in_script(path: Path) -> str:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""  # the worker shows the error
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value
            if _READ_AT_IMPORT.fullmatch(name) and not _READ_LATER.fullmatch(name):
                return f"{path.name} mentions {name}, which takes effect only if it is set before imports"
    return ""


def script_directory(command: Sequence[str], directory: str) -> str:
    """Return the directory that the interpreter puts first in ``sys.path`` for the command."""
    words = _words(command)
    return directory if words[0] == "-m" else os.path.dirname(os.path.realpath(os.path.join(directory, words[0])))
