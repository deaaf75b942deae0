"""Uneven inputs: a state as a joinable of ``torch.distributed.algorithms.Join``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.algorithms.join import JoinHook

if TYPE_CHECKING:
    from elasticstate.state.base import State


class StateJoinHook(JoinHook):
    """Hooks for a rank that has no inputs left while others train.

    The rank ends its ticks together with the others, so ticks stay equal on all ranks. It trains nothing, so it saves
    nothing: in another world it receives the state from one of the others. When no rank has inputs left, all ranks
    receive the state of the last one.
    """

    def __init__(self, state: State) -> None:
        self._state = state

    def main_hook(self) -> None:
        self._state._shadow_tick()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._state._follow_the_last(is_last_joiner)
