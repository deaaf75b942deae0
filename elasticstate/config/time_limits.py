"""Time limits that contradict each other: a short wait that cannot end before the long one that it is a part of.

If only the short one is given, the default of the long one follows it. So no single option is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from elasticstate.config.options import Options, option_names
from elasticstate.core.policy import LEASE_MARGIN
from elasticstate.errors import OptionError


class _Pair(NamedTuple):
    """``short`` times ``factor`` must be at most ``long``."""

    short: str
    long: str
    reason: str
    factor: float = 1.0


_LEASE = _Pair(
    "lease_s",
    "elastic_timeout_s",
    f"the others wait {LEASE_MARGIN:g} times the lease for an unreachable host, and the job would end before",
    factor=LEASE_MARGIN,
)
_DISCOVERY = "the job would end before it asks for hosts again"
_PAIRS_OF_DISCOVERY = tuple(
    _Pair("discovery_interval_s", long, _DISCOVERY) for long in ("start_timeout_s", "elastic_timeout_s")
)
_DEFAULTS: Mapping[str, Any] = {field.name: field.default for field in fields(Options)}


def settle_time_limits(values: dict[str, Any], hosts_may_change: bool) -> None:
    """Let defaults follow the time limits that were given. Raises OptionError if two that were given contradict."""
    given = dict(values)
    for pair in (_LEASE, *(_PAIRS_OF_DISCOVERY if hosts_may_change else ())):
        short, long = given.get(pair.short), given.get(pair.long)
        if short is not None and long is not None and short * pair.factor > long:
            raise OptionError(_refusal(pair, short, long))
        if short is not None and long is None:
            values[pair.long] = max(values.get(pair.long, _DEFAULTS[pair.long]), short * pair.factor)


def _refusal(pair: _Pair, short: float, long: float) -> str:
    short_name, long_name = option_names()[pair.short].names[0], option_names()[pair.long].names[0]
    most = f"{long_name}, which is {long:g}"
    if pair.factor != 1.0:
        most = f"{long / pair.factor:g}, as {long_name} is {long:g}"
    return f"{short_name}: {short:g}: must be at most {most}: {pair.reason}. Lower {short_name}, or raise {long_name}."
