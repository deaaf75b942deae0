"""The template process of a host: it imports torch and elasticstate once, and workers fork from it.

``python template.py DESCRIPTOR AGENT_PID DIRECTORY MODULES PADDING``. The agent starts it and sends requests
(net/link.py). A worker forks twice, so that its parent is the agent, which adopts orphans (PR_SET_CHILD_SUBREAPER).
DIRECTORY is that of the workers' script. PADDING is space for the command line that ps shows for a worker. Before the
first fork, this process opens no socket or store, uses no OpenMP, and does not initialise CUDA: children would hang or
share them.
"""

import sys

if __name__ == "__main__":
    del sys.path[0]  # the directory of this file, which is not the script's

import elasticstate.worker.script as script  # noqa: I001  (first: its exit function must be the last one to run)

import ctypes
import gc
import importlib
import io
import multiprocessing
import os
import signal
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

from elasticstate.options import replace_environment
from elasticstate.net.link import IMPORTING, READY, AgentLink, ReceivedRequest
from elasticstate.worker.gloo_rest import watch_models

_PR_SET_PDEATHSIG = 1
_LONGEST_ADOPTION_S = 10.0
_THREAD_END_S = 1.0  # for a thread that only helps with an import
# Threads, as the kernel names them, with which a process can be forked. jemalloc's, which pyarrow starts, only gives
# memory back to the kernel. jemalloc takes its locks around a fork, and the threads that allocate do that work in a
# child (pthread_atfork; background_thread_postfork_child in src/background_thread.c of jemalloc 5).
_HARMLESS_THREADS = frozenset({"jemalloc_bg_thd"})
MODULES = (
    "torch.distributed.nn.functional",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "elasticstate.state.torch",
    "elasticstate.state.loader",
    "elasticstate.state.sampler",
    "cloudpickle",  # for worker/call.py, which must not be imported before it runs as a program
    "elasticstate.worker.contexts.nccl",
    "elasticstate.worker.loop",
    "elasticstate.worker.run",
)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback: the agent starts this process again
    link, agent, directory = AgentLink(int(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
    script.show_command(["elasticstate", "template"])  # for ps, in place of the path and the padding
    _import()
    reason = _reason_against_forks(directory)
    for name in filter(None, sys.argv[4].split(",")):
        if reason:
            break
        link.send(IMPORTING + name)
        reason = _import_for_user(name, directory) or _reason_against_forks(directory)
    link.send(reason or READY)
    if reason:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # an ordinary end would wait for threads
    gc.freeze()  # a collection in a child would write to each object, and so copy its page
    while (asked := link.next()) is not None:
        if _forks_to_worker(asked, agent):
            link.close()
            _become_worker(asked)
        asked.close()


def _import() -> None:
    """Import everything that most workers need."""
    gc.disable()  # imports make almost no garbage, and collections would take a fifth of their time
    for name in MODULES:
        importlib.import_module(name)
    import torch

    torch.compiler.disable(main)  # type: ignore[no-untyped-call]  # imports the compiler, and does no more
    watch_models()
    script.skip_exit_functions_of(script.mapped_libraries())


def _import_for_user(name: str, directory: str) -> str:
    """Import a module of --preload. Return the reason why that failed, or ""."""
    sys.path.insert(0, directory)
    try:
        importlib.import_module(name)
    except BaseException as error:  # also SystemExit
        return f"{type(error).__name__}: {error}"
    sys.path.remove(directory)
    return ""


def _reason_against_forks(directory: str) -> str:
    """Return why a child of this process could fail where a new process would not, or ""."""
    import torch

    if hidden := script.hidden_module(directory):
        return f"{hidden} has the name of a module that is already imported"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "the import initialises CUDA"
    if threading.active_count() == 1:
        # OpenBLAS ends its threads before a fork and starts them again when they are needed. Others do not.
        if (child := _fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
    deadline = time.monotonic() + _THREAD_END_S
    while (threads := _threads()) and time.monotonic() < deadline:
        time.sleep(0.01)
    which = f"thread {threads[0]}" if len(threads) == 1 else f"threads {', '.join(threads)}"
    return f"the import starts the {which}, and a fork of a process with threads is not safe" if threads else ""


def _threads() -> list[str]:
    """Return the names of all threads that a fork may harm, other than the main thread."""
    python = {thread.native_id: thread.name for thread in threading.enumerate()}
    names = []
    for task in map(int, os.listdir("/proc/self/task")):
        with suppress(OSError):  # it has ended
            name = Path(f"/proc/self/task/{task}/comm").read_text(errors="replace").strip()
            if task != os.getpid() and name not in _HARMLESS_THREADS:
                names.append(repr(python.get(task, name)))
    return sorted(names)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of OpenBLAS's threads
        return os.fork()


def _forks_to_worker(asked: ReceivedRequest, agent: int) -> bool:
    """Fork twice. Return True in the worker, and False in this process."""
    child = _fork()
    if child:
        os.waitpid(child, 0)
        return False
    if _fork():
        os._exit(0)
    deadline = time.monotonic() + _LONGEST_ADOPTION_S
    while os.getppid() != agent:  # the process between has not ended yet, or the agent has
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0005)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent:
        os._exit(1)  # the agent died before prctl() took effect
    os.setsid()
    for number, descriptor in enumerate(asked.standard):
        os.dup2(descriptor, number)
    if not asked.begin():
        os._exit(1)
    return True


def _become_worker(asked: ReceivedRequest) -> None:
    """Run the worker's command in this process. Does not return."""
    request = asked.request
    asked.close()
    gc.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = replace_environment(request.environment)
    script.show_variables({k: v for k, v in request.environment.items() if before.get(k) != v})
    os.chdir(request.directory)
    if not os.path.samestat(os.fstat(0), os.stat(os.devnull)):  # which Python has opened as stdin, with positions
        first, raw = sys.stdin, io.FileIO(0, closefd=False)
        raw.name = first.name
        sys.stdin = io.TextIOWrapper(io.BufferedReader(raw), first.encoding, first.errors)
        sys.__stdin__ = sys.stdin  # type: ignore[misc]  # final, but for a process that becomes another one
    _seed_anew()
    script.run(request.command)


def _seed_anew() -> None:
    """Seed what a new process seeds at random. Python's own generator does this itself; torch's has a fixed seed."""
    multiprocessing.current_process().authkey = os.urandom(32)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


if __name__ == "__main__":
    main()
