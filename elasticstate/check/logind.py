"""Deletion of a job's files by systemd-logind when its user logs out (logind.conf(5), RemoveIPC=)."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

_FIRST_USER_ID = 1000  # logind spares the IPC objects of root and of system users
_NO = {"no", "n", "false", "f", "off", "0"}
_PLACES = ("usr/lib", "usr/local/lib", "run", "etc")  # the last file that sets an option counts
_SHARED_MEMORY = "/dev/shm"


def deletion_note(base: str, uid: int, user: str, root: Path = Path("/")) -> str:
    """Return a warning with the remedy; "" if logind deletes no files of this user in ``base``."""
    real = os.path.realpath(base)
    if (
        uid < _FIRST_USER_ID
        or not (real + "/").startswith(_SHARED_MEMORY + "/")
        or not (root / "run/systemd/seats").is_dir()  # logind does not run here
        or (root / "var/lib/systemd/linger" / user).exists()
        or not _removes_ipc(root)
    ):
        return ""
    return (
        f"systemd-logind deletes all files of {user} there when the last session of {user} ends (RemoveIPC=yes). The "
        f"job continues, but is lost if all its processes end before its next commit. Use loginctl enable-linger "
        f"{user}, or RemoveIPC=no in /etc/systemd/logind.conf, or another --commit-dir."
    )


def name_of(uid: int) -> str:
    """Return the name of a user, or the number of a user without a name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _removes_ipc(root: Path) -> bool:
    mains = [root / place / "systemd/logind.conf" for place in _PLACES]
    more = [path for place in _PLACES for path in (root / place / "systemd/logind.conf.d").glob("*.conf")]
    found = True
    for path in (*mains, *sorted(more, key=lambda path: path.name)):
        for line in _lines(path):
            name, _, value = line.partition("=")
            if name.strip() == "RemoveIPC":
                found = value.strip().lower() not in _NO
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
