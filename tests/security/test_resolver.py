"""A resolver that does not answer, configured in a mount namespace of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounts need root and unshare")

PROGRAM = """
import asyncio, sys, time
from elasticstate.options import Options
from elasticstate.discovery import host_source
from elasticstate.discovery import Discovery
from elasticstate.launchers import HostLaunchers

async def main():
    loop = asyncio.get_running_loop()
    longest = 0.0

    async def tick():
        nonlocal longest
        while True:
            last = loop.time()
            await asyncio.sleep(0.01)
            longest = max(longest, loop.time() - last)

    ticking = asyncio.ensure_future(tick())
    await asyncio.sleep(0)
    options = Options(command=("true",), np=1, min_np=1, hosts=("localhost:1", "far:1", "farther:1"))
    began = loop.time()
    hosts = await Discovery(host_source(options), HostLaunchers(options).refuse, print).first()
    await asyncio.sleep(0.02)
    ticking.cancel()
    assert [host.name for host in hosts] == ["localhost", "far", "farther"], hosts
    print(loop.time() - began, longest)

asyncio.run(main())
"""


def test_a_resolver_that_does_not_answer_does_not_hold_the_event_loop_up(tmp_path: Path) -> None:
    """The names of this machine are resolved once, outside of the event loop."""
    files = {
        "resolv.conf": "nameserver 127.0.0.77\noptions timeout:1 attempts:1\n",
        "nsswitch.conf": "hosts: files dns\n",
        "hosts": "127.0.0.1 localhost\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    mounts = "".join(f'mount --bind "{tmp_path / name}" /etc/{name} && ' for name in files)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.77", 53))
        done = subprocess.run(
            [
                *("unshare", "--mount", "--propagation", "private", "sh", "-c", f'{mounts} exec "$@"', "sh"),
                *(sys.executable, "-c", PROGRAM),
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        silent.setblocking(False)
        assert silent.recv(512), "it was asked"
    took, longest = map(float, done.stdout.split())
    assert took > 1, "it did not answer"
    assert longest < 0.5
