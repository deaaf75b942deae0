"""Program that becomes a worker: ``python -I -S exec_shim.py AGENT_PID DESCRIPTORS COMMAND...``.

It asks the kernel to kill this process when its agent dies. The agent cannot do so between fork and exec, because the
agent has threads. It also restores the user's own limit on open descriptors, which the agent has raised for itself.

It imports no module of elasticstate, and few others, because it runs at each start of a worker.
"""

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    agent, descriptors, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent:
        os._exit(1)  # the agent died before prctl() took effect
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"elasticstate: cannot run {command[0]!r}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
