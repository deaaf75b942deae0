"""A process that has imported torch, from which scripts fork: ``script_template.py DESCRIPTOR PARENT``.

Each request on the socket is a script: its path, arguments and environment as JSON, with the descriptors of its stdin,
stdout and stderr. The answer is the id of its process. The process is an orphan, and so becomes a child of PARENT,
which adopts orphans at that time. As many imports as scripts would take most of the time of the tests.
"""

from __future__ import annotations

import elasticstate.worker.script as script  # isort: skip - its exit function must be the last one to run

import gc
import json
import os
import socket
import sys
import time
import warnings

gc.disable()

import collectives  # noqa: E402, F401 - with all of torch.distributed
import torch._dynamo  # noqa: E402
import torch.distributed.nn.functional  # noqa: E402, F401

import elasticstate.worker.contexts.gloo  # noqa: E402
import elasticstate.worker.run  # noqa: E402, F401
from elasticstate.config import replace_environment  # noqa: E402

link, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])


def run(command: list[str], environment: dict[str, str], descriptors: list[int]) -> None:
    """Run a script in a child of ``parent``, as a new Python process would."""
    if (pid := fork()) != 0:
        link.send(str(pid).encode())
        os._exit(0)
    while os.getppid() != parent:
        time.sleep(0.0005)
    link.close()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    gc.enable()
    replace_environment(environment)
    script.run([sys.executable, *command])


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of OpenBLAS's threads
        return os.fork()


script.skip_exit_functions_of(script.mapped_libraries())
del sys.path[0]  # the directory of this file, which is not that of the scripts
gc.freeze()
while True:
    request, descriptors, _, _ = socket.recv_fds(link, 1 << 17, 3)
    if not request:
        os._exit(0)
    if (child := fork()) == 0:
        run(*json.loads(request), descriptors)
    os.waitpid(child, 0)
    for descriptor in descriptors:
        os.close(descriptor)
