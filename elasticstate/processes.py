"""Processes of this machine: run a command, wait for the end of a process, kill a session."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import resource
import select
import shlex
import signal
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

from elasticstate.threads import in_thread

_LONGEST_FIRST_LINE = 256  # bytes: as of Linux
_SHELL_SYNTAX = re.compile(r"[|&;<>()$`*?\[#~={}!\n]")
_LONGEST_REASON = 200  # characters of a line that a command has printed
_MOST_OUTPUT_BYTES = 4 * 1024 * 1024
CLEANUP_S = 2.0  # for processes that remove what killed ones have left behind


class Answer(NamedTuple):
    """Exit code and output of a command."""

    exit_code: int  # -N: killed by signal N
    stdout: str
    stderr: str


class CommandTimedOut(TimeoutError):
    """A command was killed after its timeout; ``answer`` has its output until then."""

    def __init__(self, timeout_s: float, answer: Answer) -> None:
        super().__init__(f"timed out after {timeout_s:g} s")
        self.answer = answer


def first_line(text: str) -> str:
    """Return the first line of a command's output that is not blank, as a reason to show."""
    return _shown(text.lstrip().partition("\n")[0])


def last_line(text: str) -> str:
    """Return the last line of a command's output that is not blank, as a reason to show."""
    return _shown(text.rstrip().rpartition("\n")[2])


def _shown(line: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in line.strip()[:_LONGEST_REASON])


def as_command(text: str, directory: str | None = None) -> str:
    """Return the command for :func:`ask` that runs the text of an option: the name of a file, a program with arguments,
    or a shell command, for example a pipeline."""
    if os.path.isfile(path := Path(directory or ".", text).absolute()):
        return shlex.quote(str(path))
    return shlex.join(["/bin/sh", "-c", text]) if _SHELL_SYNTAX.search(text) else text


def remedy_for(program: str, directory: str | None = None) -> str:
    """Return what to do about a file that the kernel does not run as a program; "" if nothing is known."""
    path = Path(directory or ".", program)
    try:
        with path.open("rb") as file:
            first = file.readline(_LONGEST_FIRST_LINE)
    except (OSError, ValueError):
        return ""
    if "/" not in program:
        return f"For the file in this directory, write ./{program}."
    if not os.access(path, os.X_OK):
        if path.stat().st_mode & 0o111:
            return "Its permissions, or a file system that is mounted with noexec, do not let this user run it."
        return f"Make the file executable: chmod +x {program}"
    if first.startswith(b"#!") and first.endswith(b"\r\n"):
        return f"Its lines end as on Windows. Remove the carriage returns: sed -i 's/\\r$//' {program}"
    interpreter = first[2:].split()[:1] if first.startswith(b"#!") else []
    if interpreter and not os.path.exists(interpreter[0]):
        return f"Its first line names {os.fsdecode(interpreter[0])}, which is not there."
    return ""


async def ask(
    command: str,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    directory: str | None = None,
    whole_session: bool = False,
    in_one: bool = False,
) -> Answer:
    """Run a command in a session of its own; at its end, kill the processes that it has started.

    ``whole_session``: also kill processes in other process groups of the session, for example those of a launcher.
    ``in_one``: ``stdout`` also has what the command writes to stderr, in its order.
    Raises OSError or ValueError (the command cannot be run), CommandTimedOut.
    """
    arguments = shlex.split(command)
    if not arguments:
        raise ValueError("the command is empty")
    program = Path(directory or ".", arguments[0]).absolute()
    if program.is_file():
        arguments[0] = str(program)
    process = await _start(arguments, environment, directory, STDOUT if in_one else PIPE)
    give_back_descriptors(process.pid)
    assert process.stdout is not None
    output, errors = bytearray(), bytearray()

    def answer(exit_code: int) -> Answer:
        return Answer(exit_code, output.decode(errors="replace"), errors.decode(errors="replace"))

    reading = [asyncio.ensure_future(_read(process.stdout, output))]
    if process.stderr is not None:
        reading.append(asyncio.ensure_future(_read(process.stderr, errors)))
    ending = asyncio.ensure_future(process.wait())
    # Not asyncio.wait_for: until Python 3.12 it loses a cancellation that comes as the command ends.
    try:
        _, late = await asyncio.wait({*reading, ending}, timeout=timeout_s)
        if late:
            raise CommandTimedOut(timeout_s, answer(-signal.SIGKILL))
        for part in reading:
            part.result()  # raises the error of reading, if any
        return answer(ending.result())
    finally:
        for task in (*reading, ending):
            task.cancel()
        try:
            if whole_session:  # in a thread: the kernel may let readers of /proc wait
                killing = asyncio.ensure_future(in_thread(kill_session, process.pid))
                await _insist(lambda: asyncio.wait({killing}), killing.done)
        finally:
            await _end(process)


async def _start(
    arguments: list[str], environment: Mapping[str, str] | None, directory: str | None, stderr: int
) -> Process:
    """Start a process. A cancellation waits until the start is complete, or it would leave a process behind."""
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *arguments,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=stderr,
            start_new_session=True,
            env=environment,
            cwd=directory,
        )
    )
    try:
        await _insist(lambda: asyncio.wait({starting}), starting.done)
        if isinstance(error := starting.exception(), OSError) and error.errno == errno.ENOEXEC:
            shell = ["/bin/sh", *arguments]  # as execvp(3): no interpreter line
            return await _start(shell, environment, directory, stderr)
    except asyncio.CancelledError:
        if not starting.cancelled() and starting.exception() is None:
            await _end(starting.result())
        raise
    return starting.result()


async def _end(process: Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await _insist(process.wait, lambda: process.returncode is not None)


async def _insist(wait: Callable[[], Awaitable[object]], done: Callable[[], bool]) -> None:
    """Wait in spite of cancellations; then raise the last one. At the end of an event loop there may be two."""
    cancellation = None
    while not done():
        try:
            await wait()
        except asyncio.CancelledError as error:  # noqa: PERF203
            cancellation = error
    if cancellation is not None:
        raise cancellation


async def _read(stream: asyncio.StreamReader, kept: bytearray) -> None:
    """Read a stream to its end; keep at most a fixed number of bytes."""
    while data := await stream.read(1 << 16):
        if len(kept) < _MOST_OUTPUT_BYTES:
            kept += data


@asynccontextmanager
async def reading(pipe: IO[bytes]) -> AsyncIterator[asyncio.StreamReader]:
    """Give a reader of a pipe, which is closed at the end of the context."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        yield reader
    finally:
        transport.close()


async def ended_child(pid: int) -> None:
    """Wait until a child of this process has ended. The child stays a zombie until its owner reads the status."""
    pidfd = os.pidfd_open(pid)
    try:
        await ended(pidfd)
    finally:
        os.close(pidfd)


async def ended(pidfd: int) -> None:
    """Wait until the process of a pidfd has ended (pidfd_open(2))."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()

    def readable() -> None:
        if not over.done():
            over.set_result(None)

    loop.add_reader(pidfd, readable)
    try:
        await over
    finally:
        loop.remove_reader(pidfd)


def keep_owner_access() -> None:
    """Clear the owner's bits in the umask of this process and its children: a job must be able to use its own files.

    Private files have mode 0700 or 0600, or are in such a directory, so a umask of 000 makes none of them readable.
    """
    os.umask(os.umask(0o077) & 0o077)


_descriptors_given: int | None = None  # the limit before it was raised


def allow_many_descriptors() -> None:
    """Raise this process's limit on open descriptors to the hard limit. Its children get the old limit back."""
    global _descriptors_given
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    _descriptors_given = limit if _descriptors_given is None else _descriptors_given
    with suppress(OSError, ValueError):  # the limit is higher than the system allows by now
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def descriptors_given() -> int:
    """Return the limit on open descriptors that this process was started with."""
    if _descriptors_given is not None:
        return _descriptors_given
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def give_back_descriptors(pid: int) -> None:
    """Give a new child, which may have run for a moment, the limit that this process was started with."""
    with suppress(OSError, ValueError):
        _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (descriptors_given(), most))


def session_members(session: int) -> set[int]:
    """Return the living processes of a session."""

    def belongs(process: Path) -> bool:
        fields = _stat(process)
        return int(fields[3]) == session and fields[0] != b"Z"

    return _processes(belongs)


def children_that_ended() -> set[int]:
    """Return the children of this process whose exit status nobody has read yet."""
    with suppress(ChildProcessError):
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return _processes(lambda process: _stat(process)[:2] == [b"Z", str(os.getpid()).encode()])
    return set()


def _stat(process: Path) -> list[bytes]:
    """Return the fields of a process behind its name (proc_pid_stat(5)): state, parent, process group, session, ..."""
    return (process / "stat").read_bytes().rpartition(b")")[2].split()


def cpu_ticks(pid: int) -> int:
    """Return the CPU time of a process, in ticks of the kernel's clock; 0 after its end."""
    with suppress(OSError, IndexError):
        fields = _stat(Path("/proc", str(pid)))
        return int(fields[11]) + int(fields[12])
    return 0


def is_at_work(pid: int) -> bool:
    """Return True if a process computes or waits for a core; False after its end. See proc_pid_stat(5)."""
    with suppress(OSError, IndexError):
        return _stat(Path("/proc", str(pid)))[0] == b"R"
    return False


_READ = {"x86_64": "0", "aarch64": "63"}.get(os.uname().machine, "read")  # number of the system call read(2)


def reads_stdin(pid: int, device: int | None = None) -> bool:
    """Return True if a thread of a process, or of one of its descendants, waits in read(2) for stdin.

    ``device``: the number of the terminal that must be its stdin. See proc_pid_syscall(5). False on other processors
    than x86-64 and arm64.
    """
    with suppress(OSError):  # it has ended
        process = Path("/proc", str(pid))
        for task in (process / "task").iterdir():
            if (task / "syscall").read_text().startswith(f"{_READ} 0x0 ") and (
                device is None or (process / "fd" / "0").stat().st_rdev == device
            ):
                return True
            children = map(int, (task / "children").read_text().split())
            if any(reads_stdin(child, device) for child in children):
                return True
    return False


def kill_session(session: int, cleanup_s: float = 0.0) -> None:
    """Kill every process of a session, including its other process groups and new children.

    ``cleanup_s``: the time for which this waits until the processes that remove the shared memory and the semaphores
    of the killed ones have ended, before it kills them, too.
    """
    _kill_all(lambda: session_members(session), cleanup_s)


def kill_marked(name: str, value: str) -> None:
    """Kill every process of this user that was started with this environment variable, in any session."""
    mark = f"\0{name}={value}\0".encode()
    _kill_all(lambda: _processes(lambda process: mark in b"\0" + (process / "environ").read_bytes()), CLEANUP_S)


def _processes(belongs: Callable[[Path], bool]) -> set[int]:
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError, IndexError):  # the process has ended, or belongs to another user
                if belongs(Path("/proc", entry)):
                    found.add(int(entry))
    return found


def _kill_all(find: Callable[[], set[int]], cleanup_s: float) -> None:
    """Kill the processes that ``find`` returns until it finds no new ones: a killed process starts no more children."""
    killed: set[int] = set()
    cleaners: list[int] = []  # pidfds
    while more := find() - killed:
        for pid in more:
            with suppress(ProcessLookupError):
                if cleanup_s and _cleans_up(pid):
                    cleaners.append(os.pidfd_open(pid))
                else:
                    os.kill(pid, signal.SIGKILL)
        killed |= more
    deadline = time.monotonic() + cleanup_s
    for pidfd in cleaners:
        select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)


def _cleans_up(pid: int) -> bool:
    """Return True if a process ends by itself after those that it serves, and removes their names from /dev/shm: the
    resource tracker of ``multiprocessing`` (semaphores, shared memory; also loky's), or torch_shm_manager (tensors,
    with the sharing strategy file_system). Only these processes know the names of killed ones."""
    with suppress(OSError):
        words = Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")
        return any(b"resource_tracker import main" in word for word in words) or words[0].endswith(
            b"/torch_shm_manager"
        )
    return False


def catches(pid: int, number: int) -> bool:
    """Return True if a process has a handler for a signal, so that the signal does not kill it."""
    with suppress(OSError):
        for line in Path("/proc", str(pid), "status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
