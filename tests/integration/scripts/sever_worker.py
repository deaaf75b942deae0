"""One rank of test_sever.py. Makes groups on commands from stdin; a thread severs them on command.

Commands, one per line: ``create NAME RANK SIZE`` · ``new_group`` · ``all_reduce`` · ``connect PORT`` · ``broadcast ROOT
VICTIM`` (the receiver kills process VICTIM in the middle of it) · ``leave`` · ``sever`` (at once and permanently, until
``leave``) · ``quit``. Each command except ``sever`` and ``quit`` answers with a JSON line.
"""

from __future__ import annotations

import json
import os
import queue
import selectors
import signal
import socket
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from elasticstate.worker.contexts import Rendezvous
from elasticstate.worker.contexts.gloo import GlooContext

LONG = timedelta(seconds=120)
SLICE = timedelta(seconds=1)  # short, as in regroup: torch retries for that long
context = GlooContext()
severed = threading.Event()
commands: queue.Queue[list[str]] = queue.Queue()
store_port = int(sys.argv[1])


def listen() -> None:
    for line in sys.stdin:
        if line.strip() == "sever":
            severed.set()
        else:
            commands.put(line.split())


def sweep() -> None:
    while True:
        severed.wait()
        context.sever()
        time.sleep(0.003)


class UsersOwnSockets:
    """A connection and an event loop of the user, which elasticstate must not touch."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.client = socket.create_connection(self.listener.getsockname())
        self.server, _ = self.listener.accept()
        self.selector = selectors.EpollSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(self.server, selectors.EVENT_READ)

    def check(self) -> None:
        self.client.sendall(b"still here")
        assert self.server.recv(100) == b"still here"
        late = socket.create_connection(self.listener.getsockname())
        accepted, _ = self.listener.accept()
        accepted.close()
        late.close()


def kill_when_it_comes(tensor: torch.Tensor, victim: int) -> None:
    """Kill the victim after the first bytes have arrived, and long before the last."""
    while not tensor[0]:
        time.sleep(0.0005)
    os.kill(victim, signal.SIGKILL)


def broadcast(root: int, victim: int) -> None:
    receives = dist.get_rank() != root
    tensor = torch.zeros(1 << 27) if receives else torch.ones(1 << 27)
    if receives:
        threading.Thread(target=kill_when_it_comes, args=(tensor, victim), daemon=True).start()
    dist.broadcast(tensor, root)


def carry_out(words: list[str]) -> None:
    match words:
        case ["broadcast", root, victim]:
            broadcast(int(root), int(victim))
        case ["create", name, rank, size]:
            store = dist.TCPStore("127.0.0.1", store_port, is_master=False, wait_for_workers=False)
            context.sockets.watch_store("127.0.0.1", store_port)
            prefix = dist.PrefixStore(name, store)
            context.create(Rendezvous(prefix, name, rank, int(rank), int(size), LONG, LONG, lambda: None))
        case ["new_group"]:
            dist.new_group(list(range(dist.get_world_size())))
        case ["all_reduce"]:
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            assert tensor.item() == dist.get_world_size()
        case ["connect", port]:
            context.sockets.watch_store("127.0.0.1", int(port))
            dist.TCPStore("127.0.0.1", int(port), is_master=False, wait_for_workers=False, timeout=SLICE)


def leave() -> None:
    global context
    context.destroy()
    severed.clear()
    context = GlooContext()


threading.Thread(target=listen, daemon=True).start()
threading.Thread(target=sweep, daemon=True).start()
users = UsersOwnSockets()
print(json.dumps({"booted": True}), flush=True)
while (words := commands.get()) != ["quit"]:
    print(json.dumps({"began": words[0]}), flush=True)
    try:
        leave() if words == ["leave"] else carry_out(words)
        answer = {"done": words[0], "error": None, "broken": context.broken()}
    except Exception as error:
        answer = {"done": words[0], "error": type(error).__name__, "broken": context.broken()}
    users.check()
    print(json.dumps(answer), flush=True)
