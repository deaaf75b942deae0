"""The options of a command line."""

from __future__ import annotations

from collections.abc import Sequence

from elasticstate.cli.parser import options_of, parse
from elasticstate.options import Options


def parse_options(argv: Sequence[str]) -> Options:
    return options_of(parse(argv))
