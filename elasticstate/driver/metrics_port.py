"""The port of ``--metrics``, open while the driver runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from elasticstate.driver.job import JobState
from elasticstate.errors import OptionError
from elasticstate.net.strangers import Strangers
from elasticstate.threads import in_thread


@asynccontextmanager
async def metrics_served(
    address: str | None, job: str, state: JobState, strangers: Strangers, log: Callable[[str], None]
) -> AsyncIterator[None]:
    """Serve the metrics of a job at ``address``; None: do nothing. Raises OptionError."""
    if address is None:
        yield
        return
    await in_thread(_require_library)
    from elasticstate.driver.metrics import MetricsServer

    server = MetricsServer(address, job, state, strangers)
    log(f"metrics: {server.url}")
    try:
        yield
    finally:
        await server.close()


def _require_library() -> None:
    """Import prometheus_client, which takes a while. Raises OptionError."""
    try:
        import elasticstate.driver.metrics  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("prometheus_client"):
            raise
        raise OptionError(
            "--metrics: requires the package prometheus-client. Install it: pip install 'elasticstate[metrics]'."
        ) from None
