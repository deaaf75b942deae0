"""Actions of another local user, and of systemd-logind, on the files of a job."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from elasticstate.commits import buffer_file, control_file, owner_of
from elasticstate.core.ids import CommitId
from elasticstate.state.snapshot import Snapshot
from tests.kit.pages import page_at

NOBODY = 65534
AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")


def why_not() -> str:
    """Return the reason why no second user is available here; "" if there is one."""
    if os.getuid() != 0:
        return "a process of another user can be started by root only"
    if shutil.which("setpriv") is None:
        return "there is no setpriv (util-linux) to start a process of another user"
    return ""


def as_nobody(*command: object) -> subprocess.CompletedProcess[str]:
    """Run a command as another user."""
    return subprocess.run([*AS_NOBODY, *map(str, command)], capture_output=True, text=True, timeout=60)


def logind_deletes(path: Path) -> None:
    """Delete a directory as systemd-logind does at the end of a user's last session (src/shared/clean-ipc.c).

    Depth first; each file and directory that belongs to the user, even while processes use it.
    """
    uid = os.getuid()
    for folder, _, files, fd in os.fwalk(path, topdown=False, follow_symlinks=False):
        for name in files:
            if os.stat(name, dir_fd=fd, follow_symlinks=False).st_uid == uid:
                os.unlink(name, dir_fd=fd)
        if os.fstat(fd).st_uid == uid:
            os.rmdir(folder)


class Payload:
    """An object whose unpickling makes a directory."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


class Forged:
    """Files of a slot, forged by an attacker who knows all that is visible, but not the job's key."""

    def __init__(self, folder: Path, job_id: str, host: str, slot: int) -> None:
        self.owner = owner_of(job_id, host, slot)
        self.key = b"the attacker's"
        self._files = [folder / buffer_file(slot, index) for index in (0, 1)]
        for file in self._files:
            file.touch()
        control = folder / control_file(slot)
        control.write_bytes(bytes(4096))
        self.page = page_at(control)

    def renew(self) -> None:
        raise AssertionError("these files keep their names")

    def open(self, index: int) -> torch.Tensor:
        size = self._files[index].stat().st_size
        return torch.from_file(str(self._files[index]), shared=True, size=size, dtype=torch.uint8)

    def grow(self, index: int, size_bytes: int) -> torch.Tensor:
        os.truncate(self._files[index], size_bytes)
        return self.open(index)


def forge(folder: Path, job_id: str, host: str, slots: Sequence[int], marker: Path) -> None:
    """Fill a folder with commits newer than all others. Their objects and random states are malicious pickles."""
    folder.mkdir()
    for slot in slots:
        snapshot = Snapshot(Forged(folder, job_id, host, slot))
        snapshot.write({"step": Payload(marker)}, pickle.dumps(Payload(marker)), CommitId(1_000_000, 1))
    for path in (folder, *folder.iterdir()):
        path.chmod(0o777)


def take_name(path: Path, forged: Path) -> bool:
    """Put forged files at a path, as another user. Returns False if the kernel forbids that."""
    done = as_nobody("mkdir", "-m", "777", path)
    if done.returncode == 0:
        as_nobody("cp", "-r", f"{forged}/.", path).check_returncode()
        as_nobody("chmod", "-R", "777", path).check_returncode()
    return done.returncode == 0
