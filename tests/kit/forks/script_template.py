"""``script_template.py DESCRIPTOR PARENT MODULES PADDING``: a process that has imported torch. Scripts fork from it.

Each request on the socket has a Python command, its environment, a number of agents, a directory and a host as JSON,
and the descriptors of stdin, stdout and stderr. The answer is the id of its process. The process is an orphan, and so
becomes a child of PARENT, which takes in orphans at that time. As many imports as scripts and hosts would take most of
the time of the tests. MODULES are further imports: a template with some forks from one without.
"""

from __future__ import annotations

import elasticstate.worker.script as script  # isort: skip - its exit function must be the last one to run

import ctypes
import fcntl
import gc
import importlib
import json
import os
import socket
import sys
import termios
import time
import warnings
import weakref
from pathlib import Path

gc.disable()
threshold = (700, 10, 10)  # Python's own: startup/sitecustomize.py has one for imports

import forked_job  # noqa: E402
import torch  # noqa: E402

from elasticstate.options import replace_environment  # noqa: E402
from elasticstate.worker.template import MODULES  # noqa: E402

OF_JOBS = ("elasticstate.driver.driver", "elasticstate.agent.agent", "elasticstate.cli.run")  # they fork from it, too
for name in (*MODULES, "torch._dynamo", *OF_JOBS, *filter(None, sys.argv[3].split(","))):
    importlib.import_module(name)

HUGE = 2 << 20
MADV_COLLAPSE = 25  # Linux 6.1 or later; before, the call has no effect

link, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])


def run(
    command: list[str], environment: dict[str, str], agents: int, directory: str, host: int, descriptors: list[int]
) -> None:
    """Run a command in a child of ``parent``, as a new Python process would. ``agents``: 0, if it is no elasticrun.

    ``directory``: "", if that of this process is right. ``host``: a process on the simulated host on which the command
    runs; 0, if that is this machine. A terminal as stdin becomes that of the command's session.
    """
    if (pid := fork()) != 0:
        link.send(str(pid).encode())
        os._exit(0)
    while os.getppid() != parent:
        time.sleep(0.0005)
    link.close()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    replace_environment(environment)
    directory = directory or os.getcwd()
    if host:
        forked_job.enter(host)
        os.setsid()
    if os.isatty(0):
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the terminal of the new session
    os.chdir(directory)
    gc.set_threshold(*threshold)
    if host and {"agent", "elasticstate.agent"} & {*command[:3]}:
        forked_job.prepare_template()
    if agents:
        forked_job.prepare(agents)
    gc.enable()
    script.exit_after_finalization = os._exit  # to take modules down means to copy those of torch first
    script.run([sys.executable, *command])


def keep_kernels() -> None:
    """Let the forked processes end without removing torch's kernels one by one, which copies most of its memory."""
    for finalizer in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
        if finalizer.peek()[1] is torch.library._del_library:
            finalizer.atexit = False


def use_huge_pages() -> None:
    """Put this process's memory into huge pages. To fork and to end takes a quarter of the time with them."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, inode, *_ = line.split()
        begin, end = (int(address, 16) // HUGE * HUGE for address in addresses.split("-"))
        for at in range(begin, end, HUGE) if access == "rw-p" and inode == "0" else ():
            madvise(at, HUGE, MADV_COLLAPSE)  # fails in each part that has too little memory


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of OpenBLAS's threads
        return os.fork()


script.skip_exit_functions_of(script.mapped_libraries())
del sys.path[0]  # the directory of this file, which is not that of the scripts
gc.freeze()
keep_kernels()
use_huge_pages()
while True:
    request, descriptors, _, _ = socket.recv_fds(link, 1 << 17, 3)
    if not request:
        os._exit(0)
    if (child := fork()) == 0:
        run(*json.loads(request), descriptors)
    os.waitpid(child, 0)
    for descriptor in descriptors:
        os.close(descriptor)
