"""Fixtures for tests that start many scripts."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.kit import forks


@pytest.fixture
def template() -> forks.Template:
    """The process from which scripts fork."""
    return forks.template()


@pytest.fixture
def object_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a place in an object store that speaks the protocol of S3."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        monkeypatch.setenv("FSSPEC_S3", json.dumps({"endpoint_url": f"http://{host}:{port}"}))
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "testing")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        bucket = f"bucket-{secrets.token_hex(8)}"  # the buckets of earlier servers of this process exist, too
        make = f"import s3fs; s3fs.S3FileSystem(endpoint_url='http://{host}:{port}').mkdir('{bucket}')"
        subprocess.run([sys.executable, "-c", make], check=True, timeout=60)
        yield f"s3://{bucket}/run"
    finally:
        server.stop()
