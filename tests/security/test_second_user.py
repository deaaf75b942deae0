"""Another local user cannot make the job's owner execute code: the complete exploit, run by a real second user."""

from __future__ import annotations

import os
import shutil
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elasticstate.commits import CommitDirectory
from elasticstate.net.link import WorkerLink
from elasticstate.private import make_file, open_directory, open_file, read_file, write_file
from tests.kit.job import Job
from tests.kit.processes import has_ended
from tests.kit.second_user import AS_NOBODY, as_nobody, forge, logind_deletes, take_name, why_not
from tests.kit.strangers import Calm

REFUSED = "is not a private|[Ss]ymbolic|[Dd]irectory"

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture
def public(tmp_path: Path) -> Iterator[Path]:
    """A directory like /tmp that all users can access."""
    path = Path("/tmp", f"es-{uuid.uuid4().hex[:12]}")
    path.mkdir()
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


def commit_directory(job: Job) -> Path:
    worker = psutil.Process(job.pid_of(0))
    return Path(worker.environ()["ELASTICSTATE_COMMITS"]).parent


def kill_worker(job: Job) -> int:
    """Kill the only worker. Return the last step that it has committed."""
    generation = max(line["generation"] for line in job.log("enter"))
    os.kill(job.pid_of(0), signal.SIGKILL)
    step = max(line["step"] for line in job.log("commit"))
    return int(step) if generation else 0


def resumed_at(job: Job, generation: int) -> int:
    def entered() -> list[int]:
        return [line["step"] for line in job.log("enter") if line["generation"] == generation]

    (step,) = job.wait_for(f"generation {generation}", entered)
    return int(step)


def test_commits_that_another_user_has_planted_are_never_unpickled(tmp_path: Path, public: Path) -> None:
    marker = public / "executed"
    with Job(tmp_path, "-np", "1", steps=10, step_seconds=0.02, until=tmp_path / "stop") as job:
        job.wait_for_step(5)
        agent = psutil.Process(job.events("agent_joined")[0]["pid"])
        first = commit_directory(job)
        job_id = first.name.split("-")[2]
        forge(public / "forged", job_id, "localhost", [0], marker)
        planted = [first]
        try:
            # Between the deletion and the next check by the agent.
            agent.suspend()
            logind_deletes(first)
            assert take_name(first, public / "forged"), "the name is free, and visible"
            step = kill_worker(job)
            agent.resume()
            assert resumed_at(job, 2) >= step
            job.wait_for_event("warning")
            job.wait_for("a line about it", lambda: "another user has taken the name" in job.output)

            # After the agent has detected the deletion, and made a new directory.
            second = job.wait_for(
                "the copy", lambda: "was copied to" in job.output and first.with_name(f"{first.name}~1")
            )
            calm = Calm(job)
            logind_deletes(second)
            job.wait_for("the next copy", lambda: list(second.glob("*.control")))
            assert not take_name(second, public / "forged")
            assert as_nobody("ls", second).returncode != 0
            calm.check()

            # Between the start of the next worker and its request for the files.
            step = kill_worker(job)
            job.wait_for("the next worker", lambda: [p for p in agent.children() if not has_ended(p)])
            logind_deletes(second)
            if take_name(second, public / "forged"):
                planted.append(second)
            assert resumed_at(job, 3) >= step
            job.stop_file.touch()
            job.finish(0)
            job.check_survival()
        finally:
            for path in planted:
                shutil.rmtree(path, ignore_errors=True)
    assert not marker.exists()


def test_a_directory_that_is_exchanged_as_it_is_made_is_not_used(
    public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exchanged between mkdir and open. Without a sticky bit, other users may rename entries of the parent."""
    public.chmod(0o777)
    make, exchanged = Path.mkdir, []

    def make_and_lose(path: Path, *args: int, **kwargs: int) -> None:
        make(path, *args, **kwargs)
        if not exchanged:
            exchanged.append(path)
            as_nobody("mv", path, f"{path}.away").check_returncode()
            as_nobody("mkdir", "-m", "777", path).check_returncode()
            as_nobody("touch", path / "0.control").check_returncode()

    monkeypatch.setattr(Path, "mkdir", make_and_lose)
    directory = CommitDirectory(str(public), "c0ffee", "h", str(tmp_path), "/mark", 5.0, 300.0)
    assert exchanged == [public / "elasticstate-0-c0ffee-h"]
    assert directory.path.name == "elasticstate-0-c0ffee-h~1"
    assert directory.slots() == []
    directory.remove()


def test_planted_files_are_errors_and_never_followed(public: Path) -> None:
    victim = public / "victim"
    victim.write_text("precious")
    victim.chmod(0o600)
    folder = public / "mine"
    folder.mkdir(0o700)
    directory = open_directory(folder)
    plants = {
        "link": lambda path: path.symlink_to(victim),
        "hardlink": lambda path: os.link(victim, path),
        "fifo": lambda path: os.mkfifo(path, 0o600),
        "directory": lambda path: path.mkdir(0o700),
        "readable": lambda path: path.touch(0o644),
        "foreign": lambda path: (path.touch(0o600), os.chown(path, 65534, 65534)),
    }
    for name, plant in plants.items():
        plant(folder / name)
        with pytest.raises(OSError, match=REFUSED):
            open_file(directory, name, os.O_RDWR | os.O_CREAT)
        with pytest.raises(OSError, match=REFUSED):
            read_file(directory, name)
        if name != "directory":
            os.close(make_file(directory, name))
            write_file(directory, name, b"new")
            assert read_file(directory, name) == b"new", "in place of what was planted"
    assert victim.read_text() == "precious"
    os.close(directory)
    for path in (victim, public):
        with pytest.raises(OSError, match=REFUSED):
            open_directory(path)
    (public / "to mine").symlink_to(folder)
    with pytest.raises(OSError, match=REFUSED):
        open_directory(public / "to mine")


LISTEN = """
import socket, sys, time
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[1])
import os
os.chmod(sys.argv[1], 0o777)
listener.listen()
print("listens", flush=True)
time.sleep(600)
"""


def test_a_worker_speaks_with_no_agent_of_another_user(public: Path) -> None:
    path = public / "agent"
    imposter = psutil.Popen([*AS_NOBODY, "/usr/bin/env", "python3", "-c", LISTEN, str(path)], stdout=-1)
    try:
        deadline = time.monotonic() + 30
        while not path.exists() or path.stat().st_mode & 0o777 != 0o777:
            assert imposter.poll() is None
            assert time.monotonic() < deadline, "the imposter does not listen"
            time.sleep(0.01)
        with pytest.raises(PermissionError, match="belongs to user 65534"):
            WorkerLink(str(path)).connect()
    finally:
        imposter.kill()
        imposter.wait()
        imposter.stdout.close()
