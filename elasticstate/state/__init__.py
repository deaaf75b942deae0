"""Values that a job commits, restores and syncs: states, their snapshots, and samplers that survive world changes."""

from __future__ import annotations

from elasticstate.state.base import ObjectState, State
from elasticstate.state.loader import ElasticDataLoader
from elasticstate.state.sampler import ElasticSampler
from elasticstate.state.session import Session
from elasticstate.state.snapshot import Snapshot
from elasticstate.state.torch import TorchState

__all__ = ["ElasticDataLoader", "ElasticSampler", "ObjectState", "Session", "Snapshot", "State", "TorchState"]
