"""Report lines for this machine: ssh, commit storage, ports, open files."""

from __future__ import annotations

import dataclasses
import os
import pwd
import resource
import shlex
import shutil
from pathlib import Path

from elasticstate import commits, processes
from elasticstate.check import Line, last_line
from elasticstate.machine import format_bytes
from elasticstate.net.names import LOCALHOST, listen_error, own_addresses
from elasticstate.options.kinds import split_address

# --------------------------------------------------------------------------------------------------------------- logind
# Deletion of a job's files by systemd-logind when its user logs out (logind.conf(5), RemoveIPC=).


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


_SMALL_BYTES = 1 << 30
_FEW_FILES = 4096
_IN_MEMORY = {"tmpfs", "ramfs", "hugetlbfs"}


async def ssh_line(timeout_s: float) -> Line:
    """Return the line for the ssh client that connects to other hosts."""
    path = shutil.which("ssh")
    if path is None:
        return Line(False, "ssh", "install OpenSSH's client, to start agents on other hosts")
    try:
        answer = await processes.ask(shlex.join([path, "-V"]), timeout_s)
    except (OSError, TimeoutError) as error:
        return Line(False, f"ssh ({path}): {error}")
    version = last_line(answer.stderr) or last_line(answer.stdout)
    return Line(answer.exit_code == 0, f"ssh: {version} ({path})" if version else f"ssh ({path})")


def commit_line(base: str) -> Line:
    """Return the line for the commit directory: its file system, size and free space."""
    if reason := commits.refuse(base):
        return Line(False, f"--commit-dir {base}: {reason}", "choose another --commit-dir")
    found = os.statvfs(base)
    kind = file_system(base, Path("/proc/self/mountinfo").read_text())
    line = shared_memory_line(base, kind, found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)
    note = deletion_note(base, os.getuid(), name_of(os.getuid()))
    return dataclasses.replace(line, notes=(*line.notes, note)) if note else line


def shared_memory_line(base: str, kind: str, size_bytes: int, free_bytes: int) -> Line:
    """Return the line for a commit directory on a file system of type ``kind``."""
    notes = []
    if free_bytes < _SMALL_BYTES:
        notes.append(
            "low space: each worker needs twice the size of its state. Use docker run --shm-size=16g, "
            f"mount -o remount,size=16g {base}, or another --commit-dir."
        )
    if kind not in _IN_MEMORY:
        notes.append("not in memory: each commit waits for the file system. Use a directory in /dev/shm.")
    text = f"--commit-dir {base}: {kind}, {format_bytes(free_bytes)} of {format_bytes(size_bytes)} free"
    return Line(True, text, notes=tuple(notes))


def file_system(path: str, mounts: str) -> str:
    """Return the type of a directory's file system: that of the last deepest mount in proc_pid_mountinfo(5)."""
    place = os.path.realpath(path)
    best, kind = -1, "unknown"
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        point = before.split()[4].encode().decode("unicode_escape")
        if len(point) >= best and (place + "/").startswith(point.rstrip("/") + "/"):
            best, kind = len(point), after.split()[0]
    return kind


def port_lines(listen: str | None) -> list[Line]:
    """Return the lines for the addresses on which this process can listen: for agents, and for ``--listen``."""
    places = [(address, 0) for address in (LOCALHOST, *own_addresses())]
    lines = [_port_line("", *place) for place in places]
    if listen is not None:
        lines.append(_port_line("--listen: ", *split_address(listen)))
    return lines


def _port_line(name: str, address: str, port: int) -> Line:
    shown = f"{name}ports of {address}" if not port else f"{name}port {port} of {address}"
    reason = listen_error(address, port)
    return Line(not reason, f"{shown}: {f'cannot listen ({reason})' if reason else 'can listen'}")


def files_line() -> Line:
    """Return the line for the limit on open files. Agents and workers raise it as far as they may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_few = most != resource.RLIM_INFINITY and most < _FEW_FILES
    note = "low limit: each process group of a worker opens one file for each other worker. Raise ulimit -Hn."
    shown = "unlimited" if most == resource.RLIM_INFINITY else str(most)
    return Line(True, f"open files: {shown} for each process", notes=(note,) if is_few else ())
