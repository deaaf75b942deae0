"""Processes of this machine: waiting for the end of one, and ending a whole session."""

from __future__ import annotations

import asyncio
import os
import resource
import shlex
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_MOST_OUTPUT_BYTES = 4 * 1024 * 1024


class Answer(NamedTuple):
    """How a command ended, and what it has said."""

    exit_code: int  # -N: killed by signal N
    stdout: str
    stderr: str


class TookTooLong(TimeoutError):
    """A command was killed for the time that it took; ``answer``: what it had said by then."""

    def __init__(self, timeout_s: float, answer: Answer) -> None:
        super().__init__(f"it took longer than {timeout_s:g} s")
        self.answer = answer


async def ask(
    command: str,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    directory: str | None = None,
    whole_session: bool = False,
) -> Answer:
    """Run a command in a session of its own, and kill at its end what it has started.

    ``whole_session``: also what has a process group of its own there, as the ranks of mpirun have.
    Raises OSError or ValueError (it cannot be run), TookTooLong.
    """
    words = shlex.split(command)
    if not words:
        raise ValueError("there is no command")
    program = Path(directory or ".", words[0]).absolute()
    if program.is_file():
        words[0] = str(program)
    process = await _start(words, environment, directory)
    assert process.stdout is not None
    assert process.stderr is not None
    said, complained = bytearray(), bytearray()

    def answer(exit_code: int) -> Answer:
        return Answer(exit_code, said.decode(errors="replace"), complained.decode(errors="replace"))

    stdout = asyncio.ensure_future(_read(process.stdout, said))
    stderr = asyncio.ensure_future(_read(process.stderr, complained))
    ending = asyncio.ensure_future(process.wait())
    # Not asyncio.wait_for: until Python 3.12 it loses a cancellation that comes as the command ends.
    try:
        _, late = await asyncio.wait({stdout, stderr, ending}, timeout=timeout_s)
        if late:
            raise TookTooLong(timeout_s, answer(-signal.SIGKILL))
        stdout.result()  # raises what has kept it from being read
        stderr.result()
        return answer(ending.result())
    finally:
        for part in (stdout, stderr, ending):
            part.cancel()
        if whole_session:
            kill_session(process.pid)
        await _end(process)


async def _start(words: list[str], environment: Mapping[str, str] | None, directory: str | None) -> Process:
    """Not cancelled half-way: what has been started by then would be left behind."""
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *words, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, start_new_session=True, env=environment, cwd=directory
        )
    )
    try:
        await _insist(lambda: asyncio.wait({starting}), starting.done)
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
    """Wait in spite of cancellations, which are obeyed afterwards: at the end of an event loop there may be two."""
    cancellation = None
    while not done():
        try:
            await wait()
        except asyncio.CancelledError as error:  # noqa: PERF203
            cancellation = error
    if cancellation is not None:
        raise cancellation


async def _read(stream: asyncio.StreamReader, kept: bytearray) -> None:
    """All that comes; what is far too much is not kept."""
    while data := await stream.read(1 << 16):
        if len(kept) < _MOST_OUTPUT_BYTES:
            kept += data


async def ended_child(pid: int) -> None:
    """Wait until a child of this process has ended; it stays a zombie until its owner asks for the status."""
    pidfd = os.pidfd_open(pid)
    try:
        await ended(pidfd)
    finally:
        os.close(pidfd)


async def ended(pidfd: int) -> None:
    """Wait until the process of a descriptor has ended (pidfd_open(2))."""
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


def allow_many_descriptors() -> None:
    """As many as this process may have; its children inherit that."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def session_members(session: int) -> set[int]:
    """The living processes of a session."""

    def belongs(process: Path) -> bool:
        fields = (process / "stat").read_bytes().rpartition(b")")[2].split()
        return int(fields[3]) == session and fields[0] != b"Z"

    return _processes(belongs)


def kill_session(session: int) -> None:
    """SIGKILL to every process of a session, its other process groups and new children included."""
    _kill_all(lambda: session_members(session))


def kill_marked(name: str, value: str) -> None:
    """SIGKILL to every process of this user that was started with this environment variable, in whatever session."""
    mark = f"\0{name}={value}\0".encode()
    _kill_all(lambda: _processes(lambda process: mark in b"\0" + (process / "environ").read_bytes()))


def _processes(belongs: Callable[[Path], bool]) -> set[int]:
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError, IndexError):  # it has ended meanwhile, or is another user's
                if belongs(Path("/proc", entry)):
                    found.add(int(entry))
    return found


def _kill_all(find: Callable[[], set[int]]) -> None:
    """Until there are no others: who is killed cannot have more children."""
    killed: set[int] = set()
    while more := find() - killed:
        for pid in more:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= more


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal: it may be sent without harm."""
    with suppress(OSError):
        for line in Path("/proc", str(pid), "status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
