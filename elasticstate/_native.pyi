"""The compiled part (native/, C++20, nanobind): what needs to be atomic, or fast without the GIL."""

from collections.abc import Sequence
from enum import Enum
from typing import ClassVar, Protocol

class _Array(Protocol):
    """What exports one-dimensional, contiguous ``uint8`` memory of the CPU by DLPack or the buffer protocol."""

    def __dlpack__(self) -> object: ...

class Pieces:
    """Where the bytes of a flat buffer lie elsewhere in the memory of the CPU: made once, used for many commits.

    Piece ``i`` is ``sizes[i]`` contiguous bytes at ``addresses[i]``, and has its place at ``offsets[i]`` of the buffer.
    Address 0: these bytes are in the buffer already. Pieces may be empty.

    **Addresses are taken as they are**: the caller guarantees that the memory is there whenever the pieces are used.
    """

    def __init__(self, addresses: Sequence[int], sizes: Sequence[int], offsets: Sequence[int]) -> None:
        """Raises ValueError unless the three are equally long, and offsets ascend without overlap (the message names
        the piece).
        """

def gather(buffer: _Array, pieces: Pieces, begin: int, end: int, checksum: int = 0) -> int:
    """Copy the pieces into bytes [begin, end) of the buffer, in one pass with their checksum, without the GIL.

    What no piece covers stays as it is, and is in the checksum too. A piece that lies only partly in the range is
    copied in part. Large ranges are spread evenly over up to four threads, whatever the sizes of the pieces. All of it
    is written, for other processes too, when the call returns.

    Args:
        buffer: ``uint8[n]``, contiguous, on the CPU, writable.
        checksum: CRC-32C of the bytes before ``begin``.

    Returns:
        CRC-32C of the bytes before ``end``.

    Raises:
        ValueError: not 0 <= begin <= end <= n; nothing has been copied.
        TypeError: the buffer has another type, number of dimensions, device, or is not contiguous, or not writable.
    """

def fill(buffer: _Array, pieces: Pieces, begin: int, end: int) -> None:
    """``gather`` without a checksum: what no piece covers is neither read nor written."""

def scatter(buffer: _Array, pieces: Pieces, begin: int, end: int, checksum: int = 0) -> int:
    """The reverse of ``gather``: copy bytes [begin, end) of the buffer to the pieces' addresses, with their checksum.

    The bytes are at their addresses whatever the checksum turns out to be.
    """

def checksum(buffer: _Array, begin: int, end: int, checksum: int = 0) -> int:
    """CRC-32C (RFC 3720) of bytes [begin, end) of the buffer, after bytes with that ``checksum``. See ``gather``."""

def checksums(buffer: _Array, offsets: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """CRC-32C of ``sizes[i]`` bytes at ``offsets[i]`` of the buffer, for each i. Ranges may overlap.

    Raises ValueError when there are not as many sizes as offsets, or a range (the message says which) does not fit.
    """

class _Indices(Protocol):
    """What exports one-dimensional, contiguous ``int64`` memory of the CPU by DLPack or the buffer protocol."""

    def __dlpack__(self) -> object: ...

def permute(out: _Indices, n: int, seed: int, epoch: int, start: int, step: int) -> None:
    """Fill ``out`` with the indices at positions ``start``, ``start + step``, ... of a random order of range(n).

    The order is a function of n, seed and epoch. It takes no memory: a keyed bijection (native/permutation.hpp gives
    the sources). Without the GIL.

    Args:
        out: ``int64[count]``, contiguous, on the CPU, writable.
        n: at most 2**62.
        seed, epoch: 0 to 2**64 - 1.

    Raises:
        ValueError: a position is not below n.
        TypeError: a number is out of range, or ``out`` is something else.
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

class ControlPage:
    """One page of shared memory for each slot: written by the worker, read by its agent; outlives the worker.

    It holds the worker's two stamps, where it is, its hold word, and the seals of its two commit buffers.
    """

    def __init__(self, path: str | None) -> None:
        """Map the file at ``path`` (4096 bytes or more), shared; None: memory of this process alone.

        Raises OSError when it cannot be mapped, ValueError when it is shorter than a page.
        """

    def reset(self) -> None:
        """A new process begins: all is forgotten but the seals."""

    @property
    def word(self) -> HoldWord:
        """The hold word that lies on the page."""

    def enter(self, generation: int) -> None:
        """A generation begins: no ticks, no hold."""

    def set_place(self, place: int) -> None:
        """Where the worker is from now on (net.messages.Place)."""

    def set_lease(self, until_ns: int) -> None:
        """Ticks may be made until this instant of CLOCK_BOOTTIME, in nanoseconds; 0: no limit. For the agent."""

    def beat(self) -> None:
        """Add one to *alive*."""

    def progress(self) -> None:
        """Add one to *progress*."""

    def stamp(self) -> tuple[int, int, int, int, int]:
        """(alive, progress, place, generation, ticks), all of one moment.

        No ticks while the writer is stopped, or was killed, in the very middle of a change of generations.
        """

    def seal(
        self, index: int, owner: bytes, generation: int, tick: int, layout: int, length: int, checksum: int
    ) -> None:
        """Make buffer ``index`` (0 or 1) hold the commit (generation, tick) of ``owner`` (16 bytes).

        ``layout`` is a digest of the buffer's header; ``checksum`` the CRC-32C of its first ``length`` bytes, written
        before. The last seal stays whole until the new one is: whoever dies in between has lost nothing.
        """

    def unseal(self, index: int) -> None:
        """Buffer ``index`` holds no commit any more: call it before its bytes are changed."""

    def sealed(self, index: int, owner: bytes) -> tuple[int, int, int, int, int] | None:
        """(generation, tick, layout, length, checksum) of buffer ``index``; None: no whole seal, or not ``owner``'s."""

class GlooSockets:
    """The sockets of all Gloo groups of one generation, and how to cut them. From any thread, without the GIL."""

    def __init__(self) -> None: ...
    def watch_store(self, host: str, port: int) -> None:
        """From now on ``sever`` also cuts this process's connections to the store. A name is looked up here, once."""

    def begin_group(self, size: int) -> bool:
        """A group of ``size`` ranks is about to be made. False: cut already, so do not make it."""

    def end_group(self) -> None:
        """It has been made, or has failed to be."""

    def forget(self) -> None:
        """All groups have been taken down."""

    def sever(self) -> None:
        """Cut everything there is. Level, not edge: sockets may appear meanwhile, so call it again and again."""

    @staticmethod
    def busy() -> bool:
        """Whether any operation of any Gloo group of this process is under way, or being cleared away."""

    def broken(self) -> bool:
        """Whether a pair of one of the groups has lost its connection, or all were cut here."""

class TickEnd(Enum):
    """How a tick ended at which a worker stops."""

    ENDED = 1
    """The generation is over."""
    INTERRUPTED = 2
    """This is the tick that all leave at."""
    BEYOND = 3
    """It lies behind."""

class Sentinel:
    """Speaks with the agent for its worker, on a thread that never needs the GIL; see native/sentinel.hpp.

    The ``wait_...`` functions and ``tick`` block without the GIL, and run Python's signal handlers meanwhile, whose
    exceptions they raise. In a process that was forked all but the plain facts raises RuntimeError.
    """

    ORDERS: ClassVar[dict[str, int]]
    """The numbers of net.orders.OrderKind, as the thread knows them."""
    PLACES: ClassVar[dict[str, int]]
    """The numbers of net.messages.Place."""

    def __init__(self, page: ControlPage, fd: int) -> None:
        """Takes over ``fd``, a connected socket of SOCK_SEQPACKET. Raises OSError: out of descriptors."""

    def start(self) -> None:
        """The thread begins. Once."""

    def forked(self) -> None:
        """To be called in a process that this one has forked: nothing that happens there reaches agent or page."""

    @property
    def signal_fd(self) -> int:
        """For signal.set_wakeup_fd."""

    def notice(self, number: int) -> None:
        """A signal of this number, 1 to 31, becomes a notice to the agent. Told to leave, the worker sends itself one,
        whose handler has to end it."""

    @property
    def generation(self) -> int: ...
    @property
    def ticks(self) -> int: ...
    @property
    def place(self) -> int: ...
    @property
    def leaving(self) -> bool: ...
    @property
    def in_generation(self) -> bool: ...
    @property
    def cause(self) -> bytes:
        """The END message of the generation that ended last, with its head; b"": none has."""

    @property
    def paused_s(self) -> float:
        """Since the tick at which this worker was interrupted ended; 0: it was not."""

    def ended(self, generation: int) -> bool: ...
    def in_lease(self) -> bool:
        """Whether ticks may be made. If not, the present generation ends."""

    def send(self, message: bytes) -> None:
        """Send a message, or keep it until the agent reads. Raises OSError if it is longer than a socket takes."""

    def set_place(self, place: int) -> None: ...
    def enter(self, generation: int, sockets: GlooSockets) -> None:
        """A generation begins: ticks count from 0, and ``sockets`` are cut when it ends."""

    def left(self) -> None:
        """Nothing of the generation is left in this process: the cutting ends."""

    def end(self, generation: int, message: bytes) -> bool:
        """The generation is over, for the cause in ``message``, an END with its head. False: that was known."""

    def tick(self) -> TickEnd | None:
        """End a tick, and wait if the agent wants it. None: go on."""

    def wait_world(self, joined: int) -> bytes | None:
        """The message of a world newer than ``joined``, with its head; None: told to leave."""

    def wait_other(self) -> bytes:
        """The next message that only Python understands, with its head; oldest first."""

    def wait_verdict(self, generation: int) -> bool:
        """True if the suspect's exception is its own, False if the generation is over."""

    def wait_end(self, generation: int) -> bool:
        """True when the generation has ended and is not left yet, False when it is left. For a thread of Python's."""

    def wait_gate(self, generation: int) -> bool:
        """True when the gate opens, False if the generation ends before that."""
