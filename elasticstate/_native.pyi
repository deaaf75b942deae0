"""Native module (native/, C++20, nanobind): code that must be atomic, or fast without the GIL."""

from collections.abc import Sequence
from enum import Enum
from typing import Any, ClassVar, Protocol

import numpy as np

class _Array(Protocol):
    """Object that exports one-dimensional, contiguous ``uint8`` CPU memory by DLPack or the buffer protocol."""

    def __dlpack__(self) -> object: ...

class Identities:
    """The keys and values of some dicts and lists at one time, compared by identity. Keeps all of them alive."""

    def __init__(self, containers: Sequence[object]) -> None:
        """Raise TypeError for a container that is no dict and no list. ``containers``: a list."""

    def unchanged(self) -> bool:
        """Return True if each container has the same keys and values as at first, in the same order."""

def integers_of(objects: Sequence[object], attribute: object, in_object: int = 0) -> bytes:
    """Return the values of an integer attribute of all objects, as ``int64[n]`` in the machine's byte order.

    Args:
        objects: a list.
        attribute: the attribute's descriptor, taken from the type of the objects.
        in_object: offset of a pointer in each object, to what the attribute reads first; 0: not known.

    Raises:
        TypeError: ``attribute`` is no descriptor. Also the attribute's errors.
    """

def counters_of(objects: Sequence[object], in_object: int, in_content: int, in_counter: int) -> bytes:
    """Return a counter of each object as int64[n]; -1 for an object without one.

    Args:
        objects: a list; each has a pointer to its content at the offset ``in_object``; a null pointer is no content.
        in_content: offset of a pointer in the content, to the object with the counter; it may be a null pointer, too.
        in_counter: offset of the uint32.

    Raises:
        TypeError: an object has fewer bytes.
    """

def sample(objects: list[Any], address: object, bytes: object, seed: int, words: int) -> int:
    """Return a checksum of ``words`` times eight bytes of each object's memory. ``seed`` decides which bytes.

    Args:
        address: method or descriptor of the objects' type for the beginning of their memory, which must be readable.
        bytes: method or descriptor for its length.

    Raises:
        Exception: what the methods and descriptors raise.
    """

class Pieces:
    """Addresses in CPU memory of parts of a flat buffer. Made once, used for many commits.

    Piece ``i`` is ``sizes[i]`` contiguous bytes at ``addresses[i]``. Its place in the buffer is ``offsets[i]``. Address
    0: these bytes are in the buffer already. Pieces may be empty.

    **Addresses are not checked**: the caller guarantees that the memory exists whenever the pieces are used.
    """

    def __init__(self, addresses: Sequence[int], sizes: Sequence[int], offsets: Sequence[int]) -> None:
        """Raise ValueError unless the three have equal lengths, and offsets ascend without overlap.

        The message names the piece.
        """

    def __len__(self) -> int:
        """Return the number of pieces, empty ones included."""

def gather(buffer: _Array, pieces: Pieces, begin: int, end: int, checksum: int = 0) -> int:
    """Copy the pieces into bytes [begin, end) of the buffer, in one pass with their checksum, without the GIL.

    Bytes that no piece covers stay unchanged and are part of the checksum. A piece that lies only partly in the range
    is copied in part. Large ranges are divided evenly among up to four threads, whatever the sizes of the pieces. When
    the call returns, all bytes are written, for other processes too.

    Args:
        buffer: ``uint8[n]``, contiguous, on the CPU, writable.
        checksum: CRC-32C of the bytes before ``begin``.

    Returns:
        CRC-32C of the bytes before ``end``.

    Raises:
        ValueError: not 0 <= begin <= end <= n; nothing has been copied.
        TypeError: the buffer has another type, number of dimensions or device, or is not contiguous, or not writable.
    """

def gather_each(
    buffer: _Array, pieces: Pieces, begin: int, end: int, each: np.ndarray[Any, np.dtype[np.uint32]], checksum: int = 0
) -> int:
    """Do what ``gather`` does, and continue ``each[i]``, the CRC-32C of piece ``i``, by its bytes in the range.

    ``each`` is 0 for a piece that begins in the range. Also pieces with address 0 have checksums. Raises ValueError as
    ``gather`` does, and if ``each`` has fewer than ``len(pieces)`` items.
    """

def fill(buffer: _Array, pieces: Pieces, begin: int, end: int) -> None:
    """Copy like ``gather``, without a checksum. Bytes that no piece covers are neither read nor written."""

def scatter(buffer: _Array, pieces: Pieces, begin: int, end: int, checksum: int = 0) -> int:
    """Copy bytes [begin, end) of the buffer to the pieces' addresses, with their checksum: the reverse of ``gather``.

    The bytes are copied even if the checksum turns out to be wrong.
    """

def equal(buffer: _Array, pieces: Pieces) -> bool:
    """Return True if the bytes at all pieces' addresses are those of the buffer. Without the GIL; reads all once.

    Raises ValueError if a piece lies outside the buffer.
    """

def copy_runs(buffer: _Array, offsets: Sequence[int], sizes: Sequence[int], addresses: Sequence[int]) -> None:
    """Copy ``sizes[i]`` bytes at ``offsets[i]`` of the buffer to ``addresses[i]``, for each i, without the GIL.

    Many bytes are divided evenly among up to four threads, whatever the sizes. **Addresses are not checked.**

    Raises ValueError as ``checksums`` does; nothing has been copied.
    """

def checksum(buffer: _Array, begin: int, end: int, checksum: int = 0) -> int:
    """Return the CRC-32C (RFC 3720) of bytes [begin, end), continued from ``checksum``. Errors as in ``gather``."""

def copy(target: _Array, source: _Array, checksum: int = 0) -> int:
    """Copy all bytes past the caches, on this thread alone. Return their CRC-32C, continued from ``checksum``.

    Raises ValueError if the sizes differ.
    """

def checksums(buffer: _Array, offsets: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return the CRC-32C of ``sizes[i]`` bytes at ``offsets[i]`` of the buffer, for each i. Ranges may overlap.

    Raises ValueError when the numbers of sizes and offsets differ, or a range does not fit (the message names the
    range).
    """

class FileMap:
    """A whole file in memory, mapped shared with all its pages. No process may shorten it. Not thread-safe.

    The memory stays mapped while this object, or an array of it, exists.
    """

    def __init__(self, fd: int) -> None:
        """Map the file, without the GIL. Raises RuntimeError if the address space does not suffice."""

    def grow(self, fd: int) -> bool:
        """Map what the file has become longer. Memory that is in use does not move.

        Return False, and change nothing, if the reserved address space does not suffice.
        """

    def memory(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the file as ``uint8[n]``."""

class _Indices(Protocol):
    """Object that exports one-dimensional, contiguous ``int64`` CPU memory by DLPack or the buffer protocol."""

    def __dlpack__(self) -> object: ...

def permute(out: _Indices, n: int, seed: int, epoch: int, start: int, step: int) -> None:
    """Fill ``out`` with the indices at positions ``start``, ``start + step``, ... of a random order of range(n).

    The order is a function of n, seed and epoch. It needs no memory: a keyed bijection (native/permutation.hpp names
    the sources). Runs without the GIL.

    Args:
        out: ``int64[count]``, contiguous, on the CPU, writable.
        n: at most 2**62.
        seed, epoch: 0 to 2**64 - 1.

    Raises:
        ValueError: a position is not below n.
        TypeError: a number is out of range, or ``out`` is not such an array.
    """

class HoldWord:
    """Number of completed ticks of a generation and the hold bit, in one atomic 64-bit word. Starts at 0.

    ``word & ~HOLD`` is the number of ticks, ``word & HOLD`` the hold. Each call returns the value before the change. So
    of the end of a tick and a hold, one comes first, and both callers see which.
    """

    HOLD: ClassVar[int]

    def __init__(self) -> None: ...
    def add_tick(self) -> int:
        """Count one tick. Return the word before the change."""

    def hold(self) -> int:
        """Set the hold bit. Return the word before the change."""

    def clear(self) -> None:
        """Clear the hold bit, and keep the ticks."""

    def reset(self) -> None:
        """Clear ticks and hold, at the start of a generation."""

    def load(self) -> int:
        """Return the word."""

class ControlPage:
    """Shared memory page of one slot. The worker writes it, and its agent reads it. It outlives the worker.

    It contains the worker's two stamps and its place, the hold word, and the seals of its two commit buffers.
    """

    def __init__(self, fd: int | None) -> None:
        """Map an open file (4096 bytes or more), shared; None: private memory. ``fd`` may be closed afterwards.

        Raises OSError when the file cannot be mapped, ValueError when it is shorter than a page.
        """

    def reset(self) -> None:
        """Clear everything except the seals, for a new process."""

    @property
    def word(self) -> HoldWord:
        """The hold word on the page."""

    def enter(self, generation: int) -> None:
        """Begin a generation: no ticks, no hold."""

    def set_place(self, place: int) -> None:
        """Set the worker's place (net.messages.Place)."""

    def set_lease(self, until_ns: int) -> None:
        """Permit ticks until this instant of CLOCK_BOOTTIME, in nanoseconds; 0: no limit. The agent calls it."""

    def pin(self, index: int, until_ns: int) -> None:
        """Ask the worker not to overwrite a buffer before this instant of CLOCK_MONOTONIC, in nanoseconds; 0: it may.

        The agent calls it while it copies the buffer.
        """

    def pinned_until(self, index: int) -> int:
        """Return the instant of the last ``pin`` of a buffer."""

    def set_stale(self, stale: bool) -> None:
        """Mark the page as stale: the files of the slot have lost their names. The agent calls it."""

    @property
    def is_stale(self) -> bool:
        """True if the files of the slot have lost their names. The worker must request new files from its agent."""

    def add_commit_s(self, seconds: float) -> None:
        """Add to the time that the ticks of this generation spent in commits."""

    @property
    def commit_s(self) -> float:
        """Seconds that the ticks of this generation spent in commits."""

    def begin_training(self, now_ns: int) -> None:
        """Record that training in this generation begins at this instant of CLOCK_MONOTONIC, in nanoseconds."""

    @property
    def trains_since(self) -> int:
        """Instant of ``begin_training`` in this generation; 0: training has not begun."""

    def heartbeat(self) -> None:
        """Add 1 to the *heartbeat* stamp."""

    def progress(self) -> None:
        """Add 1 to the *progress* stamp."""

    def stamp(self) -> tuple[int, int, int, int, int]:
        """Return (heartbeat, progress, place, generation, ticks), all read at one moment.

        Ticks are 0 while the writer is stopped, or was killed, in the middle of a change of generations.
        """

    def add_point(self, generation: int, tick: int, own_us: int) -> None:
        """Add a point: the worker's own time from the begin of the generation to the end of a tick, in microseconds."""

    def points(self, since: int) -> tuple[list[tuple[int, int, int]], int]:
        """Return the points from number ``since`` on that still are on the page, and the number of the next point.

        A point is (generation, tick, own time in microseconds).
        """

    def ask(self, first: int, second: int, third: int) -> None:
        """Ask the worker a question, in three numbers (state/divergence.py). The agent calls it."""

    def question(self, last: int) -> tuple[int, int, int, int] | None:
        """Return number and content of the newest question; None: ``last`` is its number, or there is none."""

    def judge(self, generation: int, equal: int, compared: int) -> None:
        """Write the driver's verdict on the commits of a generation: see core/types.CommitsCompared. The agent calls
        it."""

    def verdict(self, last: int) -> tuple[int, int, int, int] | None:
        """Return number and content of the newest verdict; None: ``last`` is its number, or there is none."""

    def set_alone(self, alone: bool) -> None:
        """Mark the agent as one without a driver, so that no verdict comes. The agent calls it."""

    @property
    def is_alone(self) -> bool:
        """True if the agent has no driver."""

    def seal(
        self,
        index: int,
        owner: bytes,
        generation: int,
        tick: int,
        layout: int,
        length: int,
        checksum: int,
        tag: bytes = ...,
    ) -> None:
        """Seal buffer ``index`` (0 or 1) as the commit (generation, tick) of ``owner`` (16 bytes).

        ``layout`` is a digest of the buffer's header. ``checksum`` is the CRC-32C of its first ``length`` bytes, which
        are written before. ``tag`` (16 bytes) authenticates the commit for its job. The old seal stays valid until the
        new one is complete, so a death in between loses nothing.
        """

    def unseal(self, index: int) -> None:
        """Remove the seal of buffer ``index``. Call it before its bytes change."""

    def sealed(self, index: int, owner: bytes) -> tuple[int, int, int, int, int, bytes] | None:
        """Return (generation, tick, layout, length, checksum, tag) of a buffer; None: no valid seal of ``owner``."""

class GlooSockets:
    """Sockets of all Gloo groups of one generation, and functions to cut them. Thread-safe, without the GIL."""

    def __init__(self) -> None: ...
    def watch_store(self, host: str, port: int) -> None:
        """Make ``sever`` also cut this process's connections to the store. A host name is resolved here, once."""

    def begin_group(self, size: int) -> bool:
        """Announce the creation of a group of ``size`` ranks. False: the sockets are cut, so do not create it."""

    def end_group(self) -> None:
        """Announce that the group has been created, or that its creation failed."""

    def forget(self) -> None:
        """Announce that all groups have been destroyed."""

    def sever(self) -> None:
        """Cut all sockets. New sockets may appear during the call, so call it repeatedly."""

    @staticmethod
    def busy() -> bool:
        """Return True if an operation of any Gloo group of this process is running or being cleaned up."""

    def broken(self) -> bool:
        """Return True if a pair in one of the groups has lost its connection, or this process has cut all of them."""

    def failed(self) -> bool:
        """Return True if an operation of Gloo has failed in this process since this object exists, even if its error
        was caught. Without ``count_failed_collectives``: if this process has cut all sockets. It costs next to nothing.
        """

    def failures(self) -> int:
        """Return how many operations of Gloo have failed since this object exists; 0 without
        ``count_failed_collectives``."""

    def lost(self) -> bool:
        """Return True if a pair of the first group has lost its connection. Cheaper than ``broken``."""

def measure_waits() -> bool:
    """Measure for how long the thread that ends the ticks waits in collectives of Gloo, from now on.

    The sentinel then writes points to the control page. False: this build of torch does not permit it. See
    native/wait_clock.hpp.
    """

def count_failed_collectives() -> bool:
    """Count the operations of Gloo that fail in this process, from now on. False: this build of torch does not permit
    it. See native/failed_collectives.hpp.
    """

def show_numeric_hosts() -> bool:
    """Let torch show the ends of its connections as addresses, without asking the resolver for names. False: this build
    of torch does not permit it. See native/numeric_hosts.hpp.
    """

def waited_ns() -> int:
    """Return the nanoseconds for which that thread has waited so far; 0 without ``measure_waits``."""

class TickEnd(Enum):
    """Reason why a worker stops at the end of a tick."""

    ENDED = 1
    """The generation is over."""
    INTERRUPTED = 2
    """All members leave at this tick."""
    BEYOND = 3
    """The tick is after the one at which all members leave."""

class ReportReason(Enum):
    """Reason for which a thread that reports on a generation wakes up."""

    LEFT = 0
    """The generation is left."""
    ENDED = 1
    """The generation has ended, and is not left yet."""
    ASKED = 2
    """The agent asks where the main thread is."""

class Sentinel:
    """Link of the worker to its agent, on a thread that never needs the GIL. See native/sentinel.hpp.

    The ``wait_...`` functions and ``tick`` block without the GIL. Python's signal handlers run during the wait, and
    their exceptions are raised. In a forked process, every method except the plain properties raises RuntimeError.
    """

    MESSAGE_KINDS: ClassVar[dict[str, int]]
    """Numbers of net.messages.MessageKind in the thread."""
    PLACES: ClassVar[dict[str, int]]
    """Numbers of net.messages.Place in the thread."""

    def __init__(self, page: ControlPage, fd: int) -> None:
        """Take over ``fd``, a connected SOCK_SEQPACKET socket. Raises OSError if no descriptors are available."""

    def start(self) -> None:
        """Start the thread. Call it once."""

    def forked(self) -> None:
        """Detach a forked process, so that nothing it does reaches the agent or the page. Call it in that process."""

    @property
    def signal_fd(self) -> int:
        """Descriptor for signal.set_wakeup_fd."""

    def notice(self, number: int) -> None:
        """Send a preemption notice to the agent for each signal with this number, 1 to 31.

        On the LEAVE message, the worker sends one of these signals to itself, until the handler calls ``leave_heard``.
        """

    def forget(self, number: int) -> None:
        """Make this signal no preemption notice any more, because the script handles it."""

    def handles_stop(self, handles: bool) -> None:
        """Set if the script handles SIGTERM. Then TERMINATE raises that signal, and the world stays as it is."""

    @property
    def generation(self) -> int: ...
    @property
    def ticks(self) -> int: ...
    @property
    def place(self) -> int: ...
    @property
    def leaving(self) -> bool: ...
    def leave_heard(self) -> None:
        """Say that the main thread ends the process because of LEAVE."""

    @property
    def in_generation(self) -> bool: ...
    @property
    def since_tick_s(self) -> float:
        """Time since the last tick was counted, in seconds; it has no meaning without one. For the training thread."""

    @property
    def cause(self) -> bytes:
        """END message of the generation that ended last, with its head; b"": none has ended."""

    def ended(self, generation: int) -> bool: ...
    def in_lease(self) -> bool:
        """Return True if ticks are permitted. If not, the present generation ends."""

    def send(self, message: bytes) -> None:
        """Send a message, or keep it until the agent reads. Raises OSError if it is too long for the socket."""

    def set_place(self, place: int) -> None: ...
    def begin_training(self, sync_s: float) -> None:
        """Begin to train, ``sync_s`` seconds after the process groups of the generation existed."""

    def enter(self, generation: int, sockets: GlooSockets) -> None:
        """Begin a generation: ticks count from 0, and ``sockets`` are cut when it ends."""

    def left(self) -> None:
        """Stop the cutting: nothing of the generation remains in this process."""

    def end(self, generation: int, message: bytes) -> bool:
        """End the generation, with the cause in ``message``, an END with its head. False: it had ended already."""

    def tick(self) -> TickEnd | None:
        """End a tick, and wait if the agent requests a hold. None: continue."""

    def wait_world(self, joined: int) -> bytes | None:
        """Return the message of a world newer than ``joined``, with its head; None: the agent sent LEAVE."""

    def wait_other(self) -> bytes:
        """Return the oldest message that the thread does not handle itself, with its head."""

    def wait_verdict(self, generation: int) -> bool:
        """Return True if the exception is the worker's own error, False if the generation is over."""

    def wait_end(self, generation: int) -> bool:
        """Return True once the generation has ended, False once it has been left. For a Python thread."""

    def wait_order(self, generation: int) -> bool:
        """Return True when the agent's END of a generation is there that has ended here before; False if none comes."""

    def wait_report(self, generation: int) -> ReportReason:
        """Wait until there is something to report about the generation. For one Python thread."""

    def wait_gate(self, generation: int) -> bool:
        """Return True when the gate opens, False if the generation ends before that."""

def exit_after_finalization(status: int) -> None:
    """End the process with ``_exit(status)`` when the interpreter has finalized everything of Python.

    Exit functions and static destructors of C and C++ are not called. Buffers of C's stdio are written.

    Raises:
        RuntimeError: the interpreter accepts no more functions to call at its end.
    """

def exit_at_latest(status: int, seconds: float, line: str) -> None:
    """After this time write the line to stderr and call ``_exit(status)``, whatever the threads wait for."""
