"""Modules of elasticstate that the ssh servers of simulated hosts run: they fork from the template, too."""

from __future__ import annotations

import json
import os
import shlex
import socket
import struct
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from tests.kit import forks

_PROGRAM = Path(__file__).with_name("ssh_command.py")


class SshForks:
    """Forks until it is closed. ``command``: what the ssh servers run instead of any other command."""

    def __init__(self) -> None:
        forks.template()
        self._directory = tempfile.TemporaryDirectory(prefix="es-")  # the kernel limits the length of the path
        path = f"{self._directory.name}/forks"
        self.command = "exec " + shlex.join([sys.executable, "-I", "-S", str(_PROGRAM), path, sys.executable])
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        """Wait for the ends of all that has forked."""
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:  # the first one adds others until it ends
            thread.join()
        self._listener.close()
        self._directory.cleanup()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                link, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._run, args=[link]))
                self._threads[-1].start()

    def _run(self, link: socket.socket) -> None:
        """Run a module on the host, and with the streams, of the process at the other end."""
        with link:
            request, descriptors, _, _ = socket.recv_fds(link, 1 << 17, 3)
            if not request:
                return  # the host has lost its power
            host, _, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            command, environment, directory = json.loads(request)
            stdin, stdout, stderr = descriptors
            process = forks.template().fork(command, environment, (stdin, stdout, stderr), 0, Path(directory), host)
            for descriptor in descriptors:
                os.close(descriptor)
            code = process.wait()
            with suppress(OSError):  # the process there was killed, too
                link.send(str(code).encode())
