"""DDPStrategy and ElasticEnvironment: Lightning's DDP in the present world of an elastic job."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Container, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch import strategies

import elasticstate as elastic
from elasticstate import extension
from elasticstate.errors import UsageError
from elasticstate.lightning.state import LightningState, TrainingBatches

# ---------------------------------------------------------------------------------------------------------------- files
# Checkpoint files of an attempt that is given up: removed, as the callbacks that wrote them forget them.


_NAME = re.compile(r"\.(?P<name>.+)\.elasticstate-(?P<job>[0-9a-f]+)-(?P<kind>new|old)-(?P<number>\d+)")


class _Change(NamedTuple):
    """A file that was written or removed, and the hidden file that says so."""

    number: int
    is_new: bool  # False: the hidden file is the removed one
    hidden: Path


class CheckpointFiles:
    """Changes to checkpoint files since a commit, undone if the job goes back to this commit.

    The state of a ModelCheckpoint names its files, and is in the commits. After a failure the callback would not know a
    file that it has written since, and would miss one that it has removed. So a hidden marker is beside each new file,
    and a removed file is only renamed, until the job cannot go back before the change. Their names have a number that
    counts the changes of the job: commits contain the count. All ranks count, rank 0 writes.

    Files behind a URL, and those that are overwritten, are left as they are. ``job``: id of the job; None: no other
    process can continue this one, so nothing is kept.
    """

    def __init__(self, job: str | None) -> None:
        self._job = None if job is None else hashlib.blake2b(job.encode(), digest_size=8).hexdigest()
        self.count = 0
        self._directories: set[str] = set()
        self._pending: list[_Change] = []

    def state_dict(self) -> dict[str, Any]:
        return {"job": self._job, "count": self.count, "directories": sorted(self._directories)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._job, self.count, self._directories = state["job"], state["count"], set(state["directories"])

    def write(self, filepath: object, is_writer: bool) -> None:
        """Count a file that is about to be written. ``is_writer``: this rank writes it."""
        path = self._counted(filepath)
        if path is not None and is_writer and not os.path.lexists(path):
            change = self._change(path, is_new=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            change.hidden.touch()

    def remove(self, filepath: object, is_writer: bool) -> bool:
        """Count a file that is about to be removed, and hide it. Return False if it must be removed otherwise."""
        path = self._counted(filepath)
        if path is None or (is_writer and not os.path.lexists(path)):
            return False
        if is_writer:
            path.rename(self._change(path, is_new=False).hidden)
        return True

    def settle(self, count: int) -> None:
        """Make the first ``count`` changes final: the job cannot go back before them."""
        for change in [change for change in self._pending if change.number <= count]:
            self._pending.remove(change)
            _delete(change.hidden)

    def undo(self, directories: Iterable[str], known: Container[str]) -> None:
        """Undo the changes after the commit whose count was loaded. Rank 0 calls it, before it writes a file.

        ``directories``: those of the callbacks. ``known``: paths that are in the commit.
        """
        changes: dict[Path, list[_Change]] = defaultdict(list)
        for directory in {*self._directories, *map(str, directories)}:
            with suppress(OSError):  # it does not exist yet, or is a URL
                for entry in list(os.scandir(directory)):
                    found = _NAME.fullmatch(entry.name)
                    if found is not None and found["job"] == self._job:
                        change = _Change(int(found["number"]), found["kind"] == "new", Path(entry.path))
                        changes[Path(directory, found["name"])].append(change)
        for path, of_path in changes.items():
            undone = sorted(change for change in of_path if change.number > self.count)
            if undone and not undone[0].is_new:
                _delete(path)
                undone[0].hidden.rename(path)
            elif undone and str(path) not in known:
                _delete(path)
            for change in of_path:
                _delete(change.hidden)
        self._pending = []

    def _counted(self, filepath: object) -> Path | None:
        """Return the path of a local file, once its change was counted; None if it is not handled here."""
        text = os.fspath(filepath) if isinstance(filepath, (str, os.PathLike)) else ""
        if self._job is None or not isinstance(text, str) or not text or "://" in text or "::" in text:
            return None
        self.count += 1
        self._directories.add(os.path.dirname(os.path.abspath(text)))
        return Path(os.path.abspath(text))

    def _change(self, path: Path, is_new: bool) -> _Change:
        kind = "new" if is_new else "old"
        hidden = path.with_name(f".{path.name}.elasticstate-{self._job}-{kind}-{self.count}")
        self._pending.append(_Change(self.count, is_new, hidden))
        return self._pending[-1]


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


IN_MEMORY = "memory of the last commit"
"""Path that stands for the checkpoint in the state, in calls of Lightning and in its log lines."""


class ElasticEnvironment(ClusterEnvironment):
    """The present world, as Lightning asks for it. Each worker counts as a node with one device."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        self._refuse_process_group()

    @property
    def main_port(self) -> int:
        self._refuse_process_group()

    def _refuse_process_group(self) -> NoReturn:
        raise UsageError(
            "Lightning is about to create a process group, but elasticstate creates one for each world. Call fit() "
            "inside the function decorated with @elasticstate.run."
        )

    @staticmethod
    def detect() -> bool:
        return False  # the Trainer passes it

    def world_size(self) -> int:
        return elastic.size()

    def set_world_size(self, size: int) -> None:
        """Do nothing: the world has its size."""

    def global_rank(self) -> int:
        return elastic.rank()

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the world has its ranks."""

    def local_rank(self) -> int:
        """Return the place among the workers of the host. Lightning prepares data in the worker with 0."""
        return extension.local_place()

    def node_rank(self) -> int:
        return elastic.cross_rank()

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise UsageError if the Trainer was not built for the present world."""
        if num_devices * num_nodes != elastic.size():
            raise UsageError(
                f"The Trainer was built for {num_devices * num_nodes} workers, but this world has {elastic.size()}. "
                "Build a new Trainer in each world, inside the function decorated with @elasticstate.run."
            )


class DDPStrategy(strategies.DDPStrategy):
    """Lightning's DDPStrategy in the process group of the present world.

    ``Trainer`` makes one. Make one yourself to pass options to DDP::

        Trainer(state, strategy=DDPStrategy(state, find_unused_parameters=True))

    The loss of each batch is multiplied by the loader's ``weight`` before ``backward``, so the gradients are means over
    all samples, also where ranks have different numbers of samples.

    Args:
        state: the state that ``run`` passed to the function.
        options: see ``lightning.pytorch.strategies.DDPStrategy`` and torch's DistributedDataParallel.
    """

    batches: TrainingBatches | None = None
    """The training loader, as soon as Lightning has requested it."""

    def __init__(self, state: LightningState, **options: Any) -> None:
        # In the first world, rank 0 sends its parameters to all. Later, all ranks have the state.
        options.setdefault("init_sync", not state.resumes)
        super().__init__(cluster_environment=ElasticEnvironment(), **options)
        self.elastic_state = state
        self.files = CheckpointFiles(extension.job_id() if extension.is_job() else None)
        self._loaded_in: int | None = None  # epoch in which Lightning has requested the training loader
        self._taken: dict[str, Any] | None = None  # a checkpoint that take_checkpoint is about to return
        self._module_tensors: dict[str, Any] = {}
        self._is_resuming = False  # the checkpoint that Lightning loads is the one in memory

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        device = self.parallel_devices[0]
        return torch.device(device.type, elastic.local_rank()) if device.type == "cuda" else device

    def setup_environment(self) -> None:
        if not dist.is_initialized() or dist.get_world_size() != elastic.size():
            raise UsageError(
                "There is no process group of the present world. Build the Trainer and use it inside the function "
                "decorated with @elasticstate.run."
            )
        super().setup_environment()

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if hasattr(optimizer, "consolidate_state_dict"):
                raise UsageError(
                    f"{type(optimizer).__name__} divides its state among the ranks, and a commit must contain all of "
                    "it on each rank. Use the optimizer that it wraps."
                )

    def process_dataloader(self, dataloader: object) -> object:
        """Return the loader that Lightning is about to use. Raises UsageError if it would give wrong results."""
        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        if not trainer.training:
            if isinstance(dataloader, elastic.ElasticDataLoader):
                raise UsageError(
                    "ElasticDataLoader is for the training samples alone. Validate, test and predict with a plain "
                    "DataLoader."
                )
            return dataloader
        epoch, last = trainer.current_epoch, self._loaded_in
        if epoch == last:
            raise UsageError("There are two training loaders. Train with one ElasticDataLoader.")
        self._loaded_in = epoch
        self.batches = TrainingBatches(dataloader, trainer.end_tick)
        if last is None and self.elastic_state.resumes:  # before Lightning asks for the length
            self.batches.load_state_dict(self.elastic_state.checkpoint["elasticstate"]["batches"])
        else:
            self.batches.begin(epoch)
        return self.batches

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        weight = self.batches.weight if self.batches is not None else 1.0
        return super().backward(closure_loss if weight == 1 else closure_loss * weight, *args, **kwargs)

    def teardown(self) -> None:
        """Leave module and optimizers where they are, on a CPU. Lightning would move them there, through ``.data``.

        torch counts no writes through ``.data``, so after a failure the last tick could not become a commit.
        """
        if self.root_device.type != "cpu":
            super().teardown()
            return
        self.model = self.lightning_module  # without the DistributedDataParallel of this world
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            assert part is not None
            part.teardown()

    def take_checkpoint(self, trainer: Any) -> dict[str, Any]:
        """Return the Trainer's checkpoint, without the module's own tensors. No rank waits for another one."""
        trainer.save_checkpoint(IN_MEMORY, weights_only=False)
        checkpoint, self._taken, self._module_tensors = self._taken, None, {}
        assert checkpoint is not None
        return checkpoint

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._module_tensors = super().lightning_module_state_dict()
        return dict(self._module_tensors)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Rank 0 writes files. All ranks keep the checkpoint in memory."""
        if filepath != IN_MEMORY:
            self.files.write(filepath, self.is_global_zero)
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        # LightningState has the module. Tensors that a callback has put in their place, such as averages, stay here.
        own = self._module_tensors
        module = {name: tensor for name, tensor in checkpoint["state_dict"].items() if tensor is not own.get(name)}
        self._taken = {**checkpoint, "state_dict": module}

    def remove_checkpoint(self, filepath: Any) -> None:
        if not self.files.remove(filepath, self.is_global_zero):
            super().remove_checkpoint(filepath)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._is_resuming = checkpoint_path == IN_MEMORY
        if not self._is_resuming:
            return super().load_checkpoint(checkpoint_path, *args, **kwargs)
        kept = self.elastic_state.checkpoint
        return {**kept, "state_dict": {**self.lightning_module_state_dict(), **kept["state_dict"]}}

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        if not self._is_resuming:  # otherwise the restore has written into the module
            super().load_model_state_dict(checkpoint, strict=strict)

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        if self._taken is None:  # else Lightning waits for a file that rank 0 writes
            super().barrier(name, *args, **kwargs)
