"""A process that has imported torch, from which ranks fork: ``rank_template.py SCRIPT DESCRIPTOR PARENT``.

Each request on the socket is a rank: the arguments of the script as JSON, with the descriptors of its stdin and stdout.
The answer is the process id of the rank. The rank is an orphan, and so becomes a child of PARENT, which adopts orphans
at that time. As many imports as ranks would take most of the time of the tests.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import socket
import sys
import time
import warnings
from pathlib import Path

gc.disable()

import torch  # noqa: E402
import torch.distributed  # noqa: E402
import torch.distributed.nn.functional  # noqa: E402, F401

import elasticstate.worker.contexts.gloo  # noqa: E402, F401

script, link, parent = sys.argv[1], socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3])


def become_a_rank(arguments: list[str], descriptors: list[int]) -> None:
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
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
    sys.stdout.flush()
    os._exit(0)


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of OpenBLAS's threads
        return os.fork()


sys.path.insert(0, str(Path(script).parent))
gc.freeze()
while True:
    request, descriptors, _, _ = socket.recv_fds(link, 65536, 2)
    if not request:
        os._exit(0)
    if (child := fork()) == 0:
        become_a_rank(json.loads(request), descriptors)
    os.waitpid(child, 0)
    for descriptor in descriptors:
        os.close(descriptor)
