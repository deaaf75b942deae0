"""The preemption commands for two clouds, against a server that behaves like their documented metadata services."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "preemption"
ACTION = {"action": "terminate", "time": "2026-09-18T08:22:00Z"}


class Metadata:
    """Both metadata services in one. ``answers``: path -> status and text, for requests with the required headers."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, str]] = {}
        self.refused: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                ttl = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
                is_asked_well = self.path == "/latest/api/token" and ttl.isdigit() and 1 <= int(ttl) <= 21600
                self.answer(*((200, "the-token") if is_asked_well else (400, "")))

            def do_GET(self) -> None:
                if self.path.startswith("/latest/"):
                    wanted, otherwise = ("X-aws-ec2-metadata-token", "the-token"), 401
                else:
                    wanted, otherwise = ("Metadata-Flavor", "Google"), 403
                if self.headers.get(wanted[0]) != wanted[1]:
                    outer.refused.append(self.path)
                    self.answer(otherwise, "")
                else:
                    self.answer(*outer.answers.get(self.path, (404, "not found")))

            def answer(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    made = Metadata()
    yield made
    made.close()
    assert made.refused == []


def asked(script: str, address: str) -> tuple[int, str, str]:
    """Run a preemption command against the service at this address. Return exit status, stdout and stderr."""
    environment = {
        **os.environ,
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{address}",
        "GCE_METADATA_HOST": address,
        "http_proxy": "http://127.0.0.1:1",  # must not be used for a service of the machine itself
    }
    command = [sys.executable, str(EXAMPLES / script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_a_spot_instance_without_notice(metadata: Metadata) -> None:
    assert asked("ec2.py", metadata.address) == (1, "", "")


def test_a_spot_instance_with_notice(metadata: Metadata) -> None:
    metadata.answers["/latest/meta-data/spot/instance-action"] = (200, json.dumps(ACTION))
    said = "spot instance: terminate at 2026-09-18T08:22:00Z\n"
    assert asked("ec2.py", metadata.address) == (0, said, "")


PREEMPTED = "/computeMetadata/v1/instance/preempted"
MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"


@pytest.mark.parametrize(
    ("preempted", "maintenance", "status", "said"),
    [
        ("FALSE", "NONE", 1, ""),
        ("FALSE", "MIGRATE_ON_HOST_MAINTENANCE", 1, ""),
        ("TRUE", "NONE", 0, "the VM is being preempted\n"),
        ("FALSE", "TERMINATE_ON_HOST_MAINTENANCE", 0, "the VM will be stopped for the maintenance of its host\n"),
    ],
)
def test_a_vm_of_compute_engine(metadata: Metadata, preempted: str, maintenance: str, status: int, said: str) -> None:
    metadata.answers = {PREEMPTED: (200, preempted), MAINTENANCE: (200, maintenance)}
    assert asked("gce.py", metadata.address) == (status, said, "")


@pytest.mark.parametrize("script", ["ec2.py", "gce.py"])
def test_a_service_that_is_not_there_is_an_error(script: str) -> None:
    metadata = Metadata()
    metadata.close()  # the port is closed now
    status, said, error = asked(script, metadata.address)
    assert (status, said) == (2, "")
    assert error.startswith("the metadata ser")
    assert "does not answer as expected: URLError(" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("script", "path", "answer"),
    [
        ("ec2.py", "/latest/meta-data/spot/instance-action", (500, "")),
        ("ec2.py", "/latest/meta-data/spot/instance-action", (200, "<html>")),
        ("ec2.py", "/latest/meta-data/spot/instance-action", (200, "[]")),
        ("ec2.py", "/latest/meta-data/spot/instance-action", (200, '{"action": "stop"}')),
        ("gce.py", PREEMPTED, (404, "")),
        ("gce.py", PREEMPTED, (503, "")),
        ("gce.py", PREEMPTED, (200, "<html>")),
    ],
)
def test_an_answer_that_is_none_is_an_error(
    metadata: Metadata, script: str, path: str, answer: tuple[int, str]
) -> None:
    metadata.answers[path] = answer
    status, said, error = asked(script, metadata.address)
    assert (status, said) == (2, "")
    assert "does not answer as expected" in error
    assert "Traceback" not in error
