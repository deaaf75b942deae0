"""``elasticrun --check``: what is available on this machine and on the named hosts."""

from __future__ import annotations

from collections.abc import Mapping


def main(texts: Mapping[str, str | None]) -> int:
    """Print what is available instead of running a job. ``texts``: options (field name -> text).

    Return the exit status. Raises OptionError.
    """
    from elasticstate.check.run import check
    from elasticstate.options import read_options_to_check
    from elasticstate.processes import keep_owner_access

    keep_owner_access()
    return check(*read_options_to_check(texts))
