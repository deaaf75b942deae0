"""``elasticrun``: the command line. Imports what is heavy only when a job runs: ``--help`` answers at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from enum import Enum
from typing import Any

from elasticstate.config import Options, option_names, read_options, read_options_to_check
from elasticstate.errors import OptionError
from elasticstate.kinds import FLAG, Kind, split_address
from elasticstate.machine import host_name, version

_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(Options)}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv[:1] == ["status"]:
            return _status(argv[1:])
        if argv[:1] == ["agent"]:
            return _agent(argv[1:])
        if argv[:1] == ["--launched"]:
            return _launched(*argv[1:])
        if "--reattach" in argv[:3]:
            return _reattach(argv)
        given = vars(_parser().parse_args(argv))
        return _check(given) if given["check"] else _run(_options(given))
    except OptionError as error:
        print(f"elasticrun: {error}", file=sys.stderr)
        return 2


def _run(options: Options, must_take_over: bool = False) -> int:
    import asyncio

    from elasticstate.driver.driver import Driver

    if options.backend == "mpi" and not must_take_over:
        from elasticstate.mpi_build import find_mpi

        find_mpi(options.start_timeout_s)  # or say now what is missing

    async def run() -> int:
        return await Driver(options, must_take_over).run()

    return asyncio.run(run())


def _check(given: dict[str, Any]) -> int:
    """``elasticrun --check``: what there is, instead of a job."""
    from elasticstate.check.run import check

    return check(*read_options_to_check(_texts(given)))


def _launched(directory: str) -> int:
    """The driver of a job that ``launch()`` has started, and whose caller holds the other end of stdin."""
    import os
    import shutil
    import signal
    import threading
    from pathlib import Path

    import msgspec

    is_deserted = threading.Event()

    def end_with_the_caller() -> None:
        os.read(0, 1)
        is_deserted.set()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_the_caller, daemon=True).start()
    options = msgspec.json.decode(Path(directory, "options").read_bytes(), type=Options)
    try:
        return _run(options)
    except OptionError as error:
        Path(directory, "refused").write_text(str(error))
        return 2
    finally:
        if is_deserted.is_set():  # nobody else removes it
            shutil.rmtree(directory, ignore_errors=True)


def _status(argv: Sequence[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        raise OptionError("status takes the name of one job: elasticrun status JOB")
    import asyncio

    from elasticstate.driver.record import find_job
    from elasticstate.net.control import ask_status

    record = find_job(argv[0])
    if record is None:
        print(f"elasticrun: no job {argv[0]!r} of yours runs on this machine", file=sys.stderr)
        return 1
    try:
        sys.stdout.write(asyncio.run(ask_status(record.address, record.token, _DEFAULTS["connect_timeout_s"])))
    except ConnectionError as error:
        print(f"elasticrun: the driver of job {argv[0]!r} does not answer: {error}", file=sys.stderr)
        return 1
    return 0


def _reattach(argv: Sequence[str]) -> int:
    """``elasticrun --reattach JOB``: the driver of a job that has lost its own, with the options of that one."""
    timeout = option_names()["reattach_timeout_s"]
    parser = _Parser(prog="elasticrun --reattach", add_help=False, allow_abbrev=False)
    parser.add_argument("--reattach", required=True, metavar="JOB")
    parser.add_argument(*timeout.names, dest="timeout", metavar="S")
    given, rest = parser.parse_known_args(argv)
    if rest:
        raise OptionError(
            f"--reattach: {' '.join(rest)}: takes the name of a job, and no option but --reattach-timeout: "
            "all others, and the command, are those that the job was started with"
        )
    import os
    from dataclasses import replace

    from elasticstate.driver.record import find_job

    record = find_job(given.reattach)
    if record is None:
        raise OptionError(f"--reattach: {given.reattach!r}: takes a job of yours that has lost its driver")
    options = replace(record.options, job_name=given.reattach)
    if given.timeout is not None:
        try:
            changes: dict[str, Any] = {"reattach_timeout_s": timeout.kind.parse(given.timeout)}
            options = replace(options, **changes)
        except ValueError:
            raise OptionError(f"--reattach-timeout: {given.timeout!r}: takes {timeout.kind.takes}") from None
    os.chdir(record.directory)
    return _run(options, must_take_over=True)


def _agent(argv: Sequence[str]) -> int:
    """``elasticrun agent``: serve a driver that listens, until the end of its job."""
    parser = _Parser(
        prog="elasticrun agent",
        usage="elasticrun agent --join HOST:PORT --token-file F [options]",
        description="Serve the job of an elasticrun --listen as one of its hosts. Run the same command on each "
        "machine, in any order, at any time; it ends with the job.",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=118),
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--join", required=True, metavar="HOST:PORT", help="where the driver listens")
    add("--token-file", required=True, metavar="F", help="the same as the driver's, or a copy of it")
    add("--slots", default="auto", metavar="N|auto", help="workers that may run here (auto: its GPUs, else its cores)")
    add("--name", default=host_name(), metavar="NAME", help="unlike that of any other host (default: its name)")
    add("--wait", default="600", metavar="S", help="seconds to wait for a driver (default: 600)")
    add(
        "--connect-timeout",
        default=_DEFAULTS["connect_timeout_s"],
        metavar="S",
        help="seconds for one attempt to reach it (default: %(default)g)",
    )
    given = parser.parse_args(argv)
    try:
        host, port = split_address(given.join)
        slots, wait_s = 0 if given.slots == "auto" else int(given.slots), float(given.wait)
        connect_timeout_s = float(given.connect_timeout)
        if not port or slots < 0 or wait_s < 0 or connect_timeout_s <= 0:
            raise ValueError("a port is missing, or a number is negative")
    except ValueError as error:
        takes = "--join HOST:PORT, --slots N, --wait S, --connect-timeout S"
        raise OptionError(f"elasticrun agent: {error}: takes {takes}") from None

    from elasticstate.agent.join import join

    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return join(address, given.token_file, given.name, slots, wait_s=wait_s, connect_timeout_s=connect_timeout_s)


# ----------------------------------------------------------------------------------------------------- the options

_EPILOG = """\
examples:
  elasticrun -np 4 python train.py --lr 0.1
  elasticrun -np 4 --min-np 2 -H localhost:2,127.0.0.2:2 train.py
  elasticrun -np 2 --max-np 8 --host-discovery-script ./discover.sh train.py
  elasticrun -np 8 --min-np 4 --listen 0.0.0.0:7000 --token-file F train.py
  elasticrun agent --join HOST:7000 --token-file F
  elasticrun status JOB
  elasticrun --check -H h1:4,h2:4       (what is available here and there?)
  elasticrun --reattach JOB             (its driver has died, its workers train on: be its driver)

Options stand before COMMAND; what follows COMMAND belongs to it. A COMMAND that ends in .py runs with this Python.
Each --option-name may also be given as ELASTICSTATE_OPTION_NAME in the environment; the command line has precedence.
Exit status: 0 the workers finished; 1 failed, the root cause is printed last; 2 usage; 130 Ctrl-C; 143 SIGTERM.
"""

_DESCRIPTION = """\
Run COMMAND in N workers that survive each other: the world shrinks when a worker or a host is lost, grows when one
comes, and training goes on in the processes that are there."""


def parse_options(argv: Sequence[str]) -> Options:
    """Read the command line. Raises OptionError (one line); SystemExit(0) after ``--help`` and ``--version``."""
    return _options(vars(_parser().parse_args(argv)))


def _options(given: dict[str, Any]) -> Options:
    command = [given["program"], *given["arguments"]] if given["program"] else given["arguments"]
    return read_options(_texts(given), command[1:] if command[:1] == ["--"] else command)


def _texts(given: dict[str, Any]) -> dict[str, str | None]:
    return {name: _text(given[name]) for name in option_names()}


def _text(value: object) -> str | None:
    if value is None:
        return None
    return " ".join(value) if isinstance(value, list) else str(value)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        name, _, problem = message.removeprefix("argument ").partition(": ")
        option = next((option for option in option_names().values() if "/".join(option.names) == name), None)
        raise OptionError(f"{name}: {problem}: takes {option.kind.takes}" if option else message)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        print(f"elasticstate {version()}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="elasticrun",
        usage="elasticrun -np N [options] COMMAND...\n       elasticrun agent --join HOST:PORT --token-file F\n"
        "       elasticrun --reattach JOB\n       elasticrun status JOB\n       elasticrun --check [options]",
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
            action: Any = argparse.BooleanOptionalAction if _DEFAULTS[name] else "store_true"
            add(*option.names, dest=name, action=action, default=None, help=option.help)
        else:
            metavar = tuple(option.kind.metavar.split())
            shown = _shown(_DEFAULTS[name], option.kind)
            text = f"{option.help} (default: {shown})" if shown else option.help
            values = {"nargs": 2, "metavar": metavar} if len(metavar) == 2 else {"metavar": metavar[0]}
            add(*option.names, dest=name, default=None, help=text, **values)
    parser.add_argument(
        "--check",
        action="store_true",
        help="print what is available here, and on the hosts that are named, and exit: 1 if what is asked for "
        "(--backend, hosts, --commit-dir, --listen) is not there; needs no COMMAND",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    parser.add_argument("program", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _shown(default: object, kind: Kind) -> str:
    if default is None:
        return "off" if "off" in kind.takes else ""
    if isinstance(default, tuple):
        return " ".join(part.name if isinstance(part, Enum) else f"{part:g}" for part in default)
    return f"{default:g}" if isinstance(default, float) else str(default or "")
