"""Uneven inputs: a state as a joinable of ``torch.distributed.algorithms.Join``."""

from __future__ import annotations

from torch.distributed.algorithms.join import JoinHook

from elasticstate.state.committer import Committer


class StateJoinHook(JoinHook):
    """Hooks for a rank that has no inputs left while others train.

    The rank ends its ticks together with the others, so ticks stay equal on all ranks. It trains nothing, so it saves
    nothing: in another world it receives the state from one of the others. When no rank has inputs left, all ranks
    receive the state of the last one.
    """

    def __init__(self, committer: Committer) -> None:
        self._committer = committer

    def main_hook(self) -> None:
        self._committer.tick_without_inputs()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._committer.follow_last_joiner(is_last_joiner)
