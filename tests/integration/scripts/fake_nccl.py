"""A fake of torch's NCCL backends, for machines without a GPU: tensors are on the CPU, and travel over sockets.

``install()`` registers it by torch's own ``Backend.register_backend``, and lets torch find CUDA devices, so that the
real NcclBackend and NcclContext run on it. Call it before the first world, or start any script with it::

    python fake_nccl.py train.py --steps 100

A world has what it has with NCCL: a Gloo part for elasticstate, and a part for tensors, whose collectives hang when a
member is lost, until that part is aborted. Nothing but ``abort`` ends them: neither a cut of Gloo's sockets nor of the
store. All collectives of the default group and of ``new_group`` use that part.

The variable FAKE_NCCL has the settings as a JSON object: see :class:`Settings`. The fake writes what it does to the
file ``fake-<slot>-<incarnation>-<pid>.jsonl`` in the directory ``notes``, if that is set.
"""

from __future__ import annotations

import functools
import importlib
import json
import operator
import os
import pickle
import runpy
import signal
import socket
import struct
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.distributed import distributed_c10d

VARIABLE = "FAKE_NCCL"
_LONGEST_HANG_S = 300.0  # so that no test hangs for ever
_LOOK_INTERVAL_S = 0.001
_TRANSIT_S = 0.2
_Op: Any = dist.ReduceOp.RedOpType
_REDUCTIONS: dict[Any, Callable[[Any, Any], Any]] = {
    _Op.SUM: operator.add,
    _Op.AVG: operator.add,
    _Op.PRODUCT: operator.mul,
    _Op.MIN: torch.minimum,
    _Op.MAX: torch.maximum,
    _Op.BAND: operator.and_,
    _Op.BOR: operator.or_,
    _Op.BXOR: operator.xor,
}


@dataclass(slots=True)
class Settings:
    """Settings of the fake: what torch has, and how it behaves."""

    names: list[str] = field(default_factory=lambda: ["nccl-legacy"])
    """Backends that this torch has: nccl (as in torch up to 2.13), nccl-legacy, nccl2."""
    nccl_is: str = "nccl"
    """Name of the part that the backend nccl makes: nccl2 in torch 2.15."""
    version: tuple[int, ...] = (2, 27, 7)
    devices: int = 8
    abort_s: float = 0.0
    """Seconds that an abort goes on after it has freed the collectives."""
    abort_raises: str = ""
    shutdown_s: float = 0.0
    """Seconds that a shutdown takes."""
    shutdown_raises: str = ""
    """Error of a shutdown, in which nccl2 refuses to go on; "": none."""
    has_errors: bool = True
    """Parts have ``get_error``, as since torch 2.7."""
    raises_when_aborted: bool = False
    """A collective that is aborted raises. Otherwise it leaves garbage, as the kernels of NCCL do."""
    slow_slot: int = -1
    """Messages to this slot arrive late, and never if their sender aborts meanwhile."""
    splits: bool = False
    """Groups are split from the default group, as with NCCL if that is bound to a device: ``new_group`` waits for all
    ranks of the world, and ``split_group`` and meshes work."""
    faults: list[dict[str, Any]] = field(default_factory=list)
    """Each once in the job: ``{"what": "stall" | "error", "slot": 1, "at": 40}``, at the 40th collective of the slot's
    process. stall: nothing that this process sends arrives any more. error: an asynchronous error of the link.
    ``{"what": "start", "slot": 1, "at": 2}``: the process dies when it is to make its second group. Those of the others
    wait for it for ever, as ncclCommInitRank does. late: it lives, and never comes. split: it dies when it is to take
    part in a split."""
    notes: str = ""
    constants: dict[str, float] = field(default_factory=dict)
    """Named constants of elasticstate with other values, so that a test is quicker: ``{"module:NAME": 1.0}``."""


settings = Settings()
_parts: weakref.WeakSet[Part] = weakref.WeakSet()
_thread = threading.local()  # with the CUDA device of each thread
_notes_lock = threading.Lock()
_counts: defaultdict[tuple[str, ...], int] = defaultdict(int)
_is_stalled = False


def install(**given: Any) -> None:
    """Register the backends and devices. ``given``: settings, instead of those of the variable FAKE_NCCL."""
    for name, value in (given or json.loads(os.environ.get(VARIABLE) or "{}")).items():
        setattr(settings, name, value)
    for place, value in settings.constants.items():
        module, _, name = place.partition(":")
        assert hasattr(importlib.import_module(module), name)
        setattr(sys.modules[module], name, value)
    _register()
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: settings.devices
    cuda.set_device = _set_device
    cuda.current_device = current_device
    cuda.synchronize = _synchronize
    cuda.get_device_name = lambda device=None: "fake"
    cuda.nccl.version = lambda: tuple(settings.version)
    setattr(torch.Tensor, "cuda", lambda tensor, device=None, **more: tensor)  # noqa: B010 - mypy knows it as a method
    setattr(dist, "is_nccl_available", lambda: True)  # noqa: B010
    init = dist.init_process_group  # checks the device against those for which torch was compiled

    def init_process_group(*args: Any, device_id: Any = None, **more: Any) -> None:
        init(*args, **more)
        if settings.splits:
            dist.group.WORLD.bound_device_id = device_id  # type: ignore[union-attr]

    setattr(dist, "init_process_group", init_process_group)  # noqa: B010
    if settings.splits:
        accelerator: Any = torch.accelerator
        accelerator.is_available = lambda: True
        accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
        split: Any = dist.ProcessGroup.split_group
        setattr(  # noqa: B010
            dist.ProcessGroup,
            "split_group",
            lambda group, *args, **more: (group.split if isinstance(group, Group) else functools.partial(split, group))(
                *args, **more
            ),
        )


def _register() -> None:
    for name in settings.names:
        part = {"nccl": settings.nccl_is, "nccl-legacy": "nccl"}.get(name, name)
        if name == "nccl" and not hasattr(distributed_c10d, "_register_builtin_nccl_backend"):
            # This torch has a branch of its own for that name, before the registered backends.
            distributed_c10d._NCCL_AVAILABLE = True
            setattr(distributed_c10d, "ProcessGroupNCCL", _legacy_class(part))  # noqa: B010
        else:
            dist.Backend.register_backend(
                name,
                lambda options, _, part=part: Group(
                    options.store, options.group_rank, options.group_size, options.timeout, part
                ),
                extended_api=True,
                devices=["cuda"],
            )


def _legacy_class(part: str) -> Any:
    class ProcessGroupNCCL(Group):
        class Options:
            _timeout = timedelta(seconds=600)

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            super().__init__(store, rank, size, options._timeout, part)

        def _set_sequence_number_for_group(self) -> None: ...

    return ProcessGroupNCCL


# --------------------------------------------------------------------------------------------------------- the devices


def _set_device(device: Any) -> None:
    _thread.device = device if isinstance(device, int) else torch.device(device).index


def current_device() -> int:
    """Return the device of this thread, which begins on device 0, as with CUDA."""
    return getattr(_thread, "device", 0)


def _synchronize(device: Any = None) -> None:
    """Wait until no collective of this process is on its way."""
    note("synchronize")
    for part in list(_parts):
        for work in list(part.pending):
            work.complete()


class Graph:
    """A CUDA graph that has captured an operation of each group. An abort goes on until it is gone, as with NCCL."""

    def __init__(self) -> None:
        self.itself: Graph | None = None  # for those in a cycle
        for part in list(_parts):
            part.graphs.add(self)


def note(what: str, **more: Any) -> None:
    if not settings.notes:
        return
    slot = os.environ.get("ELASTICSTATE_WORKER", "none").replace(":", "-")
    line = {"what": what, "pid": os.getpid(), "time": time.time(), "device": current_device()}
    line |= {"thread": threading.current_thread().name, **more}
    with _notes_lock, open(Path(settings.notes) / f"fake-{slot}-{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def notes(directory: Path | str, what: str | None = None) -> list[dict[str, Any]]:
    """Return what the fakes of all processes have noted, ordered by time."""
    paths = Path(directory).glob("fake-*.jsonl")
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return sorted((line for line in lines if what in (None, line["what"])), key=lambda line: float(line["time"]))


# ------------------------------------------------------------------------------------------------------------ faults


def stall() -> None:
    """Let nothing arrive that this process sends from now on. Its members hang, and all processes live."""
    global _is_stalled
    _is_stalled = True
    note("stall")


def go_on() -> None:
    """End the stall, so that the next world works."""
    global _is_stalled
    _is_stalled = False


def lose_link() -> None:
    """Set an asynchronous error, as NCCL does after a network error."""
    for part in list(_parts):
        part.error = ErrorType.COMM_ERROR
    note("error")


def _strike(*what: str) -> None:
    """Count an event of a kind. Let the faults strike that are due at this one."""
    _counts[what] += 1
    for number, fault in enumerate(settings.faults):
        is_due = fault["what"] in what and str(fault["slot"]) == _slot() and fault["at"] == _counts[what]
        if is_due and _is_first(f"fired-{number}"):
            {"stall": stall, "error": lose_link, "start": die, "split": die, "late": never_come}[fault["what"]]()


def _slot() -> str:
    return os.environ.get("ELASTICSTATE_WORKER", "::").split(":")[1]


def never_come() -> None:
    note("late")
    time.sleep(_LONGEST_HANG_S)


def die() -> None:
    note("die")
    os.kill(os.getpid(), signal.SIGKILL)


def _is_first(name: str) -> bool:
    try:
        os.close(os.open(Path(settings.notes) / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


# ---------------------------------------------------------------------------------------------------------- transport


class Mesh:
    """Sockets between all pairs of a group."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size = rank, size
        self._arrived: dict[Any, Any] = {}
        self._changed = threading.Condition()
        self.is_aborted = False
        self._sockets: dict[int, socket.socket] = {}
        with socket.create_server(("127.0.0.1", 0), backlog=size) as listener:
            listener.settimeout(timeout.total_seconds())
            store.set(f"fake/{rank}", str(listener.getsockname()[1]))
            for peer in range(rank):
                link = socket.create_connection(("127.0.0.1", int(store.get(f"fake/{peer}"))), timeout.total_seconds())
                link.sendall(struct.pack("!I", rank))
                self._sockets[peer] = link
            for _ in range(rank + 1, size):
                link, _address = listener.accept()
                self._sockets[struct.unpack("!I", _read(link, 4))[0]] = link
        for peer, link in self._sockets.items():
            link.settimeout(None)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._receive, args=(peer, link), name="fake nccl", daemon=True).start()

    def _receive(self, peer: int, link: socket.socket) -> None:
        with suppress(OSError, EOFError), link:
            while True:
                key, content = pickle.loads(_read(link, struct.unpack("!Q", _read(link, 8))[0]))
                if _slot() == str(settings.slow_slot):
                    time.sleep(_TRANSIT_S)
                    with suppress(BlockingIOError):
                        if not link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                            return
                with self._changed:
                    self._arrived[peer, key] = content
                    self._changed.notify_all()

    def send(self, peer: int, key: Any, content: Any) -> None:
        data = pickle.dumps((key, content))
        if not _is_stalled:
            with suppress(OSError):  # the peer is gone: those who wait for it hang, as kernels do
                self._sockets[peer].sendall(struct.pack("!Q", len(data)) + data)

    def take(self, peer: int, key: Any) -> Any:
        """Wait for the content from a peer. Raises InterruptedError after an abort."""
        with self._changed:
            arrived = self._changed.wait_for(lambda: self.is_aborted or (peer, key) in self._arrived, _LONGEST_HANG_S)
            assert arrived, "nobody has aborted a collective that hangs"
            if (peer, key) not in self._arrived:
                raise InterruptedError
            return self._arrived.pop((peer, key))

    def abort(self) -> None:
        with self._changed:
            self.is_aborted = True
            self._changed.notify_all()
        for link in self._sockets.values():
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)


def _complete_mesh(store: Any, rank: int, size: int, timeout: timedelta) -> Mesh:
    """Return a mesh. Hang if a member does not come, as ncclCommInitRank does: nothing cuts it."""
    note("start begins")
    try:
        store.set(f"fake/begun/{rank}", "")
        store.wait([f"fake/begun/{peer}" for peer in range(size)], timeout)
        _strike("start", "late")  # all members wait for each other now
        return Mesh(store, rank, size, timeout)
    except (OSError, RuntimeError):
        time.sleep(_LONGEST_HANG_S)
        raise


def _read(link: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        if not (more := link.recv(min(1 << 20, size - len(data)))):
            raise EOFError
        data += more
    return bytes(data)


# ------------------------------------------------------------------------------------------------ parts and operations


class Part:
    """The part of a group for CUDA tensors, as ``group._get_backend`` returns it."""

    options: Any = None

    def __init__(self, name: str, mesh: Mesh, timeout: timedelta) -> None:
        self._name = name
        self.mesh = mesh
        self.timeout = timeout
        self.error = ErrorType.SUCCESS
        self.pending: dict[Work, None] = {}  # in the order of their start
        self.graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.is_aborted = self.is_aborting = self.is_shut_down = False
        self.supports_splitting = settings.splits
        self._splits = 0
        _parts.add(self)
        if settings.has_errors:
            self.get_error = self._get_error

    def name(self) -> str:
        return self._name

    def set_timeout(self, timeout: timedelta) -> None:
        note("set_timeout", part=id(self), seconds=timeout.total_seconds())
        self.timeout = timeout

    _set_default_timeout = set_timeout

    def _get_error(self) -> ErrorType:
        """Return the error of this part. Like torch's watchdog, it finds operations that take too long."""
        now = time.monotonic()
        if self.error is ErrorType.SUCCESS and any(now > work.deadline for work in list(self.pending)):
            self.error = ErrorType.TIMEOUT
        return self.error

    def abort(self) -> None:
        """Free all collectives, then wait for what else the settings say."""
        assert not self.is_aborting, "a communicator is aborted twice"
        self.is_aborting = True
        note("abort begins", part=id(self), timeout=self.timeout.total_seconds())
        go_on()
        if settings.abort_raises:
            raise RuntimeError(settings.abort_raises)
        self.mesh.abort()
        deadline = time.monotonic() + settings.abort_s
        while time.monotonic() < deadline or self.graphs:
            time.sleep(_LOOK_INTERVAL_S)
        self.is_aborted = True
        note("abort ends", part=id(self))

    def split(self) -> None:
        """Meet all ranks of this part. As with NCCL, nothing ends that."""
        _strike("split")
        self._splits += 1
        for peer in range(self.mesh.size):
            if peer != self.mesh.rank:
                self.mesh.send(peer, ("split", self._splits), None)
        for peer in range(self.mesh.size):
            if peer != self.mesh.rank:
                self.mesh.take(peer, ("split", self._splits))

    def perform_nocolor_split(self, device: torch.device) -> None:
        self.split()

    def eager_connect_single_device(self, device: torch.device) -> None: ...

    def _set_sequence_number_for_group(self) -> None: ...

    def shutdown(self) -> None:
        note("shutdown", part=id(self), aborting=self.is_aborting, aborted=self.is_aborted)
        time.sleep(settings.shutdown_s)
        if settings.shutdown_raises:
            raise RuntimeError(settings.shutdown_raises)
        self.is_shut_down = True
        self.mesh.abort()

    def refused(self) -> Exception | None:
        """Return the error of a collective after an abort."""
        if not self.mesh.is_aborted:
            return None
        if self._name == "nccl":
            return dist.DistBackendError("NCCL communicator was aborted on rank 0.")
        return RuntimeError("NCCL communicator was aborted after a previous error")


class Work(dist.Work):
    """An operation. It ends when someone waits for it, or for the device."""

    def __init__(self, part: Part, finish: Callable[[], None], results: Any) -> None:
        super().__init__()
        self._part = part
        self._finish = finish
        self._results = results
        self._lock = threading.Lock()
        self._is_done = False
        self._error: Exception | None = None
        self.deadline = time.monotonic() + part.timeout.total_seconds()
        part.pending[self] = None

    def complete(self) -> None:
        with self._lock, torch.no_grad():
            if self._is_done:
                return
            try:
                self._finish()
            except InterruptedError:
                self._error = self._part.refused() if settings.raises_when_aborted else None
                for tensor in _tensors(self._results):
                    tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
            self._is_done = True
            self._part.pending.pop(self, None)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.complete()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._is_done

    def is_success(self) -> bool:
        return self._is_done and self._error is None

    def exception(self) -> Any:
        return self._error

    def result(self) -> Any:
        return self._results

    def get_future(self) -> Any:
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._results)
        return future

    def source_rank(self) -> int:
        return -1


def _tensors(results: Any) -> list[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        return [results]
    return [tensor for result in results for tensor in _tensors(result)]


Rows = list[list[torch.Tensor]]  # the tensors that each rank has sent


class Group(dist.ProcessGroup):
    """A group with a Gloo part and a fake part. All collectives of torch use the latter."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, name: str, cpu: Any = None, group_name: str = ""
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        if cpu is None:
            # torch puts a group that is a Python object in the place of the one that has the Gloo part already.
            frame: Any = sys._getframe()
            while "backend_config" not in frame.f_locals:
                frame = frame.f_back
            cpu = frame.f_locals["pg"]._get_backend(torch.device("cpu"))
            if settings.splits and isinstance(parent := dist.group.WORLD, Group):
                parent.part.split()
        self._cpu = cpu
        self._store = store
        self.part = Part(name, _complete_mesh(store, rank, size, timeout), timeout)
        self._group_name = group_name
        self._started = 0
        self._between: defaultdict[Any, int] = defaultdict(int)
        note("group", part=id(self.part), name=name, size=size)

    def split(
        self,
        ranks: list[int],
        timeout: Any = None,
        opts: Any = None,
        group_name: str = "",
        group_desc: Any = None,
        device_types: Any = None,
    ) -> Group | None:
        """Return a group of these ranks, which all ranks of this one make."""
        self.part.split()
        if self.rank() not in ranks:
            return None
        store, rank = distributed_c10d.PrefixStore(group_name, self._store), ranks.index(self.rank())
        cpu = dist.ProcessGroupGloo(distributed_c10d.PrefixStore("cpu", store), rank, len(ranks), timeout)
        return Group(store, rank, len(ranks), timeout, self.part.name(), cpu, group_name)

    # ----------------------------------------------------------------------------------------- methods that torch calls

    def get_group_store(self) -> Any:
        return self._store

    def getBackendName(self) -> str:
        return "custom"

    def _get_backend(self, device: torch.device) -> Any:  # type: ignore[override]
        return self.part if torch.device(device).type == "cuda" else self._cpu

    @property
    def _device_types(self) -> list[torch.device]:  # type: ignore[override]
        return [torch.device("cpu"), torch.device("cuda")]

    def _set_group_name(self, name: str) -> None:  # type: ignore[override]
        self._group_name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._group_name

    def set_timeout(self, timeout: timedelta) -> None:  # type: ignore[override]
        self.part.set_timeout(timeout)

    def shutdown(self) -> None:
        self.part.shutdown()

    def abort(self) -> None:
        self.part.abort()

    # ----------------------------------------------------------------------------------------------------- collectives

    def _all(self, sent: Sequence[torch.Tensor], finish: Callable[[Rows], None], results: Any) -> Work:
        """Start a collective: send tensors to all ranks, and call ``finish`` with what all have sent."""
        if (error := self.part.refused()) is not None:
            raise error
        _strike("stall", "error")
        self._started += 1
        key, mesh, own = self._started, self.part.mesh, [tensor.detach().clone() for tensor in sent]
        for peer in range(self.size()):
            if peer != self.rank():
                mesh.send(peer, key, own)

        def receive() -> None:
            finish([own if peer == self.rank() else mesh.take(peer, key) for peer in range(self.size())])

        return Work(self.part, receive, results)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        def finish(rows: Rows) -> None:
            for number, tensor in enumerate(tensors):
                tensor.copy_(_reduced([row[number] for row in rows], opts))

        return self._all(tensors, finish, tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        def finish(rows: Rows) -> None:
            if opts.rootRank == self.rank():
                tensors[0].copy_(_reduced([row[0] for row in rows], opts))

        return self._all(tensors, finish, tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        root = 0 if opts is None else opts.rootRank

        def finish(rows: Rows) -> None:
            tensors[0].copy_(rows[root][0])

        return self._all(tensors, finish, tensors)

    def barrier(self, opts: Any = None) -> Work:
        work = self._all([], lambda rows: None, [])
        work.wait()
        return work

    def allgather(self, outputs: Rows, inputs: list[torch.Tensor], opts: Any = None) -> Work:
        def finish(rows: Rows) -> None:
            for number, places in enumerate(outputs):
                for place, row in zip(places, rows, strict=True):
                    place.copy_(row[number])

        return self._all(inputs, finish, outputs)

    def allgather_coalesced(self, outputs: Rows, inputs: list[torch.Tensor], opts: Any = None) -> Work:
        return self.allgather([[of[i] for of in outputs] for i in range(len(inputs))], inputs)

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        def finish(rows: Rows) -> None:
            for number, output in enumerate(outputs):
                output.view(-1).copy_(torch.cat([row[number].reshape(-1) for row in rows]))

        return self._all(inputs, finish, outputs)

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self.allgather_into_tensor_coalesced([output], [input])

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: Rows, opts: Any = None) -> Work:
        return self.reduce_scatter_tensor_coalesced(outputs, [torch.stack(parts) for parts in inputs], opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        def finish(rows: Rows) -> None:
            for number, output in enumerate(outputs):
                whole = _reduced([row[number] for row in rows], opts)
                output.copy_(whole.reshape(self.size(), -1)[self.rank()].view(output.shape))

        return self._all(inputs, finish, outputs)

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    def gather(self, outputs: Rows, inputs: list[torch.Tensor], opts: Any) -> Work:
        def finish(rows: Rows) -> None:
            for place, row in zip(outputs[0] if outputs else (), rows, strict=False):
                place.copy_(row[0])

        return self._all(inputs, finish, outputs)

    def scatter(self, outputs: list[torch.Tensor], inputs: Rows, opts: Any) -> Work:
        def finish(rows: Rows) -> None:
            outputs[0].copy_(rows[opts.rootRank][self.rank()])

        return self._all(inputs[0] if opts.rootRank == self.rank() else [], finish, outputs)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        def finish(rows: Rows) -> None:
            for place, row in zip(outputs, rows, strict=True):
                place.copy_(row[self.rank()].view(place.shape))

        return self._all(inputs, finish, outputs)

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Work:
        even = len(input) // self.size()
        places = torch.split(output, list(output_splits) or [len(output) // self.size()] * self.size())
        return self.alltoall(list(places), list(torch.split(input, list(input_splits) or [even] * self.size())))

    # Names of the same methods since torch 2.13.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    # ------------------------------------------------------------------------------------------------- point to point

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int = 0) -> Work:
        if (error := self.part.refused()) is not None:
            raise error
        self._between["to", destination, tag] += 1
        key = ("sent", tag, self._between["to", destination, tag])
        self.part.mesh.send(destination, key, tensors[0].detach().clone())
        return Work(self.part, lambda: None, [])

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Work:
        if (error := self.part.refused()) is not None:
            raise error
        self._between["from", source, tag] += 1
        key = ("sent", tag, self._between["from", source, tag])

        def finish() -> None:
            tensors[0].copy_(self.part.mesh.take(source, key))

        return Work(self.part, finish, tensors)


def _reduced(tensors: list[torch.Tensor], opts: Any) -> torch.Tensor:
    """Return the reduction in the order of the ranks, so that all ranks get the same bits."""
    op = _Op.SUM if opts is None else opts.reduceOp.op
    total: torch.Tensor = reduce(_REDUCTIONS[op], tensors)
    return total / len(tensors) if op == _Op.AVG else total


if __name__ == "__main__":
    sys.modules["fake_nccl"] = sys.modules["__main__"]  # a script that imports it gets this module
    install()
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
