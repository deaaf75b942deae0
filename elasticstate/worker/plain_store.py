"""Program that serves the store of plain workers: ``python plain_store.py HOST PORT``. Its stdout is the socket.

torchrun's agent serves such a store; plain workers expect it (TORCHELASTIC_USE_AGENT_STORE). The agent of elasticrun
does not import torch, so it passes the listening socket to this process, as inetd does. When a worker has joined the
store, this process writes a line to its stderr. It ends with its agent.
"""

import sys

if __name__ == "__main__":
    del sys.path[0]  # the directory of this file

import os
import signal
import time

from elasticstate.net.messages import STORE_JOINED

_FIRST_LOOK_S, _LOOK_INTERVAL_S = 0.001, 0.05


def main() -> None:
    from elasticstate._native import show_numeric_hosts
    from elasticstate.compat.process_groups import TCPStore

    show_numeric_hosts()
    host, port = sys.argv[1], int(sys.argv[2])
    listener = os.dup(1)
    os.dup2(2, 1)
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener)
    pause_s = _FIRST_LOOK_S  # the client is connecting, and its script may end within milliseconds
    while store.num_keys() == 0:  # a client counts itself when it has connected (torch 2.13, TCPStore.cpp)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LOOK_INTERVAL_S)
    sys.stderr.write(f"{STORE_JOINED}\n")
    sys.stderr.flush()
    signal.pause()


if __name__ == "__main__":
    main()
