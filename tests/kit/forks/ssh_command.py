"""``ssh_command.py SOCKET PYTHON``: what the ssh servers of simulated hosts run instead of a command.

If that runs a module of elasticstate, such as an agent, it forks (kit/forks/over_ssh.py): this process has its streams,
and ends as it does.
"""

import json
import os
import shlex
import signal
import socket
import sys

path, python = sys.argv[1:]
command = os.environ.pop("SSH_ORIGINAL_COMMAND")
if not command.startswith(f"exec {python} -m elasticstate."):
    os.execv("/bin/sh", ["sh", "-c", command])
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.connect(path)
socket.send_fds(link, [json.dumps([shlex.split(command)[2:], dict(os.environ), os.getcwd()]).encode()], [0, 1, 2])
for descriptor in (0, 1, 2):
    os.close(descriptor)
code = int(link.recv(100))
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
