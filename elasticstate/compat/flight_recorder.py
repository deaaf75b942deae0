"""The last collectives of this process, from torch's flight recorder. Checked with torch 2.13.

``torch._C._distributed_c10d._dump_fr_trace_json`` returns the records as JSON, also with Gloo. torch records if
``TORCH_FR_BUFFER_SIZE`` is set when the first group is created. There is no public function for them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from elasticstate.compat.absent_names import warn_absent

_MOST = 128  # records in one report


class RecordedCollective(NamedTuple):
    """One collective that this process has entered."""

    group: str  # name of the process group, equal on all ranks
    number: int  # in the group, from 1
    text: str  # operation, with type and sizes of its tensors


def last_collectives(since_ns: int) -> tuple[RecordedCollective, ...]:
    """Return the last collectives that this process has entered since ``since_ns`` (unix time), oldest first."""
    import torch  # here, so that the sentinel can be imported without torch

    c10d: Any = getattr(torch._C, "_distributed_c10d", None)
    dump: Callable[[], bytes] | None = getattr(c10d, "_dump_fr_trace_json", None)
    if dump is None:
        name = "torch._C._distributed_c10d._dump_fr_trace_json"
        warn_absent("torch", name, "the collective in which ranks hung is not reported")
        return ()
    entries = json.loads(dump()).get("entries", [])
    recent = (entry for entry in entries if entry["time_created_ns"] >= since_ns and not entry["is_p2p"])
    return tuple(map(_record, recent))[-_MOST:]


def _record(entry: dict[str, Any]) -> RecordedCollective:
    name, description = entry["process_group"]
    operation = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    inputs = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    tensors = ", ".join(f"{kind}{sizes}" for kind, sizes in inputs)
    group = description if description == "default_pg" else f"{description or 'group'} {name}"
    return RecordedCollective(group, entry["collective_seq_id"], f"{operation}({tensors})")
