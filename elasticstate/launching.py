"""``launch()``: run a job of ``elasticrun`` from Python."""

from __future__ import annotations

import dataclasses
import difflib
import os
import pickle
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from elasticstate.driver.job import FAILED, OWN_ERROR
from elasticstate.driver.report import CALL_FILE, OUTCOME_FILE, LaunchOutcome, result_name
from elasticstate.errors import ElasticError, OptionError, UsageError, WorkerFailedError
from elasticstate.failures import WorkerFailure, status_of
from elasticstate.log import logger
from elasticstate.net.messages import MAX_MESSAGE_BYTES
from elasticstate.options import declarations, read_options, temporary_directory
from elasticstate.private import open_directory, read_file, write_file
from elasticstate.worker.call import pack

_MOST_DRIVERS = 5
_MOST_BYTES = MAX_MESSAGE_BYTES - (64 << 10)  # for function and arguments; the rest of the message is for options


def launch(
    fn: Callable[..., Any] | Sequence[str],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int,
    min_np: int | None = None,
    max_np: int | None = None,
    hosts: str | Iterable[str] | None = None,
    **options: Any,
) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` in ``np`` elastic workers, as ``elasticrun`` does; wait for the end of the job.

    Returns the results of ``fn``, one for each rank of the last world. ``fn`` usually calls a function that is
    decorated with ``run``. cloudpickle serializes ``fn``, its arguments and its results, so functions of scripts and
    notebooks and closures work. A worker that joins later, or is restarted, calls ``fn`` anew.

    ::

        losses = elastic.launch(train, args=(0.1,), np=4, min_np=2, hosts="a:2,b:2", elastic_timeout=60)

    Args:
        fn: a function; or a command as a list, to which ``args`` are added and whose results are None.
        args, kwargs: arguments of ``fn``. At most 4 MB when pickled together with ``fn``: pass larger data by path.
        np, min_np, max_np: number of workers to start with, smallest number, largest number.
        hosts: ``"a:4,b:4"``, or a list of such texts.
        options: any other option of ``elasticrun`` by its name: ``log_dir="logs"``, ``cooldown_range=(1, 60)``.

    Raises:
        WorkerFailedError: the job has failed; the error has the root cause and the failures of all workers.
        OptionError: an option has an invalid value, or does not exist.
        UsageError: ``fn`` is neither function nor command, or cannot be pickled, or is too large; ``args`` is no
            sequence, or ``kwargs`` no mapping.
        KeyboardInterrupt: the user pressed Ctrl-C; the workers have been stopped.
        ElasticError: ``elasticrun`` was stopped from outside, by a signal.
    """
    packed, command = _payload(fn, *_arguments(args, kwargs))
    given = {"np": np, "min_np": min_np, "max_np": max_np, "hosts": hosts, **options}
    chosen = read_options(dict(_texts(given)), command)
    if chosen.debug_rank is not None:
        raise OptionError(
            f"--debug-rank: {chosen.debug_rank}: the workers of launch() have no terminal. Start the script with "
            "elasticrun, or call debugpy.listen() in the function and attach an editor."
        )
    directory = tempfile.mkdtemp(prefix="elasticstate-launch-", dir=temporary_directory())
    os.chmod(directory, 0o700)  # the caller's umask may take the owner's access away
    opened = open_directory(directory)  # all data to unpickle is read through this descriptor
    try:
        if packed:
            write_file(opened, CALL_FILE, packed)
        job = chosen.job_name or f"job-{secrets.token_hex(3)}"
        chosen = dataclasses.replace(chosen, job_name=job, call_directory=directory)
        write_file(opened, "options", msgspec.json.encode(chosen))
        with _output(chosen.stop_timeout_s) as output:
            status = _supervise([sys.executable, "-m", "elasticstate", "--launched", directory], job, *output)
        return _results(opened, status)
    finally:
        os.close(opened)
        shutil.rmtree(directory, ignore_errors=True)


def _arguments(args: object, kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return both in one form. Raises UsageError. A text is a sequence, but not one of arguments that anybody means."""
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise UsageError(
            f"launch(): args={args!r}: must be a tuple or a list. For one argument, write args=({args!r},)."
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise UsageError(f"launch(): kwargs={kwargs!r}: must be a dict that gives arguments by their names.")
    return tuple(args), dict(kwargs or {})


def _payload(
    fn: Callable[..., Any] | Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bytes, list[str]]:
    """Return the pickled function (empty for a command), and the command of each worker. Raises UsageError."""
    if not callable(fn):
        if isinstance(fn, (str, bytes)) or not isinstance(fn, Sequence) or not fn or kwargs:
            raise UsageError(f"launch({fn!r}): must be a function, or a command as a list of words, without kwargs")
        return b"", [str(word) for word in (*fn, *args)]
    name = getattr(fn, "__qualname__", type(fn).__name__)
    try:
        packed = pack(fn, args, kwargs)
    except Exception as error:
        raise UsageError(
            f"launch(): {name} or its arguments cannot be pickled: {error}. Create such objects in the function."
        ) from error
    if len(packed) > _MOST_BYTES:
        raise UsageError(
            f"launch(): {name} and its arguments have {len(packed) / 1e6:.1f} MB pickled, more than the limit of "
            f"{_MOST_BYTES / 1e6:.1f} MB. Pass the path of a file that the function reads."
        )
    return packed, [sys.executable, "-m", "elasticstate.worker.call", name]


def _texts(given: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield the field of each given option and its text on the command line. Raises OptionError."""
    fields = {
        name.lstrip("-").replace("-", "_"): (field, option.kind)
        for field, option in declarations().items()
        for name in option.names
    }
    for name, value in given.items():
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1)
            remedy = f"Did you mean {near[0]!r}?" if near else "elasticrun --help-all lists all options."
            raise OptionError(f"launch(): unknown option {name!r}. {remedy}")
        field, kind = fields[name]
        if isinstance(value, bool):
            value = "on" if value else "off"
        elif isinstance(value, Iterable) and not isinstance(value, str):
            value = (" " if " " in kind.metavar else ",").join(map(str, value))
        if value is not None:
            yield field, str(value)


def _supervise(command: list[str], job: str, stdout: int | None, stderr: int | None) -> int:
    """Run elasticrun; return its exit status. If it is killed, start another one, which reattaches to the workers.

    Raises KeyboardInterrupt after Ctrl-C, when all processes have ended.
    """
    for _ in range(_MOST_DRIVERS):
        # This process holds the other end of stdin: the kernel closes it when this process ends, even by SIGKILL.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, start_new_session=True)
        assert process.stdin is not None
        with process.stdin:
            interrupted = _wait(process)
        if interrupted:
            raise KeyboardInterrupt
        if process.returncode >= 0:
            break
        killed = status_of(None, -process.returncode)
        logger.warning("the elasticrun of %s ended: %s. Another one starts and reattaches to the workers.", job, killed)
    return process.returncode


def _wait(process: subprocess.Popen[bytes]) -> bool:
    """Wait for the end of the process, and forward each Ctrl-C to it. Return True if there was any."""
    interrupted = False
    while process.returncode is None:
        try:
            process.wait()
        except KeyboardInterrupt:  # noqa: PERF203
            interrupted = True
            process.send_signal(signal.SIGINT)
    return interrupted


@contextmanager
def _output(end_timeout_s: float) -> Iterator[tuple[int | None, int | None]]:
    """Yield stdout and stderr of elasticrun and its agents: None for those of this process, or pipes to Python's own
    streams, if ``sys.stdout`` or ``sys.stderr`` is another stream, for example that of a notebook.

    All drivers of a job get the same descriptors, because agents outlive a driver. ``end_timeout_s``: seconds to wait
    at the end for processes that still hold the output.
    """
    pumps: list[threading.Thread] = []
    ends: list[int] = []

    def end_of(stream: Any, fd: int) -> int | None:
        if _is_descriptor(stream, fd):
            return None
        if stream is None:  # a program without a terminal
            return subprocess.DEVNULL
        source, sink = os.pipe()
        ends.append(sink)
        pumps.append(threading.Thread(target=_pump, args=(source, stream), daemon=True))
        pumps[-1].start()
        return sink

    try:
        yield end_of(sys.stdout, 1), end_of(sys.stderr, 2)
    finally:
        for end in ends:
            os.close(end)
        for pump in pumps:
            pump.join(end_timeout_s)


def _is_descriptor(stream: Any, fd: int) -> bool:
    try:
        return bool(stream.fileno() == fd)
    except (AttributeError, OSError, ValueError):
        return False


def _pump(source: int, stream: Any) -> None:
    with open(source, "rb") as pipe:
        for line in pipe:
            with suppress(OSError, ValueError):  # the stream is closed: the job goes on
                stream.write(line.decode(errors="replace"))
                stream.flush()


def _results(directory: int, status: int) -> list[Any]:
    with suppress(FileNotFoundError):
        raise OptionError(read_file(directory, "refused").decode())
    try:
        launch_outcome = msgspec.json.decode(read_file(directory, OUTCOME_FILE), type=LaunchOutcome)
    except FileNotFoundError:
        code, number = (None, -status) if status < 0 else (status, None)
        raise ElasticError(
            f"launch(): elasticrun ended before its job: {status_of(code, number)}. See its output for the cause."
        ) from None
    if launch_outcome.status in (FAILED, OWN_ERROR):
        raise WorkerFailedError(
            launch_outcome.root_cause or WorkerFailure(f"the job {launch_outcome.word}"), launch_outcome.failures
        )
    if launch_outcome.status != 0:
        raise ElasticError(f"launch(): the job {launch_outcome.word}")
    return [_result(directory, rank) for rank in range(launch_outcome.ranks)]


def _result(directory: int, rank: int) -> Any:
    try:
        return pickle.loads(read_file(directory, result_name(rank)))
    except FileNotFoundError:
        return None
