"""The stores of torch.distributed, and ``rendezvous``, which makes one. Checked with torch 2.13.

The names are documented. torch does not list some of them in ``torch.distributed.__all__``, so type checkers take these
for private names.
"""

from __future__ import annotations

from torch.distributed import HashStore, TCPStore, rendezvous  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

__all__ = ["HashStore", "PrefixStore", "Store", "TCPStore", "rendezvous"]
