"""The parsers of the command line, made from the declarations of the options."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from elasticstate.errors import OptionError
from elasticstate.machine import is_python, is_this_python, version
from elasticstate.options import Options, declarations, read_options, spellings
from elasticstate.options.kinds import FLAG
from elasticstate.terminal import complain

_WIDTH = 118
_USAGE = """\
elasticrun [-np N] [options] COMMAND...
       elasticrun agent --join HOST:PORT --token-file F
       elasticrun status JOB [--watch]
       elasticrun trace EVENTS -o trace.json
       elasticrun report EVENTS... -o report.html
       elasticrun verify EVENTS...
       elasticrun export PLACE -o model.safetensors
       elasticrun --reattach JOB
       elasticrun --check [options]
       elasticrun --help | --help-all | --version"""

_DESCRIPTION = """\
Run COMMAND in N workers. The world shrinks when a worker or a host is lost and grows when one joins, and the other
workers continue training in their processes.

Write options before COMMAND: everything after it belongs to COMMAND. A COMMAND that ends in .py runs with this Python,
and so does -m MODULE.
The environment variable ELASTICSTATE_OPTION_NAME also sets --option-name; the command line has precedence."""

_EXAMPLES = """\
examples:
  elasticrun train.py --lr 0.1                                             a worker for each GPU of this machine
  elasticrun -np 4 train.py                                                4 workers on this machine
  elasticrun -np 4 --min-np 2 -H h1:2,h2:2 train.py                        2 hosts by ssh; one is enough to go on
  elasticrun -np 2 --max-np 8 --host-discovery-script ./hosts.sh train.py  hosts that come and go
  elasticrun -np 8 --listen 0.0.0.0:7000 --token-file F train.py           agents dial in, started on each
  elasticrun agent --join HOST:7000 --token-file F                         machine by this command
  elasticrun --check -H h1:4,h2:4                                          what is available here and there
  elasticrun status JOB --watch                                            the world, and what the job waits for
  elasticrun --reattach JOB                                                a new driver for a job without one

Exit status: 0 the workers finished; 1 failed, the root cause is printed last; 2 usage; 3 failed by the script's own
error, so do not run it again unchanged; 130 Ctrl-C; 143 SIGTERM."""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Help with each metavar once, and with no option cut at a hyphen."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=_WIDTH)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        metavar = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {metavar}"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


class CommandParser(argparse.ArgumentParser):
    """A parser of this command line. Its errors are of type OptionError."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **settings)

    def error(self, message: str) -> Any:
        raise OptionError(
            f"{self.prog.split()[-1]}: {message.removeprefix('argument ')}. {self.prog} --help explains the command."
        )


def file_parser(name: str, description: str, epilog: str, output: str | None = None) -> CommandParser:
    """Return the parser of a command that makes one file. ``output``: its default path; None: it must be given."""
    parser = CommandParser(prog=f"elasticrun {name}", description=description, epilog=epilog)
    text = "File to write. It is replaced when the new one is complete"
    text += "." if output is None else f" (default: {output})."
    parser.add_argument("-o", "--output", default=output, required=output is None, metavar="FILE", help=text)
    return parser


class Parser(CommandParser):
    """A parser whose errors name the valid values of an option of jobs."""

    def error(self, message: str) -> Any:
        name, _, problem = message.removeprefix("argument ").partition(": ")
        option = next((option for option in declarations().values() if "/".join(option.names) == name), None)
        if option is None:
            raise OptionError(f"{message.removeprefix('argument ')}. elasticrun --help-all lists all options.")
        raise OptionError(f"{name}: {problem}: must be {option.kind.valid}")


def parse(argv: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of the command line by their names.

    Raises OptionError (one line); SystemExit(0) after ``--help`` and ``--version``.
    """
    given, unknown = _parser().parse_known_args(argv)
    if unknown:
        names = [name for option in declarations().values() for name in option.names]
        raise spellings.unknown(unknown[0], [*names, "--check", "--version", "--reattach", "--help", "--help-all"])
    return vars(given)


def options_of(given: dict[str, Any]) -> Options:
    """Return the options of a job. Raises OptionError."""
    command = [given["program"], *given["arguments"]] if given["program"] else given["arguments"]
    command = command[1:] if command[:1] == ["--"] else command
    if given["--module"] and command:
        command = [sys.executable, "-u", "-m", *command]
    options = read_options(texts_of(given), command)
    spellings.check(given, options)
    program = options.command[0]
    if is_python(program) and os.path.dirname(program) and not is_this_python(program):
        complain(
            "elasticrun",
            f"COMMAND runs with {program}, and elasticrun with {sys.executable}. If the former has no "
            "elasticstate of this version, write python without a path.",
        )
    if options.reason_of_np:
        complain("elasticrun", f"-np is not given: {options.np} worker{'s' * (options.np > 1)}, {options.reason_of_np}")
    if note := spellings.note(given):
        complain("elasticrun", note)
    return options


def texts_of(given: dict[str, Any]) -> dict[str, str | None]:
    """Return the options that were given, as texts by the names of their fields. Raises OptionError."""
    texts = {name: _text(given[name]) for name in declarations()}
    spellings.translate(given, texts)
    return texts


def _text(value: object) -> str | None:
    if value is None:
        return None
    return " ".join(value) if isinstance(value, list) else str(value)


class _Print(argparse.Action):
    """Print a text instead of running a job. ``const``: returns the text for a parser."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        print(self.const(parser), end="")
        parser.exit()


def _parser(lists_rare_options: bool = False) -> CommandParser:
    end = _EXAMPLES
    if lists_rare_options:
        end = f"{spellings.help_text(_WIDTH)}\n\n{end}"
    else:
        rare = sum(option.is_rare for option in declarations().values())
        end = f"elasticrun --help-all lists {rare} rarer options, and those of torchrun and horovodrun.\n\n{end}"
    parser = Parser(prog="elasticrun", usage=_USAGE, description=_DESCRIPTION, epilog=end, add_help=False)
    groups: dict[str, Any] = {}
    for name, option in declarations().items():
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        add = groups[option.group].add_argument
        is_listed = lists_rare_options or not option.is_rare
        text = option.help
        if option.shown_default:
            text = f"{text.removesuffix('.')} (default: {option.shown_default})."
        settings: dict[str, Any] = {"help": text if is_listed else argparse.SUPPRESS}
        if option.kind is FLAG:
            settings["action"] = "store_true"
        else:
            metavar = tuple(option.kind.metavar.split())
            settings |= {"nargs": 2, "metavar": metavar} if len(metavar) == 2 else {"metavar": metavar[0]}
        add(*option.names, dest=name, default=None, **settings)
    # The command line shows these in its usage. Tick records were once on by default, so commands have that option.
    add = parser.add_argument
    add("--no-tick-records", dest="tick_records", action="store_false", default=None, help=argparse.SUPPRESS)
    add("--check", action="store_true", help=argparse.SUPPRESS)
    add("-h", "--help", action=_Print, nargs=0, const=argparse.ArgumentParser.format_help, help=argparse.SUPPRESS)
    add("--help-all", action=_Print, nargs=0, const=lambda _: _parser(True).format_help(), help=argparse.SUPPRESS)
    add(
        "-v", "--version", action=_Print, nargs=0, const=lambda _: f"elasticstate {version()}\n", help=argparse.SUPPRESS
    )
    spellings.add_options(parser)
    add("program", nargs="?", help=argparse.SUPPRESS)
    add("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser
