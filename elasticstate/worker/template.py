"""The template process of a host: it imports torch and elasticstate once, and workers fork from it.

``python template.py DESCRIPTOR AGENT_PID DIRECTORY MODULES PADDING``. The agent starts it and sends requests
(net/fork_link.py). A worker forks twice, so that its parent is the agent, which adopts orphans
(PR_SET_CHILD_SUBREAPER). DIRECTORY is that of the workers' script. PADDING is space for the command line that ps shows
for a worker.

Before the first fork, this process opens no socket or store, uses no OpenMP, and does not initialise CUDA: children
would hang or share them.
"""

import sys

if __name__ == "__main__":
    del sys.path[0]  # the directory of this file, which is not the script's

import elasticstate.worker.script as script  # noqa: I001  (first: its exit function must be the last one to run)

import ctypes
import gc
import importlib
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterable

from elasticstate.config import replace_environment
from elasticstate.net.fork_link import READY, AgentLink, ReceivedRequest
from elasticstate.worker.gloo_rest import watch_models

_PR_SET_PDEATHSIG = 1
_LONGEST_ADOPTION_S = 10.0
MODULES = (
    "torch.distributed.nn.functional",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "elasticstate.state.torch",
    "elasticstate.state.loader",
    "elasticstate.state.sampler",
    "cloudpickle",  # for worker/call.py, which must not be imported before it runs as a program
    "elasticstate.worker.loop",
    "elasticstate.worker.run",
)


def main() -> None:
    link, agent, directory = AgentLink(int(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
    reason = _import(filter(None, sys.argv[4].split(",")), directory) or _reason_against_forks(directory)
    link.send(reason or READY)
    if reason:
        return
    while (asked := link.next()) is not None:
        if _forks_to_worker(asked, agent):
            link.close()
            _become_worker(asked)
        asked.close()


def _import(modules: Iterable[str], directory: str) -> str:
    """Import everything that most workers need, and the user's modules. Return the reason why that failed, or ""."""
    gc.disable()  # imports make almost no garbage, and collections would take a fifth of their time
    for name in MODULES:
        importlib.import_module(name)
    import torch

    torch.compiler.disable(main)  # type: ignore[no-untyped-call]  # imports the compiler, and does no more
    watch_models()
    script.skip_exit_functions_of(script.mapped_libraries())
    sys.path.insert(0, directory)
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: PERF203
            return f"--preload {name}: {type(error).__name__}: {error}"
    sys.path.remove(directory)
    gc.freeze()  # a collection in a child would write to each object, and so copy its page
    return ""


def _reason_against_forks(directory: str) -> str:
    """Return why a child of this process could fail where a new process would not, or ""."""
    import torch

    if hidden := script.hidden_module(directory):
        return f"{hidden} has the name of a module that is already imported"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "an imported module has initialised CUDA"
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
        return f"an imported module has started threads: {names}"
    # OpenBLAS ends its threads before a fork and starts them again when they are needed. Others do not.
    if _fork() == 0:
        os._exit(0)
    os.wait()
    count = len(os.listdir("/proc/self/task"))
    return f"an imported library has started {count - 1} threads" if count > 1 else ""


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
    os.dup2(asked.stdout, 1)
    os.dup2(asked.stderr, 2)
    if not asked.begin():
        os._exit(1)
    return True


def _become_worker(asked: ReceivedRequest) -> None:
    """Run the worker's command in this process. Does not return."""
    request = asked.request
    asked.close()
    gc.enable()
    before = replace_environment(request.environment)
    script.show_variables({k: v for k, v in request.environment.items() if before.get(k) != v})
    os.chdir(request.directory)
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
