"""Local SGD and DiLoCo: workers train alone for many inner steps, and average their parameters in outer steps.

Each worker makes ``every`` inner steps on its own data, without communication. Then an outer step averages over the
workers by how far their parameters have moved since the last outer step. So slow links carry the model once per
``every`` steps, and not in each step as with DistributedDataParallel.

* ``LocalSGD`` takes the average as the new parameters: S. U. Stich, "Local SGD Converges Fast and Communicates Little",
  arXiv 1805.09767.
* ``DiLoCo`` gives the average to an outer optimizer as its gradient: A. Douillard et al., "DiLoCo: Distributed
  Low-Communication Training of Language Models", arXiv 2311.08105. With ``fragments=P``, the outer steps of P parts of
  the model are spread over the inner steps: A. Douillard et al., "Streaming DiLoCo with overlapping communication",
  arXiv 2501.18512. Each outer step then moves a P-th of the bytes. Training waits for it: there is no overlap.

The outer parameters and the outer optimizer are the same on all ranks. The parameters that a worker trains, and its
inner optimizers, are its own: ``state.check()`` leaves them out. A commit keeps them for each rank; a worker that gets
the state of another one begins with the outer parameters instead.

Only ``step`` and ``outer_step`` end ticks, and each tick has a collective over all ranks. So a worker that is cut off
from the others stands still at its next tick, and needs no ``--lease``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

import elasticstate
from elasticstate import extension
from elasticstate.errors import UsageError

__all__ = ["DiLoCo", "LocalSGD"]

Pair = tuple[torch.Tensor, torch.Tensor]
"""A parameter that this worker trains, and the outer parameter."""

_nesterov = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
_NAME = "local_sgd"  # of the value of the state


class DiLoCo:
    """DiLoCo for the parameters that the optimizers of ``state`` train. Construct it before the decorated function::

        state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader)
        diloco = DiLoCo(state, every=20)

        @elastic.run
        def train(state):
            for batch in state.loader:
                ...
                state.optimizer.step()
                diloco.step(samples=len(batch))  # instead of state.commit()

    The model is not wrapped in DistributedDataParallel. The constructor adds the value ``local_sgd`` to the state: a
    copy of the parameters, the outer optimizer, and the counters.

    Args:
        state: a TorchState with the model and its optimizers.
        outer: class of the outer optimizer, or a function that makes it from a list of parameters. The default is that
            of the paper: SGD with learning rate 0.7 and Nesterov momentum 0.9.
        every: inner steps between two outer steps of a parameter, the same on all ranks.
        fragments: parts of the model, of about equal sizes, with outer steps of their own: one each
            ``every / fragments`` inner steps.
        commit_every: commit also at inner steps with these multiples, so that a failure costs fewer of them. Such a
            commit waits for all ranks, and sends one number. 0: commit in outer steps only.

    Raises UsageError if an argument is out of range, or the state has no optimizer, has a value ``local_sgd``, or has
    committed already.
    """

    def __init__(
        self,
        state: elasticstate.TorchState,
        *,
        outer: Callable[[list[torch.Tensor]], Optimizer] = _nesterov,
        every: int,
        fragments: int = 1,
        commit_every: int = 0,
    ) -> None:
        self._state = weakref.ref(state)  # the state refers to this object
        self._trained = _trained_by(self._optimizers())
        kind = type(self).__name__
        if not self._trained:
            raise UsageError(
                f"{kind}: the state has no optimizer, so nothing is trained. Give the model and its optimizer to the "
                "state: TorchState(model=model, optimizer=optimizer)."
            )
        if every < 1 or not 1 <= fragments <= len(self._trained) or every % fragments or commit_every < 0:
            raise UsageError(
                f"{kind}(every={every}, fragments={fragments}, commit_every={commit_every}): every must be a multiple "
                f"of fragments, fragments must be from 1 to {len(self._trained)} (the number of parameters), and "
                "commit_every must not be negative."
            )
        self._interval = every // fragments
        self._commit_every = commit_every
        copies = torch.nn.ParameterList([torch.nn.Parameter(p.detach().clone()) for p in self._trained])
        self._outer = outer(list(copies))
        self._fragments = _split(list(zip(self._trained, copies, strict=True)), fragments)
        self._steps = 0
        self._samples = [0] * fragments  # that this worker has trained since the last outer step of each fragment
        extension.add_values(state, **{_NAME: {"parameters": copies, "optimizer": self._outer, "worker": self}})
        state.exclude_from_check(*self._own_values())

    def step(self, samples: int = 1) -> None:
        """End an inner step. Call it after the optimizer's step, equally often on all ranks, instead of ``commit``.

        Each ``every / fragments`` inner steps it makes the outer step of one fragment, and commits.

        Args:
            samples: number of samples of this inner step on this rank. The average counts each rank by its samples.

        Raises what ``State.commit`` raises, torch's errors of collectives, and UsageError if ``samples`` is negative
        or an optimizer trains other parameters than at the start.
        """
        if samples < 0:
            raise UsageError(f"step(samples={samples}): must not be negative.")
        self._steps += 1
        self._samples = [before + samples for before in self._samples]
        number, rest = divmod(self._steps, self._interval)
        if rest == 0:
            self._require_same_parameters()
            self._average((number - 1) % len(self._fragments))
            self._live.commit()
        elif self._commit_every and self._steps % self._commit_every == 0:
            _sum_over_ranks(0, self._trained[0].device)  # no rank is a commit ahead: all restore the same one
            self._live.commit()
        else:
            self._live.progress()

    def outer_step(self) -> None:
        """Make an outer step of all fragments now, and commit: before an evaluation, and at the end of the training.

        Afterwards the parameters are the same on all ranks. All ranks call it after the same inner step.

        Raises what ``step`` raises.
        """
        self._require_same_parameters()
        for fragment in range(len(self._fragments)):
            self._average(fragment)
        self._live.commit()

    def _average(self, fragment: int) -> None:
        """Make the outer step of a fragment, and continue with its outer parameters."""
        pairs, samples = self._fragments[fragment], self._samples[fragment]
        total = _sum_over_ranks(samples, pairs[0][0].device)
        with torch.no_grad():
            if total > 0:
                for dtype in dict.fromkeys(inner.dtype for inner, _ in pairs):
                    _average_moves([pair for pair in pairs if pair[0].dtype == dtype], samples / total)
                self._outer.step()
                self._outer.zero_grad(set_to_none=True)  # an optimizer skips parameters without one: other fragments
            for inner, outer in pairs:
                inner.copy_(outer)
        self._samples[fragment] = 0

    def _require_same_parameters(self) -> None:
        if {*map(id, _trained_by(self._optimizers()))} != {*map(id, self._trained)}:
            raise UsageError(
                f"An optimizer of the state trains other parameters than when {type(self).__name__} was constructed. "
                "Give all parameters to the optimizers before."
            )

    # ------------------------------------------------------------------------------------------ as a value of the state

    @property
    def _live(self) -> elasticstate.State:
        state = self._state()
        assert state is not None, "the script uses the state"
        return state

    def _optimizers(self) -> list[Optimizer]:
        return [value for value in self._parts().values() if isinstance(value, Optimizer)]

    def _parts(self) -> dict[str, Any]:
        """Return the values of the script: all but the one that this object has added."""
        return {name: value for name, value in extension.parts(self._live).items() if name.partition(".")[0] != _NAME}

    def _own_values(self) -> list[str]:
        """Return the names of the values that differ between ranks."""
        ids = set(map(id, self._trained))
        found = [f"{_NAME}.worker.{name}" for name in ("samples", "owner")]
        for name, value in self._parts().items():
            if isinstance(value, torch.nn.Module) and any(id(p) in ids for p in value.parameters()):
                found.append(f"{name}.parameters")
            elif id(value) in ids or isinstance(value, Optimizer | torch.amp.GradScaler):
                found.append(name)
        return found

    @property
    def _owner(self) -> str:
        """The slot of this worker. A new process in the slot may continue with the commit of the one before."""
        return f"{extension.host()}:{elasticstate.local_rank()}"

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "samples": list(self._samples), "owner": self._owner}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the counters. With those of another worker, begin at the outer parameters.

        The state has loaded all other values before, as this one was added last.
        """
        self._steps = state_dict["steps"]
        self._samples = list(state_dict["samples"])
        if state_dict["owner"] == self._owner and len(self._samples) == len(self._fragments):
            return
        self._samples = [0] * len(self._fragments)
        with torch.no_grad():
            for pairs in self._fragments:
                for inner, outer in pairs:
                    inner.copy_(outer)


class LocalSGD(DiLoCo):
    """Local SGD: each ``every`` inner steps, all ranks continue with the average of their parameters.

    It is DiLoCo with plain SGD as the outer optimizer, with the learning rate 1. For the arguments, see there.
    """

    def __init__(self, state: elasticstate.TorchState, *, every: int, commit_every: int = 0) -> None:
        outer = functools.partial(torch.optim.SGD, lr=1.0)
        super().__init__(state, outer=outer, every=every, commit_every=commit_every)


def _trained_by(optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """Return the parameters of the optimizers, each once."""
    found = {id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    return list(found.values())


def _split(pairs: list[Pair], count: int) -> list[list[Pair]]:
    """Return ``count`` fragments of about equal numbers of bytes, in order. None of them is empty."""
    total = sum(inner.nbytes for inner, _ in pairs)
    fragments: list[list[Pair]] = [[]]
    size = 0
    for i, pair in enumerate(pairs):
        missing = count - len(fragments)
        is_full = size + pair[0].nbytes / 2 > total * len(fragments) / count
        if missing and fragments[-1] and (is_full or len(pairs) - i == missing):
            fragments.append([])
        fragments[-1].append(pair)
        size += pair[0].nbytes
    return fragments


def _average_moves(pairs: list[Pair], share: float) -> None:
    """Average over the ranks how far the parameters have moved, in one collective, as gradients of the outer ones.

    ``share``: the weight of this rank. The weights of all ranks add up to 1.
    """
    device = pairs[0][0].device
    moves = torch.cat([(outer - inner).to(device).flatten() for inner, outer in pairs]).mul_(share)
    if extension.world_size() > 1:
        dist.all_reduce(moves)
    for (_, outer), move in zip(pairs, torch.split(moves, [outer.numel() for _, outer in pairs]), strict=True):
        outer.grad = move.view_as(outer).to(outer.device)


def _sum_over_ranks(number: int, device: torch.device) -> int:
    if extension.world_size() == 1:
        return number
    total = torch.tensor(number, device=device)
    dist.all_reduce(total)
    return int(total)
