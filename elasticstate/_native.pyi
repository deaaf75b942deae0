"""The compiled part (native/, C++20, nanobind): what needs to be atomic, or fast without the GIL."""

from collections.abc import Sequence
from typing import ClassVar, Protocol

class _Array(Protocol):
    """What exports one-dimensional, contiguous ``uint8`` memory of the CPU by DLPack or the buffer protocol."""

    def __dlpack__(self) -> object: ...

def gather(destination: _Array, sources: Sequence[_Array], offsets: Sequence[int]) -> None:
    """Copy the bytes of every source to its offset in the destination, without the GIL.

    Large copies are spread over up to four threads. Sources must not overlap in the destination, nor with it.

    Args:
        destination: ``uint8[n]``, contiguous, on the CPU; written in place.
        sources: ``uint8[m]`` each, contiguous, on the CPU; may be empty.
        offsets: where each source begins in the destination, in bytes.

    Raises:
        ValueError: a source does not fit at its offset (the message names its index; nothing has been copied then),
            or there are not as many offsets as sources.
        TypeError: an array has another type, number of dimensions, device, or is not contiguous. Nothing is converted.
    """

class HoldWord:
    """The ticks that a generation has completed, and the hold bit, in one atomic 64-bit word. Starts at 0.

    ``word & ~HOLD`` is the number of ticks, ``word & HOLD`` the hold. Whoever acts on the value that its own call
    returned cannot miss the other side: of the end of a tick and a hold, one comes first, and both know which.
    """

    HOLD: ClassVar[int]

    def __init__(self) -> None: ...
    def add_tick(self) -> int:
        """Count one tick; returns the word as it was before."""

    def hold(self) -> int:
        """Set the hold bit; returns the word as it was before."""

    def clear(self) -> None:
        """Take the hold bit away; the ticks stay."""

    def reset(self) -> None:
        """No ticks, no hold: a generation begins."""

    def load(self) -> int:
        """The word as it is."""
