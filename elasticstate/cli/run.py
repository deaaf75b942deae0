"""``elasticrun COMMAND``: run a job; with ``--reattach``, one that has lost its driver; with ``--check``, none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from elasticstate.cli.parser import Parser, options_of, parse, texts_of
from elasticstate.core.ids import without_case
from elasticstate.errors import OptionError
from elasticstate.options import Options, read_options_to_check
from elasticstate.options.kinds import parse_host

if TYPE_CHECKING:
    from elasticstate.driver.screen import Screen


def main(argv: Sequence[str]) -> int:
    """Run a job, or what the options ask for instead. Return the exit status. Raises OptionError."""
    if argv[:1] == ["--launched"]:
        return _launched(*argv[1:])
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


def _run(options: Options, must_reattach: bool = False) -> int:
    from elasticstate.driver.screen import screen_for
    from elasticstate.launchers import early_agent
    from elasticstate.launchers.stdin import stdin_for, with_debugger
    from elasticstate.processes import keep_owner_access

    keep_owner_access()
    if not must_reattach:
        options = with_debugger(options)
    named = {without_case(parse_host(text, 1).name) for text in options.hosts}
    elsewhere = options.hosts or options.hostfile or options.host_discovery_script or options.listen
    is_needed = not must_reattach and ("localhost" in named or not elsewhere)
    with screen_for(options) as screen, stdin_for(options) as stdin, early_agent(is_needed, stdin):
        return _drive(options, must_reattach, screen)


def _drive(options: Options, must_reattach: bool, screen: Screen | None) -> int:
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
        return await Driver(options, must_reattach, screen).run()

    gc.freeze()  # modules stay for ever: no collection examines them again, so none takes long
    return asyncio.run(run())


def _launched(directory: str) -> int:
    """Run the driver of a job of ``launch()``, whose caller holds the other end of stdin."""
    import os
    import shutil
    import signal
    import threading
    from pathlib import Path

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
    given, rest = parser.parse_known_args(argv)
    if rest:
        raise OptionError(
            f"--reattach: {' '.join(rest)!r}: must not be given. A job keeps the command and the options that it was "
            "started with."
        )
    import os
    from dataclasses import replace

    from elasticstate.driver.record import find_job

    record = find_job(given.reattach)
    if record is None:
        raise OptionError(
            f"--reattach: {given.reattach!r}: this user has no such job on this machine. Name a job without a driver."
        )
    os.chdir(record.directory)
    return _run(replace(record.options, job_name=given.reattach), must_reattach=True)
