"""Uneven inputs: a state among the joinables of ``torch.distributed.algorithms.Join``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.algorithms.join import JoinHook

if TYPE_CHECKING:
    from elasticstate.state.base import State


class StateJoinHook(JoinHook):
    """What a rank that has run out of inputs does for its state, while others go on.

    It ends their ticks with them, so that ticks stay equal on all ranks; but nothing is trained here, so nothing is
    saved: in another world it gets the state from one of them. When all have run out, the state of the last of them is
    everybody's.
    """

    def __init__(self, state: State) -> None:
        self._state = state

    def main_hook(self) -> None:
        self._state._shadow_tick()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._state._follow_the_last(is_last_joiner)
