"""The warning before a job begins that systemd-logind would delete commits."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticstate.check.local import deletion_note, name_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The root directory of a machine on which logind runs with its defaults."""
    (tmp_path / "run/systemd/seats").mkdir(parents=True)
    (tmp_path / "var/lib/systemd/linger").mkdir(parents=True)
    (tmp_path / "etc/systemd/logind.conf.d").mkdir(parents=True)
    return tmp_path


def note(root: Path, base: str = "/dev/shm", uid: int = 1000) -> str:
    return deletion_note(base, uid, "ann", root)


def test_the_remedies_are_named_where_commits_would_be_deleted(root: Path) -> None:
    assert "loginctl enable-linger ann, or RemoveIPC=no in /etc/systemd/logind.conf" in note(root)


def test_nothing_is_said_where_nothing_is_deleted(root: Path, tmp_path: Path) -> None:
    assert note(root, uid=0) == note(root, uid=999) == "", "root and system users"
    assert note(root, base=str(tmp_path)) == note(root, base="/dev/shmooze") == "", "no shared memory"
    (root / "var/lib/systemd/linger/ann").touch()
    assert note(root) == ""
    (root / "var/lib/systemd/linger/ann").unlink()
    (root / "run/systemd/seats").rmdir()
    assert note(root) == "", "no logind"


def test_the_last_word_of_the_configuration_counts(root: Path) -> None:
    conf = root / "etc/systemd/logind.conf"
    conf.write_text("[Login]\n#RemoveIPC=yes\nRemoveIPC = no\n")
    assert note(root) == ""
    (conf.parent / "logind.conf.d/50-site.conf").write_text("[Login]\nRemoveIPC=yes\n")
    assert note(root) != ""


def test_a_user_without_a_name_has_a_number() -> None:
    assert (name_of(0), name_of(4_000_000)) == ("root", "4000000")
