"""The stores of torch.distributed, by their documented names. Checked with torch 2.13.

torch does not list two of them in ``torch.distributed.__all__``, so type checkers take these two for private names.
"""

from __future__ import annotations

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

__all__ = ["HashStore", "PrefixStore", "Store", "TCPStore"]
