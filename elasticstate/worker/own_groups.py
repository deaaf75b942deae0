"""OwnProcessGroups: protection of the default process group, which elasticstate creates."""

from __future__ import annotations

from types import TracebackType

from elasticstate.errors import UsageError

_TWICE = "trying to initialize the default process group twice"  # of torch's ValueError


class OwnProcessGroups:
    """Context in which a second ``init_process_group``, by user code, raises UsageError."""

    def __enter__(self) -> None:
        """Do nothing: torch itself refuses a second default group."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, ValueError) and _TWICE in str(error):
            raise UsageError(
                "init_process_group() was called inside a function decorated with @elasticstate.run, where "
                "elasticstate creates the default process group. Use that group, or torch.distributed.new_group()."
            ) from error
