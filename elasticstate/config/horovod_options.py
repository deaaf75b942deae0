"""Options for jobs with elasticstate.horovod, and Horovod's environment variables for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elasticstate import kinds
from elasticstate.config.option import option

_GROUP = "jobs with elasticstate.horovod"
_VARIABLES = {
    "stall_check_s": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "stall_shutdown_s": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "timeline_filename": "HOROVOD_TIMELINE",
    "timeline_mark_cycles": "HOROVOD_TIMELINE_MARK_CYCLES",
}
STALL_CHECK_S = 60.0  # default of --stall-check-time, as in Horovod
_DYNAMIC = "DYNAMIC"  # the script starts the timeline
_NO_STALL_CHECK = "HOROVOD_STALL_CHECK_DISABLE"


@dataclass(frozen=True, kw_only=True)
class HorovodOptions:
    """Options of jobs that use elasticstate.horovod. Times are in seconds. None means off."""

    stall_check_s: float | None = option(
        STALL_CHECK_S,
        _GROUP,
        kinds.SECONDS_OR_NEVER,
        "--stall-check-time --stall-check-warning-time-seconds",
        "Seconds some ranks may wait in a collective for ranks that have not made the call. After that a warning names "
        "the call, the waiting and the missing ranks.",
    )
    stall_shutdown_s: float | None = option(
        None,
        _GROUP,
        kinds.SECONDS_OR_NEVER,
        "--stall-shutdown-time --stall-check-shutdown-time-seconds",
        "Seconds such a wait may last. After that the job fails.",
    )
    timeline_filename: str | None = option(
        None,
        _GROUP,
        kinds.PATH,
        "--timeline-filename",
        "File for a trace of the collectives, for chrome://tracing and Perfetto. Rank 0 writes it.",
    )

    timeline_mark_cycles: bool = False
    """Another spelling of Horovod's variable, which marks the ends of ticks in the trace."""

    def timeline_variables(self) -> dict[str, str]:
        """Return the environment variables from which workers read where to write their timeline."""
        if self.timeline_filename is None:
            return {}
        path = self.timeline_filename
        absolute = path if path == _DYNAMIC else str(Path(path).absolute())
        return {
            _VARIABLES["timeline_filename"]: absolute,
            _VARIABLES["timeline_mark_cycles"]: str(int(self.timeline_mark_cycles)),
        }


def horovod_text(name: str, environ: Mapping[str, str]) -> tuple[str, str | None]:
    """Return Horovod's variable for an option, and the text that it gives the option; None: it is not set."""
    if name == "stall_check_s" and environ.get(_NO_STALL_CHECK, "0") not in ("", "0"):
        return _NO_STALL_CHECK, "off"
    variable = _VARIABLES.get(name, "")
    return variable, environ.get(variable) or None
