"""MpiGroup: a torch process group over an MPI communicator, for CPU tensors, zero-copy where they are contiguous.

The collectives are MPI's non-blocking ones, so that those of DDP run during the backward pass. MPI has no type for half
precision, so such tensors are reduced in float32, and rounded once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from elasticstate.errors import CollectiveError

GONE = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
"""Classes of MPI's errors after the loss of a member."""
_ABANDON_AFTER_S = 0.05
_SHORTEST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 200e-6


class Operation(dist.Work):
    """The requests of one collective, begun by the thread that calls it, and completed by the thread of ``Progress``.

    ``finish`` is called after all are complete: it copies staged results back. ``kept``: the buffers that MPI reads and
    writes during the operation.
    """

    def __init__(
        self,
        requests: list[MPI.Request],
        finish: Callable[[], object] | None,
        results: list[torch.Tensor],
        kept: tuple[object, ...],
        timeout: timedelta,
    ) -> None:
        super().__init__()
        self.requests = requests
        self.kept = kept
        self.deadline = time.monotonic() + timeout.total_seconds()
        self._finish = finish
        self._results = results
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._end: torch.futures.Future[Any] = torch.futures.Future()
        self._future = self._end.then(_value_of)

    def complete(self, error: BaseException | None) -> None:
        """End the operation. Call it once."""
        if error is None and self._finish is not None:
            try:
                self._finish()
            except RuntimeError as failure:
                error = failure
        self._error = error
        self._done.set()
        self._end.set_result(self._results if error is None else _Failure(str(error)))

    # ----------------------------------------------------------------------------------------- methods that torch calls

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> Any:
        return self._error

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end. Raises the operation's error; RuntimeError after ``timeout`` (zero: the group's one)."""
        if not self._done.wait(timeout.total_seconds() or None):
            raise RuntimeError(f"the operation was not complete after {timeout.total_seconds():g} s")
        if self._error is not None:
            raise self._error.with_traceback(None)
        return True

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._results

    def get_future(self) -> Any:
        return self._future

    def source_rank(self) -> int:
        return -1


@dataclass(frozen=True, slots=True)
class _Failure:
    text: str


def _value_of(end: torch.futures.Future[Any]) -> list[torch.Tensor]:
    """Return or raise the result of a torch future.

    ``set_exception`` works in Python only: C++ would take the exception for the value (a segmentation fault in DDP). An
    exception that a callback raises is an error in C++ too. But C++ keeps the exception with its frames, outside the
    reach of the garbage collector. So the exception is a new one, and this is a function, not a method.
    """
    value = end.value()
    if isinstance(value, _Failure):
        raise RuntimeError(value.text)
    results: list[torch.Tensor] = value
    return results


class Progress:
    """Thread that tests the requests of a generation, because MPI moves data only inside MPI calls.

    Requests that do not end shortly after the sever are abandoned, as some never do (docs/decisions/mpi.md). Their
    buffers are kept until two more worlds are complete: data still in transit to them arrives before the messages by
    which the members agree on those worlds.
    """

    _abandoned: list[Operation] = []  # noqa: RUF012 (by the last two generations)
    _abandoned_before: list[Operation] = []  # noqa: RUF012

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: list[Operation] = []
        self._severed_at: float | None = None
        self._stopping = False
        self.has_failed = False  # a member died, or revoked the communicator
        self.collective_has_failed = False  # so has an operation that was late, or was cut
        Progress._abandoned_before, Progress._abandoned = Progress._abandoned, []
        self._thread = threading.Thread(target=self._run, name="elasticstate-mpi", daemon=True)
        self._thread.start()

    def add(self, operation: Operation) -> None:
        with self._changed:
            self._running.append(operation)
            self._changed.notify()

    def sever(self) -> None:
        """Make running operations fail now. Any thread may call it, repeatedly."""
        with self._changed:
            if self._severed_at is None:
                self._severed_at = time.monotonic()

    def stop(self) -> None:
        """Wait until no operation is running, and end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        pause_s = _SHORTEST_PAUSE_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._running or self._stopping)
                running = list(self._running)
            if not running:
                return
            ended = [operation for operation in running if self._has_ended(operation)]
            if ended:
                with self._changed:
                    self._running = [operation for operation in self._running if operation not in ended]
                pause_s = _SHORTEST_PAUSE_S
            else:
                time.sleep(pause_s)
                pause_s = min(_LONGEST_PAUSE_S, 1.1 * pause_s)

    def _has_ended(self, operation: Operation) -> bool:
        try:
            while operation.requests:
                if not operation.requests[-1].Test():
                    return self._is_given_up(operation)
                operation.requests.pop()
        except MPI.Exception as error:
            self.has_failed = self.collective_has_failed = True
            if len(operation.requests) > 1:
                self._abandoned.append(operation)
            operation.complete(error)
            return True
        operation.complete(None)
        return True

    def _is_given_up(self, operation: Operation) -> bool:
        now = time.monotonic()
        if self._severed_at is not None and now - self._severed_at > _ABANDON_AFTER_S:
            reason = "the generation has ended"
        elif now > operation.deadline:
            reason = "the operation has taken longer than --collective-timeout"
        else:
            return False
        self._abandoned.append(operation)
        self.collective_has_failed = True
        operation.complete(RuntimeError(reason))
        return True


# mypy: disable-error-code="override,assignment"
# torch's stubs have overloads that torch's own Python code never calls.


_LONGEST = (1 << 31) - 1  # elements of one MPI 3 call
_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}
_REDUCED_AS = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.bool: torch.uint8}
_Op: Any = dist.ReduceOp.RedOpType
_OPS = {
    _Op.SUM: MPI.SUM,
    _Op.AVG: MPI.SUM,
    _Op.PRODUCT: MPI.PROD,
    _Op.MIN: MPI.MIN,
    _Op.MAX: MPI.MAX,
    _Op.BAND: MPI.BAND,
    _Op.BOR: MPI.BOR,
    _Op.BXOR: MPI.BXOR,
}

Finish = Callable[[], object]


def _raw(tensor: torch.Tensor) -> Any:
    """Return the memory of a contiguous tensor as bytes, for calls that only move data."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _bytes(tensor: torch.Tensor) -> list[Any]:
    size = tensor.numel() * tensor.element_size()
    if size > _LONGEST:  # in larger units, because MPI counts in 32 bits
        unit = tensor.element_size()
        return [_raw(tensor), tensor.numel(), {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T}.get(unit, MPI.INT64_T)]
    return [_raw(tensor), size, MPI.BYTE]


def _numbers(tensor: torch.Tensor) -> list[Any]:
    return [_raw(tensor), tensor.numel(), _TYPES[tensor.dtype]]


class MpiGroup(dist.ProcessGroup):
    """Process group over one MPI communicator, for one generation. See torch.distributed.ProcessGroup for the methods.

    A call after the end of the generation raises CollectiveError, and so does a call with tensors that are not on the
    CPU.
    """

    def __init__(self, comm: MPI.Intracomm, progress: Progress, timeout: timedelta) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())  # type: ignore[call-arg]
        self._comm: Any = _Calls(comm, progress)
        self._progress = progress
        self._timeout = timeout
        self._name = ""

    # ----------------------------------------------------------------------------------------- methods that torch calls

    def getBackendName(self) -> str:
        return "mpi"

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    supports_coalescing = False  # torch 2.14 and later look at this part before a batch of sends and receives

    def _get_backend(self, device: torch.device) -> MpiGroup:
        if device.type != "cpu":
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self

    # ------------------------------------------------------------------------------------------------------ collectives

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Operation:
        return self._many([self._allreduce(tensor, _op(opts)) for tensor in tensors], tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Operation:
        root = 0 if opts is None else opts.rootRank
        (tensor,) = tensors
        data, back = _staged(tensor)
        return self._start([self._comm.Ibcast(part, root) for part in _parts(data)], back, tensors, data)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Operation:
        (tensor,), op = tensors, _op(opts)
        data, back = _staged(tensor, for_op=op)
        if self.rank() == opts.rootRank:
            request = self._comm.Ireduce(MPI.IN_PLACE, _numbers(data), _mpi_op(op, tensor.dtype), opts.rootRank)
            return self._start([request], self._averaged(data, op, back), tensors, data)
        request = self._comm.Ireduce(_numbers(data), None, _mpi_op(op, tensor.dtype), opts.rootRank)
        return self._start([request], None, tensors, data)

    def barrier(self, opts: Any = None) -> Operation:
        return self._start([self._comm.Ibarrier()], None, [])

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Operation:
        return self._many([self._gather_to_all(rows, row) for rows, row in zip(outputs, inputs, strict=True)], outputs)

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Operation:
        rows = [[of_rank[index] for of_rank in outputs] for index in range(len(inputs))]
        return self._many([self._gather_to_all(of, row) for of, row in zip(rows, inputs, strict=True)], outputs)

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Operation:
        return self._many([self._gather_into(output, input)], [output])

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Operation:
        return self._many([self._gather_into(o, i) for o, i in zip(outputs, inputs, strict=True)], outputs)

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> Operation:
        parts = [self._scatter_sum(o, torch.stack(i), _op(opts)) for o, i in zip(outputs, inputs, strict=True)]
        return self._many(parts, outputs)

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Operation:
        return self._many([self._scatter_sum(output, input, _op(opts))], [output])

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Operation:
        parts = [self._scatter_sum(o, i, _op(opts)) for o, i in zip(outputs, inputs, strict=True)]
        return self._many(parts, outputs)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Operation:
        (tensor,), root = inputs, opts.rootRank
        data, _ = _staged(tensor)
        if self.rank() != root:
            return self._start([self._comm.Igather(_bytes(data), None, root)], None, [], data)
        rows = data.new_empty((self.size(), *data.shape))
        request = self._comm.Igather(_bytes(data), _share(rows, self.size()), root)
        return self._start([request], _spread(rows, outputs[0]), outputs[0], data, rows)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Operation:
        (tensor,), root = outputs, opts.rootRank
        data, back = _staged(tensor)
        if self.rank() != root:
            return self._start([self._comm.Iscatter(None, _bytes(data), root)], back, outputs, data)
        rows = torch.stack(inputs[0])
        request = self._comm.Iscatter(_share(rows, self.size()), _bytes(data), root)
        return self._start([request], back, outputs, data, rows)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Operation:
        sent = torch.cat([tensor.reshape(-1) for tensor in inputs])
        got = torch.cat([tensor.reshape(-1) for tensor in outputs])
        sizes = [tensor.numel() for tensor in outputs]
        request = self._exchange(got, sent, sizes, [tensor.numel() for tensor in inputs], 1)
        return self._start([request], _spread(torch.split(got, sizes), outputs), outputs, sent, got)

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Operation:
        got, back = _staged(output)
        sent, _ = _staged(input)
        got_rows, sent_rows = _even(output, output_splits, self.size()), _even(input, input_splits, self.size())
        unit = output[0].numel() if output.dim() and len(output) else (input[0].numel() if len(input) else 0)
        return self._start([self._exchange(got, sent, got_rows, sent_rows, unit)], back, [output], got, sent)

    # Names of the same methods since torch 2.13.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int = 0) -> Operation:
        (tensor,) = tensors
        data, _ = _staged(tensor)
        return self._start([self._comm.Isend(_bytes(data), destination, tag)], None, tensors, data)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Operation:
        (tensor,) = tensors
        data, back = _staged(tensor)
        return self._start([self._comm.Irecv(_bytes(data), source, tag)], back, tensors, data)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Operation:
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    def _allreduce(self, tensor: torch.Tensor, op: Any) -> tuple[list[MPI.Request], Finish | None, torch.Tensor]:
        data, back = _staged(tensor, for_op=op)
        flat = data.view(-1)
        requests = [
            self._comm.Iallreduce(MPI.IN_PLACE, _numbers(flat[begin : begin + _LONGEST]), _mpi_op(op, tensor.dtype))
            for begin in range(0, max(1, flat.numel()), _LONGEST)
        ]
        return requests, self._averaged(data, op, back), data

    def _averaged(self, data: torch.Tensor, op: Any, back: Finish | None) -> Finish | None:
        if op != _Op.AVG:
            return back

        def average() -> None:
            data.div_(self.size())
            if back is not None:
                back()

        return average

    def _gather_to_all(
        self, rows: list[torch.Tensor], row: torch.Tensor
    ) -> tuple[list[MPI.Request], Finish, torch.Tensor, torch.Tensor]:
        data, _ = _staged(row)
        gathered = data.new_empty((self.size(), *data.shape))
        request = self._comm.Iallgather(_bytes(data), _share(gathered, self.size()))
        return [request], _spread(gathered, rows), data, gathered

    def _gather_into(
        self, output: torch.Tensor, input: torch.Tensor
    ) -> tuple[list[MPI.Request], Finish | None, torch.Tensor, torch.Tensor]:
        data, _ = _staged(input)
        gathered, back = _staged(output)
        return [self._comm.Iallgather(_bytes(data), _share(gathered, self.size()))], back, data, gathered

    def _scatter_sum(
        self, output: torch.Tensor, input: torch.Tensor, op: Any
    ) -> tuple[list[MPI.Request], Finish | None, torch.Tensor, torch.Tensor]:
        data, _ = _staged(input, for_op=op)
        share, back = _staged(output, for_op=op)
        whole = [_raw(data), share.numel(), _TYPES[data.dtype]]
        request = self._comm.Ireduce_scatter_block(whole, _numbers(share), _mpi_op(op, input.dtype))
        return [request], self._averaged(share, op, back), data, share

    def _exchange(
        self, got: torch.Tensor, sent: torch.Tensor, got_rows: Sequence[int], sent_rows: Sequence[int], unit: int
    ) -> MPI.Request:
        size = got.element_size() * unit
        request: MPI.Request = self._comm.Ialltoallv(
            [_raw(sent), [rows * size for rows in sent_rows], MPI.BYTE],
            [_raw(got), [rows * size for rows in got_rows], MPI.BYTE],
        )
        return request

    def _many(self, parts: Sequence[tuple[Any, ...]], results: Any) -> Operation:
        """Return one operation that combines several parts, each (requests, finish, buffers...)."""
        finishes = [finish for _, finish, *_ in parts if finish is not None]

        def finish_all() -> None:
            for finish in finishes:
                finish()

        requests = [request for part in parts for request in part[0]]
        return self._start(requests, finish_all, results, *(buffer for part in parts for buffer in part[2:]))

    def _start(self, requests: list[MPI.Request], finish: Finish | None, results: Any, *kept: object) -> Operation:
        operation = Operation(requests, finish, results, (*kept, results), self._timeout)
        self._progress.add(operation)
        return operation


class _Calls:
    """The calls of a communicator. One that fails because a member is lost is a collective that has failed."""

    def __init__(self, comm: MPI.Intracomm, progress: Progress) -> None:
        self._comm = comm
        self._progress = progress

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._comm, name)

        def noted(*args: Any) -> Any:
            try:
                return call(*args)
            except MPI.Exception as error:
                self._progress.collective_has_failed |= error.Get_error_class() in GONE
                raise

        return noted


def _op(opts: Any) -> Any:
    return _Op.SUM if opts is None else opts.reduceOp.op


def _mpi_op(op: Any, dtype: torch.dtype) -> MPI.Op:
    if op not in _OPS:
        raise CollectiveError(f"the mpi backend has no reduction {op}. Use one of {', '.join(map(str, _OPS))}.")
    if dtype is torch.bool and op == _Op.SUM:
        return MPI.MAX  # a sum in 8 bits could wrap around to 0
    return _OPS[op]


def _staged(tensor: torch.Tensor, for_op: Any = None) -> tuple[torch.Tensor, Finish | None]:
    """Return memory that MPI can use, and the function that copies it back; None if it is the tensor's own memory.

    ``for_op``: the tensor is reduced with this operation.
    """
    if tensor.device.type != "cpu":
        raise CollectiveError(
            f"the mpi backend cannot send a tensor on {tensor.device}. Move it to the CPU, or use --backend nccl."
        )
    data = tensor.detach()
    if for_op is not None and tensor.dtype in _REDUCED_AS:
        data = data.to(_REDUCED_AS[tensor.dtype])
    elif for_op is not None and tensor.dtype not in _TYPES:
        raise CollectiveError(
            f"the mpi backend cannot reduce tensors of {tensor.dtype}. Convert them to another dtype."
        )
    data = data.contiguous()
    if data.data_ptr() == tensor.data_ptr():
        return data, None
    return data, lambda: tensor.detach().copy_(data)


def _spread(parts: Iterable[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Finish:
    """Return the function that copies each part to its output."""

    def spread() -> None:
        for part, output in zip(parts, outputs, strict=True):
            output.copy_(part.view(output.shape))

    return spread


def _parts(data: torch.Tensor) -> list[list[Any]]:
    """Return the memory of a tensor in parts, for calls that count bytes in 32 bits."""
    flat = data.view(-1)
    step = _LONGEST // data.element_size()
    return [_bytes(flat[begin : begin + step]) for begin in range(0, max(1, flat.numel()), step)]


def _share(rows: torch.Tensor, ranks: int) -> list[Any]:
    """Return a buffer in which each rank has an equal share."""
    raw, count, unit = _bytes(rows)
    return [raw, count // ranks, unit]


def _even(tensor: torch.Tensor, splits: Sequence[int], ranks: int) -> Sequence[int]:
    return splits or [len(tensor) // ranks] * ranks
