"""Strangers on the port of a job, each in a process of its own at the lowest priority, so that the job gets the cores.

An attack is a function ``(host, port) -> count`` of its actions; it runs in a forked process.
"""

from __future__ import annotations

import os
import socket
import ssl
import struct
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from elasticstate.net.trust import NAME, Trust
from tests.kit.job import Job

STRANGER = 65534  # the uid of nobody
Attack = Callable[[str, int], int]


class Attacker:
    """An attack under way. ``count()`` waits for its end, and returns the number of its actions."""

    def __init__(self, attack: Attack, host: str, port: int, user: int | None = None) -> None:
        """Start the attack. ``user``: uid of its process; None: the uid of this process."""
        self.name = attack.__name__
        self._answer, answer = os.pipe()
        stay, self._stay = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()  # Ctrl-C must not reach it
                os.nice(19)
                os.close(self._stay)
                if user is not None:
                    os.setgroups([])
                    os.setresgid(user, user, user)
                    os.setresuid(user, user, user)
                count = attack(host, port)
                os.write(answer, struct.pack("=Q", count))
                os.read(stay, 1)  # holds its connections until this pipe is closed
            finally:
                os._exit(0)
        os.close(answer)
        os.close(stay)
        self._count: int | None = None

    def count(self) -> int:
        """Wait until the attack has done its work. It still holds its connections after that."""
        if self._count is None:
            data = os.read(self._answer, 8)
            assert len(data) == 8, f"the attack {self.name} has failed"
            (self._count,) = struct.unpack("=Q", data)
        return self._count

    def __enter__(self) -> Attacker:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, 9)
        os.close(self._stay)
        os.close(self._answer)
        os.waitpid(self.pid, 0)


def connect(host: str, port: int) -> socket.socket:
    stranger = socket.socket()  # not create_connection: it imports a module that another user cannot read
    stranger.settimeout(30)
    stranger.connect((host, port))
    return stranger


def idle(number: int) -> Attack:
    """Open connections, send nothing, and hold them."""

    def idle_connections(host: str, port: int) -> int:
        held = [connect(host, port) for _ in range(number)]
        globals()["_held"] = held
        return len(held)

    return idle_connections


def handshakes_without_a_certificate(number: int) -> Attack:
    """Complete the client's side of TLS handshakes, one after the other. Each costs the driver a signature."""

    def handshakes(host: str, port: int) -> int:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        done = 0
        while done < number:
            with suppress(OSError), context.wrap_socket(connect(host, port), server_hostname=NAME) as stream:
                done += 1
                stream.recv(1)  # waits for the TLS alert
        return done

    return handshakes


def slow_clients(number: int, seconds: float) -> Attack:
    """Send handshakes byte by byte, and connect again when refused."""

    def slow(host: str, port: int) -> int:
        hello = client_hello()
        clients = [(connect(host, port), 0) for _ in range(number)]
        sent, until = 0, time.monotonic() + seconds
        while time.monotonic() < until or sent < 10 * number:
            for index, (client, at) in enumerate(clients):
                try:
                    client.send(hello[at : at + 1])
                    clients[index] = client, at + 1
                    sent += 1
                except OSError:  # noqa: PERF203
                    client.close()
                    clients[index] = connect(host, port), 0
            time.sleep(0.05)
        for client, _ in clients:
            client.close()
        return sent

    return slow


def garbage(size_bytes: int) -> Attack:
    """Send random bytes, at the start of a connection and after a valid ClientHello, as many as are accepted."""

    def garbage_bytes(host: str, port: int) -> int:
        block, hello = os.urandom(1 << 20), client_hello()
        sent = connections = 0
        while sent < size_bytes:
            connections += 1
            with suppress(OSError), connect(host, port) as stranger:
                if connections % 2:
                    stranger.sendall(hello)
                while sent < size_bytes:
                    sent += stranger.send(block)
        return sent

    return garbage_bytes


def client_hello() -> bytes:
    """Return the first bytes of a TLS conversation."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    talk = Trust("x" * 32).client.wrap_bio(incoming, outgoing, server_hostname=NAME)
    with suppress(ssl.SSLWantReadError):
        talk.do_handshake()
    return outgoing.read()


MOST_GROWTH_BYTES = 32 << 20


class Calm:
    """Measures the normal values for ``window_s`` when constructed. Call ``check()`` after the attack."""

    def __init__(self, job: Job, window_s: float = 2.0) -> None:
        self._job = job
        begin = time.time()
        job.wait_for("the usual ticks", lambda: time.time() > begin + window_s)
        self._usual_gap_s = self._gap_s(begin)
        self._usual_bytes = self._memory_bytes()
        self._began = time.time()

    def check(self) -> None:
        """Check that the mean gap between ticks is below twice the normal one, and that the memory has hardly grown."""
        gap_s, grown = self._gap_s(self._began), self._memory_bytes() - self._usual_bytes
        assert gap_s < 2 * self._usual_gap_s, f"ticks every {gap_s:.3f} s instead of {self._usual_gap_s:.3f} s"
        assert grown < MOST_GROWTH_BYTES, f"driver and agents have grown by {grown} bytes"

    def _gap_s(self, since: float) -> float:
        now = time.time()
        ticks = [line for line in self._job.log("commit") if line["rank"] == 0 and line["time"] > since]
        return (now - since) / max(1, len(ticks))

    def _memory_bytes(self) -> int:
        driver = psutil.Process(self._job.process.pid)
        agents = [child for child in driver.children() if "elasticstate.agent" in child.cmdline()]
        assert agents
        return sum(int(process.memory_info().rss) for process in (driver, *agents))
