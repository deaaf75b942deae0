"""``elasticrun``: the command line. Heavy modules are imported only when a job runs, so ``--help`` is fast."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from enum import Enum
from typing import TYPE_CHECKING, Any

from elasticstate import other_launchers
from elasticstate.config import (
    Options,
    option_names,
    read_options,
    read_options_to_check,
)
from elasticstate.core.ids import without_case
from elasticstate.errors import OptionError
from elasticstate.kinds import FLAG, Kind, parse_host
from elasticstate.machine import version
from elasticstate.terminal import complain, hold_standard_descriptors

if TYPE_CHECKING:
    from elasticstate.screen.screen import Screen

_SUBCOMMANDS = ("status", "agent", "trace", "report", "export")
DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(Options)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line of ``elasticrun``; return the exit status."""
    hold_standard_descriptors()
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv[:1] == ["status"]:
            return _status(argv[1:])
        if argv[:1] == ["agent"]:
            from elasticstate.agent_cli import run_agent

            return run_agent(argv[1:])
        if argv[:1] in (["trace"], ["report"]):
            return _read_events(argv[0], argv[1:])
        if argv[:1] == ["export"]:
            from elasticstate.durable.command import export_command

            return export_command(argv[1:])
        if argv[:1] == ["--launched"]:
            return _launched(*argv[1:])
        if "--reattach" in argv[:3]:
            return _reattach(argv)
        _refuse_misspelled(argv)
        given = _given(argv)
        return _check(given) if given["check"] else _run(_options(given))
    except OptionError as error:
        complain("elasticrun", str(error))
        return 2


def _refuse_misspelled(argv: Sequence[str]) -> None:
    """Raise OptionError if the first word is almost one of ``_SUBCOMMANDS``, and no program has that name."""
    import difflib
    import os
    import shutil

    word = argv[0] if argv else ""
    if word.startswith("-") or os.path.exists(word) or shutil.which(word):
        return
    if meant := difflib.get_close_matches(word, _SUBCOMMANDS, 1):
        raise OptionError(f"no program is called {word!r}. Did you mean elasticrun {meant[0]}?")


def _run(options: Options, must_reattach: bool = False) -> int:
    from elasticstate.launchers.early_agent import early_agent
    from elasticstate.processes import keep_owner_access
    from elasticstate.screen.screen import screen_for

    keep_owner_access()
    named = {without_case(parse_host(text, 1).name) for text in options.hosts}
    elsewhere = options.hosts or options.hostfile or options.host_discovery_script or options.listen
    is_needed = not must_reattach and ("localhost" in named or not elsewhere)
    with screen_for(options) as screen, early_agent(is_needed):
        return _drive(options, must_reattach, screen)


def _drive(options: Options, must_reattach: bool, screen: Screen | None) -> int:
    import asyncio
    import gc

    from elasticstate.backends import driver_part
    from elasticstate.driver.driver import Driver
    from elasticstate.durable.storage import refuse

    if not must_reattach:
        driver_part(options.backend).require_installation(options.start_timeout_s)
        if options.durable_dir is not None and (reason := refuse(options.durable_dir)):
            raise OptionError(f"--durable-dir: {options.durable_dir!r}: {reason}.")

    async def run() -> int:
        return await Driver(options, must_reattach, screen).run()

    gc.freeze()  # modules stay for ever: no collection examines them again, so none takes long
    return asyncio.run(run())


def _check(given: dict[str, Any]) -> int:
    """Print what is available instead of running a job (``elasticrun --check``)."""
    from elasticstate.check.run import check
    from elasticstate.processes import keep_owner_access

    keep_owner_access()
    return check(*read_options_to_check(_texts(given)))


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


def _status(argv: Sequence[str]) -> int:
    if "--agent" in argv:
        from elasticstate.agent_cli import agent_status

        return agent_status(argv)
    from elasticstate.status_cli import job_status

    return job_status(argv)


def _read_events(command: str, argv: Sequence[str]) -> int:
    from elasticstate.history import commands

    return commands.trace(argv) if command == "trace" else commands.report(argv)


def _reattach(argv: Sequence[str]) -> int:
    """Run a new driver for a job whose driver is dead, with the options of that driver (``elasticrun --reattach``)."""
    timeout = option_names()["reattach_timeout_s"]
    parser = Parser(prog="elasticrun --reattach", add_help=False, allow_abbrev=False)
    parser.add_argument("--reattach", required=True, metavar="JOB")
    parser.add_argument(*timeout.names, dest="timeout", metavar="S")
    given, rest = parser.parse_known_args(argv)
    if rest:
        raise OptionError(
            f"--reattach: {' '.join(rest)!r}: must not be given. A job keeps the command and the options that it was "
            "started with, except --reattach-timeout."
        )
    import os
    from dataclasses import replace

    from elasticstate.driver.record import find_job

    record = find_job(given.reattach)
    if record is None:
        raise OptionError(
            f"--reattach: {given.reattach!r}: this user has no such job on this machine. Name a job without a driver."
        )
    options = replace(record.options, job_name=given.reattach)
    if given.timeout is not None:
        changes: dict[str, Any] = {"reattach_timeout_s": value_of("--reattach-timeout", given.timeout, timeout.kind)}
        options = replace(options, **changes)
    os.chdir(record.directory)
    return _run(options, must_reattach=True)


def value_of(name: str, text: str, kind: Kind) -> Any:
    """Return the value of an option that is not an option of a job. Raises OptionError."""
    try:
        return kind.parse(text)
    except ValueError:
        raise OptionError(f"{name}: {text!r}: must be {kind.valid}") from None


# ----------------------------------------------------------------------------------------------------- the options

_EPILOG = """\
examples:
  elasticrun -np 4 python train.py --lr 0.1
  elasticrun -np 4 --min-np 2 -H localhost:2,127.0.0.2:2 train.py
  elasticrun -np 2 --max-np 8 --host-discovery-script ./discover.sh train.py
  elasticrun -np 8 --min-np 4 --listen 0.0.0.0:7000 --token-file F train.py
  elasticrun agent --join HOST:7000 --token-file F
  elasticrun status JOB [--json] [--watch [S]]
  elasticrun status JOB --token         (the job's token, for actions in the --dashboard)
  elasticrun status --agent PATH        (ask an agent of this machine, see its --status-socket)
  elasticrun trace EVENTS -o trace.json         (what happened when, for Perfetto; EVENTS is a file of --events-file)
  elasticrun report EVENTS... -o report.html    (one HTML page; several jobs are compared)
  elasticrun export PLACE -o model.safetensors  (tensors of the newest durable copy in a --durable-dir)
  elasticrun --check -H h1:4,h2:4       (print what is available here and on these hosts)
  elasticrun --reattach JOB             (start a new driver for a job whose driver is dead)

Write options before COMMAND: everything after it belongs to COMMAND. A COMMAND that ends in .py runs with this Python.
torchrun's --nproc-per-node, --max-restarts and horovodrun's --gloo, --mpi, --output-filename are accepted, too.
Write elasticrun --horovod instead of horovodrun to keep a whole command line with its meaning.
The environment variable ELASTICSTATE_OPTION_NAME also sets --option-name; the command line has precedence.
Exit status: 0 the workers finished; 1 failed, the root cause is printed last; 2 usage; 130 Ctrl-C; 143 SIGTERM.
"""

_DESCRIPTION = """\
Run COMMAND in N workers. The world shrinks when a worker or a host is lost and grows when one joins, and the other
workers continue training in their processes."""


def parse_options(argv: Sequence[str]) -> Options:
    """Read the command line. Raises OptionError (one line); SystemExit(0) after ``--help`` and ``--version``."""
    return _options(_given(argv))


def _given(argv: Sequence[str]) -> dict[str, Any]:
    parser = _parser()
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        names = [name for option in option_names().values() for name in option.names]
        raise other_launchers.unknown(unknown[0], [*names, "--check", "--version", "--reattach", "--help"])
    return vars(given)


def _options(given: dict[str, Any]) -> Options:
    command = [given["program"], *given["arguments"]] if given["program"] else given["arguments"]
    options = read_options(_texts(given), command[1:] if command[:1] == ["--"] else command)
    other_launchers.check(given, options)
    if note := other_launchers.note(given):
        complain("elasticrun", note)
    return options


def _texts(given: dict[str, Any]) -> dict[str, str | None]:
    texts = {name: _text(given[name]) for name in option_names()}
    other_launchers.translate(given, texts)
    return texts


def _text(value: object) -> str | None:
    if value is None:
        return None
    return " ".join(value) if isinstance(value, list) else str(value)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        name, _, problem = message.removeprefix("argument ").partition(": ")
        option = next((option for option in option_names().values() if "/".join(option.names) == name), None)
        if option is None:
            raise OptionError(f"{message.removeprefix('argument ')}. elasticrun --help lists all options.")
        raise OptionError(f"{name}: {problem}: must be {option.kind.valid}")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        print(f"elasticstate {version()}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="elasticrun",
        usage="elasticrun -np N [options] COMMAND...\n       elasticrun agent --join HOST:PORT --token-file F\n"
        "       elasticrun --reattach JOB\n       elasticrun status JOB [--watch]\n"
        "       elasticrun trace EVENTS -o trace.json\n"
        "       elasticrun report EVENTS... -o report.html\n       elasticrun export PLACE -o model.safetensors\n"
        "       elasticrun --check [options]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=118),
        allow_abbrev=False,
    )
    groups: dict[str, Any] = {}
    for name, option in option_names().items():
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        add = groups[option.group].add_argument
        if option.kind is FLAG:
            action: Any = argparse.BooleanOptionalAction if DEFAULTS[name] else "store_true"
            add(*option.names, dest=name, action=action, default=None, help=option.help)
        else:
            metavar = tuple(option.kind.metavar.split())
            shown = _shown(DEFAULTS[name], option.kind)
            text = f"{option.help} (default: {shown})" if shown else option.help
            values = {"nargs": 2, "metavar": metavar} if len(metavar) == 2 else {"metavar": metavar[0]}
            add(*option.names, dest=name, default=None, help=text, **values)
    # Tick records were once on by default, so commands have this option. It also overrides the variable.
    parser.add_argument(
        "--no-tick-records", dest="tick_records", action="store_false", default=None, help=argparse.SUPPRESS
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="Print what is available on this machine and on the named hosts, and exit. Exit status 1: what another "
        "option requires (--backend, hosts, --commit-dir, --listen) is not available. COMMAND is not required.",
    )
    other_launchers.add_options(parser)
    parser.add_argument("-v", "--version", action=_Version, nargs=0, help="Print the version and exit.")
    parser.add_argument("program", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _shown(default: object, kind: Kind) -> str:
    if default is None:
        return "off" if "off" in kind.valid else ""
    if isinstance(default, tuple):
        return " ".join(part.name if isinstance(part, Enum) else f"{part:g}" for part in default)
    return f"{default:g}" if isinstance(default, float) else str(default or "")
