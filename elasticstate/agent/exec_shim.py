"""Becomes a worker: ``python -I -S exec_shim.py AGENT_PID COMMAND...``.

From here on the kernel kills this process when its agent dies. That cannot be done by the agent itself between fork
and exec: it has threads. Imports nothing of ours, and little else, for it runs at each start of a worker.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    agent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent:
        os._exit(1)  # it died before we asked
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"elasticstate: cannot run {command[0]!r}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
