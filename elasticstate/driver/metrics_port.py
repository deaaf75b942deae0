"""The port of ``--metrics``, open while the driver runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from elasticstate.driver.job_state import JobState
from elasticstate.errors import OptionError
from elasticstate.threads import in_thread

if TYPE_CHECKING:
    from elasticstate.driver.metrics import MetricsServer


@asynccontextmanager
async def metrics_served(
    address: str | None, job: str, state: JobState, log: Callable[[str], None]
) -> AsyncIterator[None]:
    """Serve the metrics of a job at ``address``; None: do nothing. Raises OptionError."""
    if address is None:
        yield
        return
    server = await in_thread(_server, address, job, state)
    log(f"metrics: {server.url}")
    try:
        yield
    finally:
        await in_thread(server.close)


def _server(address: str, job: str, state: JobState) -> MetricsServer:
    try:
        from elasticstate.driver.metrics import MetricsServer
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("prometheus_client"):
            raise
        raise OptionError(
            "--metrics: requires the package prometheus-client. Install it: pip install 'elasticstate[metrics]'."
        ) from None
    return MetricsServer(address, job, state)
