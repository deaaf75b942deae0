"""The common mistakes: they are made, and what they print is what is written down.

Those that need more words than their message are in docs/troubleshooting.md, the others in ``plain_mistakes.txt``.
There ``<!-- case: NAME -->`` stands before the terminal of a mistake: lines with ``$`` are commands, the others the
lines of their output that matter (``shown``). The script of a mistake is in ``tests/docs/mistakes/``, and ``CASES``
holds the rest::

    python tests/docs/newcomer_errors.py                    print the output of all cases
    python tests/docs/newcomer_errors.py no-state           print the output of one case
    python tests/docs/newcomer_errors.py --update [NAME]    write the output into its file
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
from tests.kit import forks  # noqa: E402

Process = forks.Piped | subprocess.Popen[str]
PAGES = (ROOT / "docs" / "troubleshooting.md", Path(__file__).with_name("plain_mistakes.txt"))
SCRIPTS = Path(__file__).with_name("mistakes")
FILES = {".py": "train.py", ".txt": "train.py", ".sh": "discover.sh"}  # suffix of a script -> name in the run
HOME = "/home/you"  # the directory of the files on the page
PORT = "29400"  # the port on the page; a run uses a free one
ROOT_CAUSE = "elasticrun: root cause:"
AT_ONCE = 3  # cases that run at the same time; most of them wait for time-outs
LIMIT_S = 90.0  # for one command

MARK = re.compile(r"<!-- case: (\S+) -->\n```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Lines that say nothing about the mistake: those of each job, and the frame around the message of an error.
USUAL = re.compile(
    r"elasticrun: (job \S+ (started|succeeded|failed|was stopped)|host localhost added|generation \d+|SIGINT).*|"
    r"elasticrun: root cause: .*exited with \d+|"
    r"elasticrun: localhost:\d \(rank \d\) ended: SIGKILL|"
    r"elasticrun:   rank \d, generation \d|"
    r"elasticstate: agent of localhost: commits need .*|"
    r"(elasticrun: +|\[\S+\] +)?(Traceback \(most recent call last\):|[ ~^]*)",
)
FRAME = re.compile(r'((?:elasticrun: |\[\S+\])? +)File "(.*)", line \d+')
WORKER = re.compile(r"^\[localhost:\d\]")

# Parts of the output that differ from run to run, and what takes their place in a comparison. Two workers make the
# same mistake: chance decides which of them is first.
UNSTABLE = (
    (re.compile(r"\bjob-[0-9a-f]{6}\b"), "job-ID"),
    (re.compile(r"\bprocess \d+"), "process PID"),
    (re.compile(r"\b\d+(\.\d+)? s\b"), "N s"),
    (re.compile(r"\b\d+(\.\d+)? [kMGT]?B\b"), "SIZE"),
    (re.compile(r"\bcooldown \d+ in a row"), "cooldown N in a row"),
    (re.compile(r"(missing: host \S+): .*?, (in cooldown)"), r"\1: REPORT, \2"),  # perhaps of the next attempt
    (re.compile(r"\btick \d+"), "tick N"),
    (re.compile(r"Name or service not known|Temporary failure in name resolution"), "NO SUCH NAME"),
    (re.compile(r"\blocalhost:\d(#\d)?"), "SLOT"),
    (re.compile(r"\brank \d"), "rank N"),
)


class Example(NamedTuple):
    """One mistake on the page."""

    name: str
    commands: tuple[str, ...]
    output: str  # as on the page


class Result(NamedTuple):
    """The end of an example's run."""

    output: str  # as the page shows it
    complete: str  # all that the last command has printed
    status: int
    seconds: float


@dataclass(frozen=True)
class Place:
    """Directory and port of one run."""

    directory: Path
    port: str

    def start(self, *arguments: str) -> Process:
        """Start ``elasticrun``. It forks from a process that has imported torch: most mistakes need a whole job."""
        return forks.elasticrun(arguments, self.directory, self._environment(), one_pipe=True)

    def run(self, command: list[str]) -> Process:
        """Start a command of the page, in a new process."""
        return subprocess.Popen(
            command,
            cwd=self.directory,
            env={**self._environment(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(self.directory / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
        return {**os.environ, "PATH": path}


# ------------------------------------------------------------------------------------- what surrounds the command


@contextmanager
def port_in_use(place: Place) -> Iterator[None]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", int(place.port)))
        listener.listen()
        yield


@contextmanager
def running(place: Place, *arguments: str) -> Iterator[None]:
    """Run another ``elasticrun`` beside the command. Its first line shows that it has its job name and its port."""
    process = place.start(*arguments)
    limit = threading.Timer(LIMIT_S, process.kill)
    limit.start()
    try:
        assert process.stdout is not None
        assert process.stdout.readline(), f"elasticrun {' '.join(arguments)} has printed nothing"
        yield
    finally:
        stop(process)
        limit.cancel()
        limit.join()


def same_name(place: Place) -> AbstractContextManager[None]:
    return running(place, "-np", "1", "--job-name", "night", "python", "train.py")


def driver_that_listens(place: Place) -> AbstractContextManager[None]:
    address = f"127.0.0.1:{place.port}"
    return running(place, "-np", "1", "--listen", address, "--token-file", "job.token", "true")


def stop(process: Process) -> str:
    """End an ``elasticrun`` and its workers. Return the output that nobody has read."""
    for end in (process.terminate, process.terminate, process.kill):  # the second SIGTERM kills the workers
        end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=15)[0]
    raise AssertionError(f"process {process.pid} has not ended")


def has_ssh() -> bool:
    return shutil.which("ssh") is not None


def can_mount() -> bool:
    try:
        return subprocess.run([*MOUNTS.split(), "true"], capture_output=True, timeout=10).returncode == 0
    except OSError:
        return False


# Shell scripts with the name elasticrun. {} is the Python that runs the package.
PLAIN = 'exec {} -m elasticstate "$@"'
MOUNTS = "unshare --map-root-user --mount"
SMALL_SHM = f"""
exec {MOUNTS} sh -c '
mount -t tmpfs -o size=64m tmpfs /dev/shm && exec {{}} -m elasticstate "$@"' sh "$@"
"""
NEWER = """
exec {} -c '
import sys
from elasticstate import machine
from elasticstate.net import messages
machine.version = lambda: "0.2.0"
messages.PROTOCOL_VERSION += 1
from elasticstate.cli import main
sys.exit(main())' "$@"
"""


@dataclass(frozen=True)
class Case:
    """One mistake: what the page does not show."""

    status: int  # the exit status
    around: Callable[[Place], AbstractContextManager[None]] = lambda _: nullcontext()
    elasticrun: str = PLAIN
    possible: Callable[[], bool] = lambda: True  # False: this machine cannot run the case
    stops_at: str = ""  # part of the line after which it is stopped with Ctrl-C


CASES = {
    # The slowest come first.
    "lone-barrier": Case(130, stops_at="no tick for"),
    "unequal-ticks": Case(0),
    "shared-memory": Case(3, elasticrun=SMALL_SHM, possible=can_mount),
    "value-names": Case(3),
    "wrong-host": Case(1, possible=has_ssh),
    "agent-version": Case(1, driver_that_listens, NEWER),
    "job-name": Case(2, same_name),
    "forgotten-optimizer": Case(3),
    "no-state": Case(3),
    "other-optimizer": Case(3),
    "misspelled-value": Case(3),
    "commit-outside": Case(3),
    "wrapped-outside": Case(3),
    "rank-outside": Case(3),
    "group-left-in": Case(3),
    "rank-variable": Case(0),
    "range-epochs": Case(0),
    "sampler-inside": Case(0),
    "no-commit": Case(0),
    "bare-except": Case(0),
    "one-raises": Case(0),
    "no-seed": Case(0),
    "state-dict": Case(3),
    "open-file": Case(3),
    "import-error": Case(3),
    "launch-arguments": Case(1),
    "plain-loader": Case(3),
    "nested-run": Case(3),
    "two-runs": Case(3),
    "empty-state": Case(0),
    "script-missing": Case(3),
    "syntax-error": Case(3),
    "discovery-not-executable": Case(1),
    "discovery-fails": Case(1),
    "discovery-garbage": Case(1),
    "command-missing": Case(2),
    "options-after-command": Case(2),
    "zero-slots": Case(2),
    "min-np": Case(2),
    "port-busy": Case(2, port_in_use),
    "no-token-file": Case(2),
    "token-file-missing": Case(2),
}


# ------------------------------------------------------------------------------------------------------- the runs


def examples() -> dict[str, Example]:
    """Return the examples of both files by name."""
    found: dict[str, Example] = {}
    for name, text in MARK.findall("".join(page.read_text(encoding="utf-8") for page in PAGES)):
        assert name not in found, f"{name} is written down twice"
        lines = text.splitlines()
        commands = tuple(line[2:] for line in lines if line.startswith("$ "))
        found[name] = Example(name, commands, "\n".join(line for line in lines if not line.startswith("$ ")))
    return found


def run(example: Example) -> Result:
    """Run the commands of an example in a new directory. Return the end of the last one."""
    case = CASES[example.name]
    with tempfile.TemporaryDirectory(prefix="es-") as name:
        place = Place(Path(name), _free_port())
        for script in SCRIPTS.glob(f"{example.name}.*"):
            shutil.copyfile(script, place.directory / FILES[script.suffix])
        program = place.directory / "bin" / "elasticrun"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n{case.elasticrun.format(shlex.quote(sys.executable))}\n", encoding="utf-8")
        program.chmod(0o755)
        with case.around(place):
            started = time.monotonic()
            for command in example.commands:
                words = shlex.split(command.replace(PORT, place.port))
                is_plain = words[0] == "elasticrun" and case.elasticrun == PLAIN
                process = place.start(*words[1:]) if is_plain else place.run(words)
                try:
                    begin = _read_until(process, case.stops_at) if case.stops_at else ""
                    printed = begin + process.communicate(timeout=LIMIT_S)[0]
                except subprocess.TimeoutExpired:
                    printed = f"{stop(process)}\nnot ended within {LIMIT_S:g} s"
            seconds = time.monotonic() - started
    printed = printed.replace(name, HOME).replace(str(ROOT), "...").replace(place.port, PORT)
    return Result(shown(printed), printed, process.returncode, seconds)


def _read_until(process: Process, text: str) -> str:
    """Return the output up to the line with ``text``, and interrupt the process then, or when its time is over."""
    limit = threading.Timer(LIMIT_S, process.kill)
    limit.start()
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if text in line:
            process.send_signal(signal.SIGINT)
            break
    limit.cancel()
    limit.join()
    return "".join(lines)


def shown(printed: str) -> str:
    """Return the lines that matter: from the root cause on if there is one, without the usual lines.

    Of a traceback these are the lines of the user's script and the error. What two workers print is shown once.
    """
    lines: list[str] = []
    skipped = ""
    for line in printed[max(printed.find(f"\n{ROOT_CAUSE}"), 0) :].splitlines():
        if frame := FRAME.match(line):
            skipped = "" if frame[2].startswith(HOME) else f"{frame[1]}  "  # source lines of other files
        elif skipped and line.startswith(skipped):
            continue
        elif line and not USUAL.fullmatch(line) and WORKER.sub("", line) not in map(_without_worker, lines):
            lines.append(line)
    return "\n".join(lines)


def _without_worker(line: str) -> str:
    return WORKER.sub("", line)


def stable(output: str) -> list[str]:
    """Return the lines of an output without what differs from run to run.

    Two workers write at the same time: the order of the lines does not count, nor how often a line occurs.
    """
    lines = output.splitlines()
    for pattern, substitute in UNSTABLE:
        lines = [pattern.sub(substitute, line) for line in lines]
    return sorted({line for line in lines if line})


def run_all(names: Iterable[str]) -> Iterator[tuple[str, Result]]:
    """Run the examples of these names, some at a time. Leave out those that this machine cannot run."""
    known = examples()
    forks.template()  # the threads share it
    with ThreadPoolExecutor(AT_ONCE) as threads:
        futures = {name: threads.submit(run, known[name]) for name in CASES if name in names and CASES[name].possible()}
        for name, future in futures.items():
            yield name, future.result()


def update(results: dict[str, Result]) -> None:
    """Write outputs into their files. A block whose output is the same but for unstable parts stays as it is."""
    known = examples()

    def replace(match: re.Match[str]) -> str:
        name, text = match.groups()
        if name not in results or stable(results[name].output) == stable(known[name].output):
            return match[0]
        commands = "".join(f"$ {command}\n" for command in known[name].commands)
        return match[0].replace(text, f"{commands}{results[name].output}\n")

    for page in PAGES:
        page.write_text(MARK.sub(replace, page.read_text(encoding="utf-8")), encoding="utf-8")


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def main(arguments: list[str]) -> None:
    names = [name for name in arguments if name != "--update"] or list(CASES)
    with tempfile.TemporaryDirectory(prefix="es-") as runtime, forks.template_in_use(set()):
        os.environ["XDG_RUNTIME_DIR"] = runtime
        results = {}
        for name, result in run_all(names):
            print(f"--- {name}: exit status {result.status}, {result.seconds:.1f} s\n{result.complete}", flush=True)
            results[name] = result
    if "--update" in arguments:
        update(results)


if __name__ == "__main__":
    main(sys.argv[1:])
