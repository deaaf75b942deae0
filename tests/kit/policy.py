"""Policies for tests of the core: the default options of a job, with changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elasticstate.core.policy import Policy
from elasticstate.options import Options


def policy_of(np: int, min_np: int, max_np: int | None = None, **changes: Any) -> Policy:
    """Return the policy of a job of this size. ``changes``: fields of the policy."""
    options = Options(command=("train",), np=np, min_np=min_np, max_np=max_np)
    return replace(options.policy(), **changes)


def in_pairs(policy: Policy) -> Policy:
    """Return the policy with worlds of whole pairs."""
    np, min_np, max_np = (n and n + n % 2 for n in (policy.np, policy.min_np, policy.max_np))
    return replace(policy, np=np or 0, min_np=min_np or 0, max_np=max_np, np_multiple=2)
