"""``launch()``: a job of ``elasticrun``, started from Python."""

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from elasticstate.config import option_names, read_options
from elasticstate.driver.returns import OUTCOME_FILE, Told, result_file
from elasticstate.driver.spec import CALL_FILE
from elasticstate.errors import ElasticError, OptionError, UsageError, WorkerFailedError
from elasticstate.failures import WorkerFailure, how_it_ended
from elasticstate.net.messages import MAX_MESSAGE_BYTES
from elasticstate.worker.call import pack

_MOST_DRIVERS = 5
_MOST_BYTES = MAX_MESSAGE_BYTES - (64 << 10)  # of function and arguments; the rest of the message is options


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
    """Run ``fn(*args, **kwargs)`` in ``np`` workers that survive each other, as ``elasticrun`` does; wait for the end.

    Returns what ``fn`` has returned, one result for each rank of the last world. ``fn`` usually calls a function that
    is decorated with ``run``. It travels by cloudpickle, and so do its arguments and results: functions of scripts,
    notebooks and closures will do. A worker that comes later, or is restarted, calls it anew.

    ::

        losses = elastic.launch(train, args=(0.1,), np=4, min_np=2, hosts="a:2,b:2", elastic_timeout=60)

    Args:
        fn: a function; or a command as a list, to which ``args`` are added: its results are None.
        args, kwargs: for ``fn``. Pickled, they and ``fn`` take 4 MB at most: give paths of what is larger.
        np, min_np, max_np: workers to start with, to go on with, and to grow up to.
        hosts: ``"a:4,b:4"``, or a list of such.
        options: any other option of ``elasticrun``, by its name there: ``log_dir="logs"``, ``cooldown_range=(1, 60)``.

    Raises:
        WorkerFailedError: the job has failed; it has the root cause, and the failures of all workers.
        OptionError: an option has a bad value, or there is none of that name.
        UsageError: ``fn`` is neither, or cannot be pickled, or is too large.
        KeyboardInterrupt: Ctrl-C; the workers have been stopped.
        ElasticError: ``elasticrun`` was stopped by someone else.
    """
    packed, command = _what_to_run(fn, tuple(args), dict(kwargs or {}))
    given = {"np": np, "min_np": min_np, "max_np": max_np, "hosts": hosts, **options}
    chosen = read_options(dict(_texts(given)), command)
    directory = tempfile.mkdtemp(prefix="elasticstate-launch-")
    try:
        if packed:
            Path(directory, CALL_FILE).write_bytes(packed)
        job = chosen.job_name or f"job-{secrets.token_hex(3)}"
        chosen = dataclasses.replace(chosen, job_name=job, call_directory=directory)
        Path(directory, "options").write_bytes(msgspec.json.encode(chosen))
        with _Output(chosen.stop_timeout_s) as output:
            status = _supervise([sys.executable, "-m", "elasticstate", "--launched", directory], job, output)
        return _results(directory, status)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _what_to_run(
    fn: Callable[..., Any] | Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bytes, list[str]]:
    """The function, packed (nothing for a command), and the command of each worker."""
    if not callable(fn):
        if isinstance(fn, (str, bytes)) or not isinstance(fn, Sequence) or not fn or kwargs:
            raise UsageError(f"launch({fn!r}): takes a function, or a command as a list of words, without kwargs")
        return b"", [str(word) for word in (*fn, *args)]
    name = getattr(fn, "__qualname__", type(fn).__name__)
    try:
        packed = pack(fn, args, kwargs)
    except Exception as error:
        raise UsageError(f"launch(): {name} or its arguments cannot be pickled: {error}") from error
    if len(packed) > _MOST_BYTES:
        raise UsageError(
            f"launch(): {name} and its arguments take {len(packed) / 1e6:.1f} MB pickled, and {_MOST_BYTES / 1e6:.1f} "
            f"MB is the most: give it the path of a file that it reads itself"
        )
    return packed, [sys.executable, "-m", "elasticstate.worker.call", name]


def _texts(given: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """By field of the options: what would stand on the command line. Raises OptionError."""
    fields = {
        name.lstrip("-").replace("-", "_"): (field, option.kind)
        for field, option in option_names().items()
        for name in option.names
    }
    for name, value in given.items():
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1)
            raise OptionError(f"launch(): there is no option {name!r}" + (f": is it {near[0]!r}?" if near else ""))
        field, kind = fields[name]
        if isinstance(value, bool):
            value = "on" if value else "off"
        elif isinstance(value, Iterable) and not isinstance(value, str):
            value = (" " if " " in kind.metavar else ",").join(map(str, value))
        if value is not None:
            yield field, str(value)


def _supervise(command: list[str], job: str, output: _Output) -> int:
    """Its exit status. An elasticrun that is killed is replaced: its workers train on, and the next one takes over.

    Raises KeyboardInterrupt, when all has ended.
    """
    for _ in range(_MOST_DRIVERS):
        # The other end of stdin is ours: it closes with this process, however that ends.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output.stdout, stderr=output.stderr, start_new_session=True
        )
        assert process.stdin is not None
        with process.stdin:
            interrupted = _wait(process)
        if interrupted:
            raise KeyboardInterrupt
        if process.returncode >= 0:
            break
        killed = how_it_ended(None, -process.returncode)
        sys.stderr.write(f"elasticstate: the elasticrun of {job} has ended by {killed}: another one takes over\n")
    return process.returncode


def _wait(process: subprocess.Popen[bytes]) -> bool:
    """Whether there was a Ctrl-C, or more: each is passed on."""
    interrupted = False
    while process.returncode is None:
        try:
            process.wait()
        except KeyboardInterrupt:  # noqa: PERF203
            interrupted = True
            process.send_signal(signal.SIGINT)
    return interrupted


class _Output:
    """Where elasticrun and its agents write: this process's own stdout and stderr; or, where Python's are others (those
    of a notebook), pipes that are emptied into them. For all drivers of a job the same, as agents outlive one."""

    def __init__(self, patience_s: float) -> None:
        """``patience_s``: for a process that an agent has left, and that holds its output."""
        self._patience_s = patience_s

    def __enter__(self) -> _Output:
        self._pumps: list[threading.Thread] = []
        self._ends: list[int] = []
        self.stdout = self._end_of(sys.stdout, 1)
        self.stderr = self._end_of(sys.stderr, 2)
        return self

    def __exit__(self, *_: object) -> None:
        for end in self._ends:
            os.close(end)
        for pump in self._pumps:
            pump.join(self._patience_s)

    def _end_of(self, stream: Any, fd: int) -> int | None:
        """A descriptor to write to; None: the inherited one."""
        if _is_descriptor(stream, fd):
            return None
        if stream is None:  # of a program without a terminal
            return subprocess.DEVNULL
        source, sink = os.pipe()
        self._ends.append(sink)
        self._pumps.append(threading.Thread(target=_pump, args=(source, stream), daemon=True))
        self._pumps[-1].start()
        return sink


def _is_descriptor(stream: Any, fd: int) -> bool:
    try:
        return bool(stream.fileno() == fd)
    except (AttributeError, OSError, ValueError):
        return False


def _pump(source: int, stream: Any) -> None:
    with open(source, "rb") as pipe:
        for line in pipe:
            with suppress(OSError, ValueError):  # it is closed: the job goes on
                stream.write(line.decode(errors="replace"))
                stream.flush()


def _results(directory: str, status: int) -> list[Any]:
    with suppress(FileNotFoundError):
        raise OptionError(Path(directory, "refused").read_text())
    try:
        told = msgspec.json.decode(Path(directory, OUTCOME_FILE).read_bytes(), type=Told)
    except FileNotFoundError:
        code, number = (None, -status) if status < 0 else (status, None)
        raise ElasticError(f"launch(): elasticrun has ended before its job: {how_it_ended(code, number)}") from None
    if told.status == 1:
        raise WorkerFailedError(told.root_cause or WorkerFailure(f"the job {told.word}"), told.failures)
    if told.status != 0:
        raise ElasticError(f"launch(): the job {told.word}")
    return [_result(result_file(directory, rank)) for rank in range(told.ranks)]


def _result(path: Path) -> Any:
    try:
        return pickle.loads(path.read_bytes())
    except FileNotFoundError:
        return None
