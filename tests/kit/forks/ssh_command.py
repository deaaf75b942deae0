"""``ssh_command.py SOCKET PYTHON``: what the ssh servers of simulated hosts run instead of a command.

If that starts an agent, it forks (kit/forks/over_ssh.py): this process has the agent's streams, and ends as it does. It
imports little, as it runs for each agent.
"""

import json
import os
import signal
import socket
import sys

path, python = sys.argv[1:]
command = os.environ.pop("SSH_ORIGINAL_COMMAND")
if command != f"exec {python} -m elasticstate.agent":
    os.execv("/bin/sh", ["sh", "-c", command])
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.connect(path)
socket.send_fds(link, [json.dumps([dict(os.environ), os.getcwd()]).encode()], [0, 1, 2])
for descriptor in (0, 1, 2):
    os.close(descriptor)
code = int(link.recv(100))
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), -code)
os._exit(code)
