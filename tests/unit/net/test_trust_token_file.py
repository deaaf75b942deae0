"""The token file must be as private as a private key of ssh."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticstate.errors import OptionError
from elasticstate.net.trust import make_token, read_token, token_of_job, write_token

NEEDS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can have a file of another user")
STRANGER = 65534


def token_file(path: Path, mode: int = 0o600) -> str:
    path.write_text(make_token() + "\n")
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o700])
def test_a_token_file_of_this_user_alone_is_read(tmp_path: Path, mode: int) -> None:
    path = token_file(tmp_path / "token", mode)
    assert read_token(path) == Path(path).read_text().strip()


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o610, 0o604, 0o602, 0o601, 0o644, 0o666])
def test_a_token_file_that_others_can_use_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    path = token_file(tmp_path / "token", mode)
    said = rf"its mode {mode:04o} lets other users .*chmod 600"
    with pytest.raises(PermissionError, match=said):
        read_token(path)
    with pytest.raises(OptionError, match=f"^--token-file: .*{said}"):
        token_of_job(path)


@NEEDS_ROOT
def test_a_token_file_of_another_user_is_refused(tmp_path: Path) -> None:
    """The owner may know the token, replace it, or change the mode of the file."""
    path = token_file(tmp_path / "token")
    os.chown(path, STRANGER, STRANGER)
    with pytest.raises(PermissionError, match="it belongs to user 65534"):
        read_token(path)


@NEEDS_ROOT
@pytest.mark.parametrize("mode", [0o400, 0o440, 0o640])
def test_a_token_file_of_root_that_a_group_of_this_user_reads_is_accepted(tmp_path: Path, mode: int) -> None:
    """Kubernetes mounts a Secret so, with the group ``fsGroup``."""
    readable = bool(mode & 0o040)
    done = read_as_stranger(tmp_path, mode)
    assert done.returncode == (0 if readable else 1), done.stderr
    assert ("t" * 40 in done.stdout) if readable else ("Permission denied" in done.stderr)


@NEEDS_ROOT
@pytest.mark.parametrize("mode", [0o460, 0o444])
def test_a_token_file_of_root_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    assert "it belongs to user 0, not to this user" in read_as_stranger(tmp_path, mode).stderr


def read_as_stranger(directory: Path, mode: int) -> subprocess.CompletedProcess[str]:
    """Read a token file of root and a group in a process of another user that is in this group."""
    directory.chmod(0o711)
    path = directory / "token"
    path.write_text("t" * 40)
    os.chown(path, 0, STRANGER)
    path.chmod(mode)
    program = (
        "import os, sys\nfrom elasticstate.net.trust import read_token\n"
        f"os.setgroups([]); os.setgid({STRANGER}); os.setuid({STRANGER})\n"
        "print(read_token('token'))"
    )
    return subprocess.run([sys.executable, "-c", program], cwd=directory, capture_output=True, text=True, timeout=60)


@pytest.fixture(params=[0o000, 0o022, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_a_new_token_file_has_mode_0600_under_any_umask(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "token"
    token = write_token(str(path))
    assert path.stat().st_mode & 0o7777 == 0o600
    assert read_token(str(path)) == token


def test_a_token_file_is_not_read_without_end(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    os.truncate(path, 1 << 40)  # sparse file
    with pytest.raises(ValueError, match="it contains no token"):
        read_token(str(path))
