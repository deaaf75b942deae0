"""``hvd.elastic``: elasticstate under Horovod's names and signatures."""

from __future__ import annotations

from elasticstate.horovod.elastic.sampler import ElasticSampler
from elasticstate.horovod.elastic.state import ObjectState, State, TorchState, run

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
