"""One rank of test_contexts.py: ``context_rank.py BACKEND STORE_PORT DIRECTORY [FAKE]``. Reads commands from stdin.

FAKE: settings of fake_nccl.py, as JSON.

Commands, one per line: ``create NAME RANK SIZE [INIT_SECONDS]`` · ``collectives`` · ``hang`` (all-reduces of 1 MB; one
is cut) · ``hang small`` (of 256 KB) · ``subgroup RANKS`` · ``error KIND`` · ``held`` · ``leave`` · ``leave by plan`` ·
``sever`` (at once, until ``leave``) · ``warm`` (connect all) · ``pending`` (an all-reduce that is cut, with kernels
before and after it in the queue) · ``capture`` (a CUDA graph with an all-reduce) · ``replay`` (it, drop it when it is
cut) · ``replay kept`` · ``drop`` · ``compile`` (code with an all-reduce) · ``compiled`` (call it; it is cut). Each
command except ``sever`` answers with a JSON line; the last ones say ``queued`` before they hang. SIGUSR1 prints the
stacks of all threads.

Ranks on CUDA share the first device: NCCL allows that because each has an NCCL_HOSTID of its own.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import fake_nccl
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional
from collectives import check_all

from elasticstate.core.ids import WorkerId
from elasticstate.errors import CollectiveError
from elasticstate.mpi.driver_part import decode_request
from elasticstate.options import WorkerEnvironment
from elasticstate.worker import contexts
from elasticstate.worker.contexts import Context, Rendezvous

LONG = timedelta(seconds=120)
os.environ["NCCL_HOSTID"] = str(os.getpid())
faulthandler.register(signal.SIGUSR1)
backend_name, store_port, directory = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
if is_fake := len(sys.argv) > 4:
    fake_nccl.install(**json.loads(sys.argv[4]))
severed = threading.Event()
commands: queue.Queue[list[str]] = queue.Queue()
lock = threading.Lock()
leaving = threading.Lock()


said = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print, as NCCL does with NCCL_DEBUG, is no answer


def say(**facts: Any) -> None:
    with lock:
        print(json.dumps(facts), file=said, flush=True)


def listen() -> None:
    for line in sys.stdin:
        if line.strip() == "sever":
            severed.set()
        else:
            commands.put(line.split())


def sweep() -> None:
    while True:
        severed.wait()
        with leaving:
            if severed.is_set():  # check again: the next world's context must not be severed
                context.sever()
        time.sleep(0.003)


def check() -> None:
    if severed.is_set():
        raise CollectiveError("the generation has ended")


def create(name: str, rank: int, size: int, init: timedelta = LONG) -> None:
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False, wait_for_workers=False)
    context.sockets.watch_store("127.0.0.1", store_port)
    prefix = dist.PrefixStore(name, store)
    context.create(Rendezvous(prefix, name, str(os.getpid()), rank, size, init, LONG, check))
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)


def device() -> torch.device:
    return torch.device("cuda", 0) if backend_name.startswith("nccl") and not is_fake else torch.device("cpu")


def subgroup(ranks: tuple[int, ...]) -> None:
    """Use a group as in a sync: only its members create the group, for CPU tensors."""
    group = context.subgroup(ranks)
    options = dist.BroadcastOptions()
    options.rootRank = len(ranks) - 1
    tensor = torch.full((100_000,), float(dist.get_rank()))
    group.broadcast([tensor], options).wait()
    assert torch.equal(tensor, torch.full((100_000,), float(ranks[-1])))


def hang(count: int, size: int) -> None:
    """Make ``count`` all-reduces of ``size`` numbers, one of which is cut."""
    for _ in range(count):
        dist.all_reduce(torch.ones(size, device=device()))
        torch.zeros(1, device=device()).item()
    raise AssertionError("nobody has cut it")


def synchronize() -> None:
    torch.cuda.synchronize() if backend_name != "gloo" else None


def pending() -> None:
    """Queue kernels, an all-reduce, and more kernels. A device works on them while Python waits."""
    side = 4096 if device().type == "cuda" else 64
    matrix = torch.zeros(side, side, device=device())
    for _ in range(100):
        matrix @ matrix
    work = dist.all_reduce(torch.ones(1 << 18, device=device()), async_op=True)
    for _ in range(100):
        matrix @ matrix
    say(queued=True)
    work.wait()
    synchronize()
    _meet_the_end()


def _meet_the_end() -> None:
    """Use the groups once more: a device that is freed by an abort reports no error by itself."""
    dist.all_reduce(torch.ones(1, device=device()))
    synchronize()
    raise AssertionError("nobody has cut it")


graphs: list[Any] = []
reduced: list[torch.Tensor] = []


def capture() -> None:
    """Capture an all-reduce, and replay it once on all ranks."""
    tensor = torch.ones(1 << 16, device=device())
    if is_fake:
        graphs.append(FakeGraph(tensor))
        graphs[-1].replay()
        return
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        dist.all_reduce(torch.ones(1, device=device()))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        dist.all_reduce(tensor)
    graph.replay()
    torch.cuda.synchronize()
    assert tensor[-1].item() == dist.get_world_size()
    graphs.append(graph)
    reduced.append(tensor)


class FakeGraph(fake_nccl.Graph):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor

    def replay(self) -> None:
        dist.all_reduce(self.tensor, async_op=True)


def replay(graph: Any) -> None:
    """Replay it, and raise what a commit raises.

    The next collective would wait for the abort, which waits for the graph: torch locks the communicator meanwhile.
    """
    graph.replay()
    say(queued=True)
    synchronize()
    severed.wait(LONG.total_seconds())
    check()


def reduce_product(tensor: torch.Tensor) -> torch.Tensor:
    return functional.all_reduce(tensor @ tensor, "sum", dist.group.WORLD) + 1


compiled = torch.compile(reduce_product, backend="inductor" if device().type == "cuda" else "aot_eager")


def call_compiled() -> None:
    result = compiled(torch.ones(8, 8, device=device()))
    assert result.tolist() == [[8.0 * dist.get_world_size() + 1] * 8] * 8


def call_compiled_alone() -> None:
    say(queued=True)
    compiled(torch.ones(8, 8, device=device())).tolist()
    _meet_the_end()


def raised(kind: str) -> BaseException:
    try:
        if kind == "user":
            raise ValueError("a bug of the user's")
        if kind == "store":
            raise dist.DistStoreError("the store is gone")
        for _ in range(2):  # the first one of NCCL leaves garbage, when it is aborted
            dist.all_reduce(torch.ones(1 << 16, device=device()))
            torch.zeros(1, device=device()).item()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def held() -> dict[str, int]:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free: how much of it is kept depends on the order of threads
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }
    if device().type == "cuda":
        free, total = torch.cuda.mem_get_info()
        found |= {"device": total - free, "reserved": torch.cuda.memory_reserved()}  # of all processes, and of this one
    return found


def leave(by_plan: bool) -> None:
    global context
    context.destroy(by_plan)
    with leaving:
        severed.clear()
        context = backend.context()
    assert not dist.is_initialized()


def carry_out(words: list[str]) -> dict[str, Any]:
    match words:
        case ["create", name, rank, size]:
            create(name, int(rank), int(size))
        case ["create", name, rank, size, seconds]:
            create(name, int(rank), int(size), timedelta(seconds=float(seconds)))
        case ["collectives"]:
            check_all(device(), Path(directory))
        case ["subgroup", ranks]:
            subgroup(tuple(map(int, ranks.split(","))))
        case ["hang"]:
            hang(1000, 1 << 18)
        case ["hang", "small"]:
            hang(10_000, 1 << 16)
        case ["error", kind]:
            error = raised(kind)
            return {"fault": context.classify(error).name, "kind": type(error).__name__}
        case ["held"]:
            return held()
        case ["leave", *how]:
            leave(how == ["by", "plan"])
        case ["warm"]:
            dist.all_reduce(torch.ones(1, device=device()))
            synchronize()
        case ["pending"]:
            pending()
        case ["capture"]:
            capture()
        case ["replay"]:
            replay(graphs.pop())
        case ["replay", "kept"]:
            replay(graphs[-1])
        case ["drop"]:
            graphs.clear()
        case ["compile"]:
            call_compiled()
        case ["compiled"]:
            call_compiled_alone()
    return {}


environment = WorkerEnvironment(
    socket="",
    agent="",
    worker=WorkerId("localhost", 0, 1),
    job="job",
    job_id="job",
    local_address="127.0.0.1",
    commits=str(directory / str(os.getpid())),
    preemption_signals=(),
    backend=backend_name,
)
backend = contexts.choose(backend_name)
backend.prepare(environment, lambda message: say(asks=decode_request(message.data).applicants))
context: Context = backend.context()
threading.Thread(target=listen, daemon=True).start()
threading.Thread(target=sweep, daemon=True).start()
say(booted=True)
while True:
    words = commands.get()
    say(began=words[0])
    try:
        answer = {"error": None, **carry_out(words)}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
        traceback.print_exc()
    say(done=words[0], broken=context.broken(), **answer)
