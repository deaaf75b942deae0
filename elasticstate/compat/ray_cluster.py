"""Draining nodes of Ray, which its public Python API does not show. Checked with Ray 2.60."""

from __future__ import annotations

from collections.abc import Collection


def draining_nodes() -> Collection[str]:
    """Return the ids of the nodes that are being drained. The process is connected to the cluster."""
    from ray._private.state import state  # type: ignore[import-not-found,unused-ignore]

    ids: dict[str, int] = state.get_draining_nodes()  # Ray Serve uses it for the same purpose
    return ids.keys()
