"""``elasticrun COMMAND``: run a job; with ``--reattach``, one that has lost its driver; with ``--check``, none."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import termios
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from elasticstate.cli.parser import Parser, options_of, parse, texts_of
from elasticstate.core.ids import without_case
from elasticstate.errors import OptionError
from elasticstate.options import CONNECT_TIMEOUT_S, Options, passed_on, read_options_to_check
from elasticstate.options.kinds import parse_host
from elasticstate.options.reading import value_of
from elasticstate.terminal import complain

if TYPE_CHECKING:
    from elasticstate.driver.election import Elected
    from elasticstate.driver.screen import Screen


def main(argv: Sequence[str]) -> int:
    """Run a job, or what the options ask for instead. Return the exit status. Raises OptionError."""
    if argv[:1] == ["--launched"]:
        return _launched(*argv[1:])
    if argv[:1] == ["--standby"]:
        return _stand_by()
    if "--reattach" in argv[:3]:
        return _reattach(argv)
    given = parse(argv)
    if given["check"]:
        return _check(texts_of(given))
    return _run(options_of(given))


def _check(texts: Mapping[str, str | None]) -> int:
    """Print what is available here and on the named hosts (``elasticrun --check``)."""
    from elasticstate.check.run import check
    from elasticstate.processes import keep_owner_access

    keep_owner_access()
    return check(*read_options_to_check(texts))


def _run(options: Options, must_reattach: bool = False, elected: Elected | None = None) -> int:
    from elasticstate.driver.screen import screen_for
    from elasticstate.launchers import early_agent
    from elasticstate.net.names import LOCALHOST, address_on, is_of_each_machine
    from elasticstate.processes import keep_owner_access

    keep_owner_access()
    if not must_reattach:
        options = with_debugger(options)
    named = {without_case(parse_host(text, 1).name) for text in options.hosts}
    elsewhere = options.hosts or options.hostfile or options.host_discovery_script or options.listen
    _require_text(options, passed_on(options.env) if elsewhere else ())
    if options.network_interface and options.discovery in (None, "list"):
        others = options.hostfile or options.host_discovery_script or options.listen
        if not others and all(map(is_of_each_machine, named)):  # else each host says so of itself
            address_on(options.network_interface, LOCALHOST)
    is_needed = not must_reattach and ("localhost" in named or not elsewhere)
    with screen_for(options) as screen, stdin_for(options) as stdin, early_agent(is_needed, stdin):
        return _drive(options, must_reattach, screen, elected)


# ---------------------------------------------------------------------------------------------------------------- stdin
# Stdin of elasticrun, which one worker gets: with ``--debug-rank`` the worker of this rank, else a single worker.
#
# The worker reads the terminal itself. It may, although elasticrun is in the foreground: a process of another session
# has no job control at this terminal, so it is never stopped by SIGTTIN (n_tty.c of Linux, ``job_control()``). So it
# must not get the terminal while a shell reads that.


_REMEDY = "Run elasticrun in the foreground of a terminal, or call debugpy.listen() in the script and attach an editor."


def with_debugger(options: Options) -> Options:
    """Return the options of a job in which a worker may be debugged; unchanged if none gets stdin. Raises OptionError.

    Raises OptionError if ``--debug-rank`` is given, and stdin has nothing to read.
    """
    is_asked_for = options.debug_rank is not None
    if options.call_directory is not None or not (is_asked_for or _has_one_worker_here(options)):
        return options
    if reason := _why_unusable():
        if is_asked_for:
            raise OptionError(f"--debug-rank: {options.debug_rank}: {reason}. {_REMEDY}")
        return options
    if is_asked_for or os.isatty(0):
        options = options.for_debugger(is_asked_for)
    return options if is_asked_for else replace(options, debug_rank=0)


@contextmanager
def stdin_for(options: Options) -> Iterator[int | None]:
    """Yield a descriptor of stdin for a worker; None if no worker gets it. At the end, set the terminal as it was.

    A debugger that is killed leaves a terminal without echo, or without lines.
    """
    if options.debug_rank is None or _why_unusable():  # the latter: of a new driver
        yield None
        return
    stdin, modes = os.dup(0), termios.tcgetattr(0) if os.isatty(0) else None
    try:
        yield stdin
    finally:
        os.close(stdin)
        if modes is not None and _is_in_foreground():
            with suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(0, termios.TCSANOW, modes)  # does not wait for a terminal that is not read


def _has_one_worker_here(options: Options) -> bool:
    from elasticstate.net.names import is_this_machine

    is_listed = not (options.hostfile or options.host_discovery_script or options.listen)
    is_local = options.discovery in (None, "list") and options.launcher in (None, "local")
    hosts = (parse_host(text, 1).name for text in options.hosts)
    return options.has_one_worker and is_listed and is_local and all(map(is_this_machine, hosts))


def _why_unusable() -> str:
    """Return why no worker can read stdin, as a clause; "" if one can."""
    if sys.stdin is None:
        return "stdin is closed"
    if os.path.samestat(os.fstat(0), os.stat(os.devnull)):
        return "stdin is /dev/null"
    return "" if not os.isatty(0) or _is_in_foreground() else "elasticrun is in the background of its terminal"


def _is_in_foreground() -> bool:
    """Return False while the terminal belongs to another process group, such as that of the shell."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # the terminal of another session, which has no job control for this process
        return True


# -------------------------------------------------------------------------------------------------------- the driver


def _require_text(options: Options, variables: Iterable[tuple[str, str]]) -> None:
    """Raise OptionError for bytes that are no UTF-8, in what other hosts and the job's record get."""
    found = {
        "the command": options.command,
        "the present directory": [os.getcwd()],
        "a variable for other hosts": list(map("=".join, variables)),
    }
    for what, texts in found.items():
        for text in texts:
            if text != text.encode(errors="replace").decode():
                raise OptionError(
                    f"{what}: {text!a}: must be UTF-8. Change it, or set LC_ALL=C.UTF-8 if its bytes are UTF-8."
                )


def _drive(options: Options, must_reattach: bool, screen: Screen | None, elected: Elected | None) -> int:
    import asyncio
    import gc

    from elasticstate.backends import driver_part
    from elasticstate.driver.driver import Driver
    from elasticstate.durable.durable_storage import refuse

    if not must_reattach:
        driver_part(options.backend).require_installation(options.start_timeout_s)
        if options.durable_dir is not None and (reason := refuse(options.durable_dir)):
            raise OptionError(f"--durable-dir: {options.durable_dir!r}: {reason}.")

    async def run() -> int:
        return await Driver(options, must_reattach, screen, elected).run()

    gc.freeze()  # modules stay for ever: no collection examines them again, so none takes long
    return asyncio.run(run())


def _launched(directory: str) -> int:
    """Run the driver of a job of ``launch()``, whose caller holds the other end of stdin."""
    import msgspec

    from elasticstate.private import open_directory, write_file

    caller_has_ended = threading.Event()

    def end_with_the_caller() -> None:
        os.read(0, 1)
        caller_has_ended.set()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_the_caller, daemon=True).start()
    options = msgspec.json.decode(Path(directory, "options").read_bytes(), type=Options)
    try:
        return _run(options)
    except OptionError as error:
        opened = open_directory(directory)
        write_file(opened, "refused", str(error).encode())
        os.close(opened)
        return 2
    finally:
        if caller_has_ended.is_set():  # no other process removes it
            shutil.rmtree(directory, ignore_errors=True)


def _reattach(argv: Sequence[str]) -> int:
    """Run a new driver for a job whose driver is dead, with the options of that driver (``elasticrun --reattach``)."""
    parser = Parser(prog="elasticrun --reattach", add_help=False)
    parser.add_argument("--reattach", required=True, metavar="JOB")
    parser.add_argument("--listen", default=None, metavar="ADDR:PORT")
    parser.add_argument("--token-file", default=None, metavar="F")
    given, rest = parser.parse_known_args(argv)
    if rest:
        raise OptionError(
            f"--reattach: {' '.join(rest)!r}: must not be given. A job keeps the command and the options that it was "
            "started with; on another machine, give --listen and --token-file."
        )
    from elasticstate.driver.record import find_job

    record = find_job(given.reattach)
    if record is not None:
        for option in ("listen", "token_file"):
            if getattr(given, option) is not None:
                name = option.replace("_", "-")
                raise OptionError(
                    f"--{name}: must not be given: job {given.reattach!r} has its record on this machine."
                )
        os.chdir(record.directory)
        return _run(replace(record.options, job_name=given.reattach), must_reattach=True)
    if given.listen is None or given.token_file is None:
        raise OptionError(
            f"--reattach: {given.reattach!r}: this user has no such job on this machine. Name a job without a driver, "
            "or give --listen ADDR:PORT and --token-file F to continue one with --standbys whose machine is lost."
        )
    return _reattach_elsewhere(given.reattach, given.listen, given.token_file)


def _reattach_elsewhere(job: str, listen: str, token_file: str) -> int:
    """Run a new driver for a job whose record is kept by agents, which dial the address ``listen``."""
    import asyncio

    from elasticstate.driver.election import elect
    from elasticstate.driver.record import ReplacedError
    from elasticstate.net.trust import token_of_job
    from elasticstate.options.kinds import ADDRESS, split_address

    address = value_of("--listen", listen, ADDRESS)
    if not Path(token_file).exists():
        raise OptionError(
            f"--token-file: {token_file!r}: there is no such file. It holds the token of the lost driver."
        )
    try:
        elected = asyncio.run(elect(job, token_of_job(token_file), [split_address(address)], CONNECT_TIMEOUT_S, _say))
    except ReplacedError as error:
        raise OptionError(f"--reattach: {job!r}: {error}.") from None
    assert elected is not None
    _enter(elected.record.directory)
    elected = elected.at((), address)
    options = replace(elected.record.options, token_file=token_file)
    return _run(options, must_reattach=True, elected=elected)


def _stand_by() -> int:
    """Wait until the agents of this job have lost its driver, and continue the job; or end with the agent of this host,
    which holds the other end of stdin."""
    import asyncio

    import msgspec

    from elasticstate.driver.election import stand_by
    from elasticstate.driver.record import ReplacedError
    from elasticstate.net.messages import StandbyOrder

    order = msgspec.json.decode(sys.stdin.readline(), type=StandbyOrder)
    try:
        found = asyncio.run(stand_by(order, _say, lambda port: print(port, flush=True)))
    except ReplacedError as error:
        _say(str(error))
        return 1
    if found is None:
        return 0
    os.dup2(2, 1)
    _say(f"the driver of job {order.job} is lost: this host continues the job")
    _enter(found.record.directory)
    return _run(found.record.options, must_reattach=True, elected=found)


def _enter(directory: str) -> None:
    """Continue in the directory in which the job was started, if this host has it."""
    try:
        os.chdir(directory)
    except OSError as error:
        _say(f"{directory}, the directory of the job: {error.strerror} on this host; it continues in {os.getcwd()}")


def _say(text: str) -> None:
    """Print a line for the user."""
    complain("elasticrun", text)
