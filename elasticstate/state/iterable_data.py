"""Check for iterable data sets that torchdata's StatefulDataLoader cannot resume correctly."""

from __future__ import annotations

import sys

from torch.utils.data import IterableDataset


def fault_of(loader: object) -> str:
    """Return the reason why a loader cannot be resumed twice in an epoch, and the remedy; "" for all other objects.

    Without a state of the data set, ``load_state_dict()`` calls ``next()`` once for each batch taken before, and each
    call counts as a further batch: torchdata 0.11, ``stateful_dataloader.py``, ``_num_yielded``, with and without
    worker processes. An iterator with its own state is not detected: asking for that state may read data.
    """
    torchdata = sys.modules.get("torchdata.stateful_dataloader")
    if torchdata is None or not isinstance(loader, torchdata.StatefulDataLoader):
        return ""
    dataset: object = loader.dataset
    has_state = all(callable(getattr(dataset, method, None)) for method in ("state_dict", "load_state_dict"))
    if has_state or not isinstance(dataset, IterableDataset):
        return ""
    return (
        f"{type(dataset).__name__} has no state_dict() and load_state_dict(). Unless its iterator has both, "
        f"StatefulDataLoader skips samples when it resumes for the second time in an epoch. Give the data set both: "
        f"see examples/stream.py."
    )
