"""Attached values: modules, optimizers and other objects of one world, whose tensors may be shards.

A commit has the local tensors of this worker, without any collective (not by ``state_dict()``: that of FSDP2 makes a
model whole again), named by the parameters: ``optimizer.state.model.layers.0.weight.exp_avg``. Everything else is the
same on all workers and lies in the commit as trees (see values.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch.nn.parallel import DistributedDataParallel

from elasticstate.commits import NO_SHARDING, Sharding
from elasticstate.compat import dtensors, modules
from elasticstate.compat.dtensors import Split
from elasticstate.compat.modules import load_state, state_of
from elasticstate.errors import StateError, UsageError
from elasticstate.state.async_commit import is_captured
from elasticstate.state.layout import unusual_strides
from elasticstate.state.loader import is_stateful
from elasticstate.state.module_state import Walk, load_buffers, load_modes, rest_of
from elasticstate.state.optimizer_state import arrange_groups, check_settings, is_plain_optimizer, owned_by
from elasticstate.state.reshard import CommitCopies, Piece, chunk_of, digest_of, piece_of
from elasticstate.state.session import Channel, Session, channel_between, channel_of_all
from elasticstate.state.values import Tree, flatten, rebuild_with


class RestoreTargets:
    """Tensors by name. ``load`` reads all of them at once."""

    def __init__(self, copies: CommitCopies) -> None:
        self._copies = copies
        self.pieces: dict[str, Piece] = {}
        self._tied: dict[object, torch.Tensor] = {}
        self.calls: list[Callable[[], object]] = []  # to make when all tensors have their content

    def load(self, when_opened: Callable[[], object] | None) -> None:
        """Read the content of all tensors, then make the calls. See ``CommitCopies.load``, which raises the same."""
        self._copies.load(self.pieces, when_opened)
        for call in self.calls:
            call()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor that exists. Its shape and dtype must be those of the commit."""
        self.pieces[name] = piece_of(name, tensor)

    def tensor(self, live: object, name: str, device: torch.device) -> torch.Tensor:
        """Add ``live`` if the content fits into it, otherwise a new plain tensor. Return the added one."""
        shape, dtype = self._copies.find(name)
        tie = self._copies.tie(name)
        if not _fits(live, shape, dtype):
            live = self._tied.get((tie, device.type)) if tie else None
            live = torch.empty(shape, dtype=dtype, device=device) if live is None else live
        assert isinstance(live, torch.Tensor)
        self._tied.setdefault((tie, live.device.type), live.detach() if isinstance(live, torch.nn.Parameter) else live)
        self.add(name, live)
        return live

    def tensor_of(
        self,
        parameter: torch.Tensor,
        splits: tuple[Split, ...] | None,
        live: object,
        name: str,
        device: torch.device,
    ) -> torch.Tensor:
        """Do what ``tensor`` does, for a tensor in the state of an optimizer that belongs to ``parameter``.

        ``splits``: placements of a DTensor in the commit. None: those of the parameter, which may be others now.

        Raises StateError if the placements are not the parameter's, and cannot be those of a tensor in this world.
        """
        shape, dtype = self._copies.find(name)
        if not dtensors.is_dtensor(parameter):
            if not _fits(live, shape, dtype) and shape == parameter.shape:
                live = torch.empty_like(parameter, dtype=dtype, device=device)  # fused optimizers need equal strides
            return self.tensor(live, name, device)
        if _fits(live, shape, dtype):
            return self.tensor(live, name, device)
        like: Any = parameter
        mesh = like.device_mesh
        placed = dtensors.splits_of(like) if splits is None else splits
        if len(placed) != mesh.ndim or any(split is not None and split[0] >= len(shape) for split in placed):
            raise StateError(
                f"{name} was sharded in another way than its parameter, on a mesh of {len(placed)} dimensions, and the "
                f"mesh of this world has {mesh.ndim}. Create the state of the optimizer before attach()."
            )
        coordinate = mesh.get_coordinate()
        _, sizes = chunk_of(shape, tuple(mesh.shape), tuple(coordinate), placed) if coordinate else ((), (0,))
        near = dtensors.local_of(like)
        is_like = tuple(near.shape) == tuple(sizes)
        local = torch.empty_like(near, dtype=dtype) if is_like else torch.empty(sizes, dtype=dtype, device=near.device)
        made: torch.Tensor = dtensors.like(like, splits, local, shape)
        self.add(name, made)
        return made


def _fits(live: object, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return True if a live tensor can be overwritten with a content of this shape and dtype."""
    if not isinstance(live, torch.Tensor) or tuple(live.shape) != shape or live.dtype != dtype:
        return False
    return dtensors.is_dtensor(live) or live.is_contiguous() or bool(unusual_strides(shape, live.stride()))


class AttachedOptimizer:
    """An optimizer of parameters of attached modules, with torch's own ``state_dict`` methods.

    Its state is named by the parameters, not by their positions. ``get_optimizer_state_dict`` of
    torch.distributed.checkpoint is not used: for an optimizer without state it runs a step.
    """

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self._name, self.optimizer = name, optimizer

    def capture(self, values: dict[str, Any], names: Mapping[int, str]) -> Any:
        """Put the tensors into ``values``, and return the rest. ``names``: by id, those of all parameters. Raises
        StateError if a parameter does not belong to an attached module."""
        state: dict[str, Any] = {}
        placed: dict[str, tuple[Split, ...] | None] = {}
        for key, entry in self.optimizer.state.items():
            parameter = self._name_of(key, names)
            found: dict[str, Any] = {}
            state[parameter] = flatten(entry, f"{self._name}.state.{parameter}", found)
            for name, value in found.items():
                if dtensors.is_dtensor(value) or _is_like(key, value):
                    placed[name] = _splits(key, value)
            if taken := values.keys() & found.keys():
                raise StateError(f"two tensors have the name {min(taken)}. Rename a parameter.")
            values.update(found)
        groups = [
            {**group, "params": [self._name_of(p, names) for p in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        return {"state": state, "placed": placed, "param_groups": flatten(groups, f"{self._name}.param_groups", values)}

    def prepare(self, tree: Any, targets: RestoreTargets, parameters: Mapping[str, torch.Tensor]) -> None:
        """Give the optimizer the groups and the state of the commit, and add all tensors to ``targets``."""
        optimizer = self.optimizer
        check_settings(self._name, optimizer, tree["param_groups"])
        saved = [list(group["params"]) for group in tree["param_groups"]]
        arrange_groups(self._name, optimizer, saved, parameters, tree["param_groups"])
        at = f"{self._name}.param_groups"
        groups = rebuild_with(targets.tensor, tree["param_groups"], optimizer.param_groups, None, at, set())
        for group, rebuilt in zip(optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in rebuilt.items() if key != "params"})
        state = {}
        for name, entry in tree["state"].items():
            parameter = parameters[name]
            load = functools.partial(_load, targets, parameter, tree["placed"])
            at = f"{self._name}.state.{name}"
            state[parameter] = rebuild_with(load, entry, optimizer.state.get(parameter), parameter.device, at, set())
        optimizer.state.clear()
        optimizer.state.update(state)

    def _name_of(self, parameter: torch.Tensor, names: Mapping[int, str]) -> str:
        name = names.get(id(parameter))
        if name is None:
            raise StateError(
                f"{self._name} trains a tensor of shape {tuple(getattr(parameter, 'shape', ()))} that is no parameter "
                "of an attached module. Attach the module, too, and create the optimizer after fully_shard() or "
                "parallelize_module()."
            )
        return name


def _is_like(parameter: Any, value: Any) -> bool:
    """Return True if both are plain tensors of one shape. In another world, both may be sharded."""
    is_plain = isinstance(value, torch.Tensor) and not dtensors.is_dtensor(parameter)
    return is_plain and value.ndim > 0 and value.shape == parameter.shape


def _splits(parameter: Any, value: Any) -> tuple[Split, ...] | None:
    """Return the placements of a tensor, or None if they are those of its parameter."""
    if not dtensors.is_dtensor(value):
        return None
    if dtensors.is_dtensor(parameter) and parameter.placements == value.placements:
        return None
    return dtensors.splits_of(value)


def _load(
    targets: RestoreTargets,
    parameter: torch.Tensor,
    placed: Mapping[str, tuple[Split, ...] | None],
    live: object,
    name: str,
    device: torch.device,
) -> torch.Tensor:
    if name in placed:
        return targets.tensor_of(parameter, placed[name], live, name, device)
    return targets.tensor(live, name, device)


class AttachedValues:
    """The attached values of one world, by name: modules, optimizers and other objects with ``state_dict()``.

    Raises UsageError if a value has no ``state_dict()``; StateError if a tensor is on the meta device, or has
    placements that cannot be described.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.names = tuple(values)
        self.values = values
        for name, value in values.items():
            require_describable(name, value)
        self._modules = {name: AttachedModule(name, v) for name, v in values.items() if isinstance(v, torch.nn.Module)}
        self._optimizers = {name: AttachedOptimizer(name, v) for name, v in values.items() if is_plain_optimizer(v)}
        self._others = {name: v for name, v in values.items() if name not in {*self._modules, *self._optimizers}}
        for name, value in self._others.items():
            if not is_stateful(value):
                raise UsageError(
                    f"attach({name}=…): a {type(value).__name__} has no state_dict() and load_state_dict(). Pass plain "
                    "values to the constructor of the state."
                )
        self._pieces: dict[str, tuple[torch.Tensor, Piece]] = {}  # of the last capture
        self._sharding = NO_SHARDING
        for name, tensor in self._tensors():
            if piece_of(name, tensor).local.is_meta:
                raise StateError(
                    f"{name} is on the meta device. Call {name.split('.')[0]}.to_empty(device=elastic.device()) before "
                    "attach()."
                )

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters and buffers of all modules."""
        for module in self._modules.values():
            yield from module.tensors().items()

    def capture(self) -> tuple[dict[str, Any], Sharding]:
        """Return the local tensors and the trees by name, and the places of the tensors. Copies nothing."""
        tensors: dict[str, Any] = {}
        trees: dict[str, Any] = {name: module.capture(tensors) for name, module in self._modules.items()}
        names = {id(p): name for module in self._modules.values() for name, p in module.parameters.items()}
        trees |= {name: optimizer.capture(tensors, names) for name, optimizer in self._optimizers.items()}
        trees |= {name: flatten(state_of(value), name, tensors) for name, value in self._others.items()}
        pieces = self._pieces
        found: dict[str, tuple[torch.Tensor, Piece]] = {}
        is_same = len(pieces) == len(tensors)
        for name, tensor in tensors.items():
            known = pieces.get(name)
            if known is None or not _is_piece_of(known, tensor):
                known, is_same = (tensor, piece_of(name, _required_tensor(name, tensor))), False
            found[name] = known
        if not is_same:
            self._pieces = found
            self._sharding = Sharding(self.names, {name: piece.shard for name, (_, piece) in found.items()})
        local = {name: piece.local for name, (_, piece) in found.items()}
        return {**local, **{name: Tree(tree) for name, tree in trees.items()}}, self._sharding

    def digest(self) -> int:
        """Return the digest of the shards of this worker, as of the last capture."""
        return digest_of((name, piece) for name, (_, piece) in self._pieces.items())

    def optimizer_owned(self) -> set[int]:
        """Return the ids of the captured tensors that only an optimizer's ``step`` writes. See async_commit.py."""
        locals_of = {id(tensor): id(piece.local) for tensor, piece in self._pieces.values()}
        found: set[int] = set()
        for optimizer in self._optimizers.values():
            if not is_captured(optimizer.optimizer):
                found.update(locals_of[i] for i in owned_by(optimizer.optimizer) if i in locals_of)
        return found

    def counted(self) -> dict[int, torch.Tensor]:
        """Return the DTensors by the ids of their captured local tensors."""
        return {id(piece.local): tensor for tensor, piece in self._pieces.values() if piece.local is not tensor}

    def spread(self, session: Session) -> None:
        """Give all replicas of a tensor, or of a part of it, the content of the lowest rank that has it.

        All ranks call it. Replicas are found by their places, because a mesh need not contain all of them: with tensor
        parallelism, a parameter that is not parallel is sharded on the other dimension alone.
        """
        pieces = {name: piece_of(name, tensor) for name, tensor in self._tensors()}
        places = {name: digest_of([(name, piece)]) for name, piece in pieces.items() if piece.local.numel()}
        everyone = channel_of_all(session)
        holders: dict[int, list[int]] = {}
        for rank, message in enumerate(everyone.messages_of_all(msgspec.msgpack.encode(list(places.values())))):
            for place in msgspec.msgpack.decode(message, type=list[int]):
                holders.setdefault(place, []).append(rank)
        names: dict[tuple[int, ...], list[str]] = {}
        for name, place in places.items():
            names.setdefault(tuple(holders[place]), []).append(name)
        for ranks in sorted(names):  # in the same order on all ranks, so that none waits for another in a circle
            if len(ranks) == 1:
                continue
            channel = channel_between(session, ranks[0], ranks[1:])
            for name in sorted(names[ranks]):
                _broadcast(channel, pieces[name].local)

    def restore(self, copies: CommitCopies, when_opened: Callable[[], object] | None = None) -> dict[str, Piece]:
        """Make the content of a commit the content of all attached values. Return all tensors.

        ``when_opened``: see ``CommitCopies.load``, which raises the same. All tensors exist then.
        """
        trees = copies.trees()
        if trees.keys() != set(self.names):
            raise StateError(
                f"attach() has the values {', '.join(sorted(self.names))}, and the commit has "
                f"{', '.join(sorted(trees))}. Attach the same values in each world."
            )
        targets = RestoreTargets(copies)
        for name, module in self._modules.items():
            module.prepare(trees[name].tree, targets)
        parameters = {name: p for module in self._modules.values() for name, p in module.parameters.items()}
        for name, optimizer in self._optimizers.items():
            optimizer.prepare(trees[name].tree, targets, parameters)
        for name, value in self._others.items():
            rebuilt = rebuild_with(targets.tensor, trees[name].tree, state_of(value), None, name, set())
            targets.calls.append(functools.partial(load_state, value, rebuilt))
        targets.load(when_opened)
        return targets.pieces


def _is_piece_of(known: tuple[torch.Tensor, Piece], tensor: Any) -> bool:
    value, piece = known
    if value is not tensor:
        return False
    local = dtensors.local_of(tensor) if dtensors.is_dtensor(tensor) else tensor
    return local is piece.local and (local is not tensor or local.shape == piece.shard.shape)


def require_describable(name: str, value: object) -> None:
    """Raise UsageError for a module whose shards cannot be told from whole tensors."""
    if isinstance(value, torch.nn.Module) and modules.has_flat_shards(value):
        raise UsageError(
            f"{name} contains a FullyShardedDataParallel (FSDP1), whose shards are plain tensors: another world would "
            "load them in wrong places. Use torch.distributed.fsdp.fully_shard (FSDP2), and state.attach()."
        )


def _required_tensor(name: str, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise StateError(f"{name} is a {type(value).__name__}. An attached value may contain tensors, but no arrays.")
    return value


def _broadcast(channel: Channel, tensor: torch.Tensor) -> None:
    """Send or receive the bytes of a tensor."""
    value = tensor.detach()
    content = value.cpu().contiguous()
    channel.broadcast(content.reshape(-1).view(torch.uint8))
    if content.data_ptr() != value.data_ptr():
        value.copy_(content)


class AttachedModule:
    """A module. Its sharded parameters are held: a running forward pass replaces them by whole ones."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self._name = name
        self._module: torch.nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
        self._held: dict[str, torch.Tensor] = {}
        self.parameters: dict[str, torch.Tensor] = {}
        """Parameters by name, as of the last walk: each once, under its first name."""
        self._walk()

    def _walk(self) -> Walk:
        at = f"{self._name}."
        walk = Walk(self._module, at, at)
        names: dict[int, str] = {}
        for name, tensor in walk.parameters.items():
            held = self._held.get(name)
            if held is None or not dtensors.is_dtensor(held) or dtensors.is_dtensor(tensor):
                held = self._held[name] = tensor
            names.setdefault(id(held), name)
        self.parameters = {name: self._held[name] for name in names.values()}
        return walk

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers by name."""
        walk = self._walk()
        return {**self.parameters, **walk.buffers}

    def capture(self, values: dict[str, Any]) -> Any:
        """Put the tensors into ``values``, and return the rest of the state."""
        walk = self._walk()
        at = len(walk.buffers_at)
        values.update(self.parameters)
        values.update(walk.buffers)
        return {
            **rest_of(walk, self.parameters, f"{self._name}.extra_state", values),
            "parameters": [name[at:] for name in self.parameters],
            "buffers": {name[at:]: buffer.device.type for name, buffer in walk.buffers.items()},
        }

    def prepare(self, tree: Any, targets: RestoreTargets) -> None:
        """Add the tensors to ``targets``. Buffers that the commit has in another shape are replaced."""
        walk = self._walk()
        at = len(walk.buffers_at)
        if differing := sorted({name[at:] for name in self.parameters} ^ set(tree["parameters"])):
            raise StateError(
                f"{self._name} and the commit have different parameters: {', '.join(differing[:5])}. Attach the same "
                "module as the worker that committed."
            )
        for name, parameter in self.parameters.items():
            targets.add(name, parameter)
        load_modes(self._module, walk, self.parameters, tree)
        load_buffers(self._module, walk, tree, tree["buffers"], targets.tensor)
        parts = {path: part for part, path in walk.with_extra_state.items()}
        for path, extra in tree["extra"].items():
            value = rebuild_with(targets.tensor, extra, None, None, f"{self._name}.extra_state.{path}", set())
            targets.calls.append(functools.partial(parts[path].set_extra_state, value))
