"""Strangers at the ports of the dashboard and the metrics, of one job that trains while nobody reads its stderr.

Each attack comes from another user of the machine over the loopback interface, and from a stranger who has only
another address of the machine. During each, the driver answers, replaces a killed worker, takes little memory, and
writes few lines.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import select
import socket
import struct
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import psutil

from elasticstate.net.control import ask_status
from elasticstate.net.names import free_port, own_addresses
from tests.kit.job import Hosts, Job
from tests.kit.strangers import STRANGER, Attack, Attacker, connect

DESCRIPTORS = 4096
MALFORMED, HALF, VIEWERS, STREAMS = 2000, 5000, 40, 1000  # of all strangers at all ports together
MOST_LINES = 100
ANSWER_S = 1.0
FAST = ("--join-window", "30", "--min-interrupt-distance", "0.2", "--cooldown-range", "0", "0")


class Ports:
    """A job with a dashboard and metrics, whose stderr is a pipe of 4 kB."""

    def __init__(self, tmp_path: Path) -> None:
        self.dashboard, self.metrics = free_port(), free_port()
        fifo = tmp_path / "stderr"
        os.mkfifo(fifo)
        self._stderr = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
        fcntl.fcntl(self._stderr, fcntl.F_SETPIPE_SZ, 4096)
        limits = ("prlimit", f"--nofile={DESCRIPTORS}:{DESCRIPTORS}")
        within = (*limits, "sh", "-c", f'exec "$@" 2> {fifo}', "sh")
        options = ("-np", "2", "--min-np", "1", *Hosts(tmp_path).set("localhost:2").options, *FAST)
        options = (*options, "--heartbeat-timeout", "3", "--dashboard", f"0.0.0.0:{self.dashboard}")
        options = (*options, "--metrics", f"0.0.0.0:{self.metrics}")
        self.job = Job(tmp_path, *options, within=within, until=tmp_path / "stop", steps=10, step_seconds=0.03)
        self.restarts = 0

    def close(self) -> None:
        os.close(self._stderr)

    def begun(self) -> None:
        self.job.wait_for_step(3)
        record = json.loads(next(Path(os.environ["XDG_RUNTIME_DIR"]).glob("*/driver.json")).read_text())
        self.control, self.token = record["ports"][0], record["token"]
        self.driver = psutil.Process(self.job.process.pid)
        for port in (self.dashboard, self.metrics):  # everything that is imported and made once
            get(f"http://127.0.0.1:{port}/")
        self.usual_bytes = self.driver.memory_info().rss

    def read_lines(self) -> int:
        """Read what the driver has written and still writes. Return the number of lines."""
        data = b""
        while select.select([self._stderr], [], [], 0.5)[0]:
            data += os.read(self._stderr, 1 << 16)
        assert b"Traceback" not in data, data.decode()[-4000:]
        return data.count(b"\n")

    @contextmanager
    def attacked(self, name: str, *attacks: tuple[Attack, int]) -> Iterator[None]:
        """Attack ports, check the job meanwhile, and count the lines afterwards."""
        self.read_lines()
        begin = time.monotonic()
        with ExitStack() as stack:
            crowd = [
                stack.enter_context(Attacker(attack, host, port, user))
                for attack, port in attacks
                for host, user in (("127.0.0.1", STRANGER if os.getuid() == 0 else None), (stranger_at(), None))
            ]
            answered_s = [self.status_s()]
            self.replace_a_worker()
            answered_s.append(self.status_s())
            for attacker in crowd:
                attacker.count()
            answered_s.append(self.status_s())
            yield
            used = self.driver.memory_info().rss
        lines, lasted = self.read_lines(), time.monotonic() - begin
        said = (
            f"{name}: {lasted:.1f} s, answers after {', '.join(f'{s:.2f}' for s in answered_s)} s, "
            f"{used / 1e6:.0f} MB instead of {self.usual_bytes / 1e6:.0f}, {lines} lines"
        )
        print(said)
        assert max(answered_s) < ANSWER_S, said
        assert used < 2 * self.usual_bytes, said
        assert lines <= MOST_LINES, said

    def status_s(self) -> float:
        """Ask for the status as ``elasticrun status`` does. Return how long the answer took."""
        begin = time.monotonic()
        assert "generation" in asyncio.run(ask_status(f"127.0.0.1:{self.control}", self.token, 30))
        return time.monotonic() - begin

    def replace_a_worker(self) -> None:
        self.job.kill(1)
        self.restarts += 1
        world = self.job.wait_for_event("world_formed", 1 + self.restarts, size=2)
        self.job.wait_for_event("training_resumed", generation=world["generation"])


def stranger_at() -> str:
    return next(iter(own_addresses()), "127.0.0.1")


def get(url: str, **headers: str) -> int:
    """Return the status of the answer; a stream is closed after that."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


# ------------------------------------------------------------------------------------------------------- the attacks

TWO_HOSTS = b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"
BAD_ACCEPT = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: application/openmetrics-text;version=x\r\n\r\n"
HALF_REQUEST = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: "
RESET = struct.pack("ii", 1, 0)


def malformed(number: int, request: bytes) -> Attack:
    """Send malformed requests one after the other; reset each fourth connection instead of reading the answer."""

    def malformed_requests(host: str, port: int) -> int:
        for index in range(number):
            with connect(host, port) as stranger, suppress(ConnectionError):
                stranger.sendall(request)
                if index % 4:
                    stranger.recv(1 << 16)
                else:
                    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        return number

    return malformed_requests


def held(number: int, request: bytes) -> Attack:
    """Send requests, read nothing, and hold the connections."""

    def held_connections(host: str, port: int) -> int:
        kept = []
        for _ in range(number):
            stranger = connect(host, port)
            kept.append(stranger)
            with suppress(ConnectionError):
                stranger.sendall(request)
        globals()["_kept"] = kept
        return number

    return held_connections


def stream(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()


async def proxy(there: int, asked: list[int]) -> None:
    """Be nginx with nothing but ``proxy_pass``: HTTP/1.0, Host is the upstream's, and no header of its own."""

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        upstream, to = await asyncio.open_connection("127.0.0.1", there)
        to.write(f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1:{there}\r\nConnection: close\r\n\r\n".encode())
        asked.append(int((await upstream.readline()).split()[1]))
        for each in (to, writer):
            each.close()

    server = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for path in ("/events", "/output?slot=localhost:0") * 50:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: job.example.com\r\n\r\n".encode())
        await reader.read()
        writer.close()
    server.close()


def test_strangers_at_the_web_ports_disturb_no_job(tmp_path: Path) -> None:
    with closing(Ports(tmp_path)) as ports, ports.job as job:
        ports.begun()
        page, metrics = f"http://127.0.0.1:{ports.dashboard}", f"http://127.0.0.1:{ports.metrics}/metrics"
        token = {"Authorization": f"Bearer {ports.token}"}

        two_hosts, bad_accept = malformed(MALFORMED // 4, TWO_HOSTS), malformed(MALFORMED // 4, BAD_ACCEPT)
        with ports.attacked("malformed requests", (two_hosts, ports.dashboard), (bad_accept, ports.metrics)):
            assert get(metrics) == get(page) == 200

        half = held(HALF // 4, HALF_REQUEST)
        with ports.attacked("half requests", (half, ports.dashboard), (half, ports.metrics)):
            assert ports.driver.num_fds() < DESCRIPTORS // 4 + 200
            assert get(metrics) == get(page) == get(page + "/events") == 200

        silent = held(VIEWERS // 2, stream("/events"))
        with ports.attacked("silent viewers", (silent, ports.dashboard)):
            assert get(page + "/events") == get(page + "/events", **token) == 200

        many = held(STREAMS // 4, stream("/events")), held(STREAMS // 4, stream("/output?slot=localhost:0"))
        with ports.attacked("streams", *((attack, ports.dashboard) for attack in many)):
            assert get(page + "/events") == get(page + "/output?slot=localhost:0", **token) == 200

        with ports.attacked("a proxy"):
            answers: list[int] = []
            asyncio.run(proxy(ports.dashboard, answers))
            assert answers == [401] * 100

        job.stop_file.touch()
        job.finish()
        job.check_survival()
        assert not job.events("agent_lost")
