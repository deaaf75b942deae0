"""Files of checkpoints after a job has gone back to a commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticstate.lightning.strategy import CheckpointFiles


class Folder:
    """A folder, and the files of a job in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = CheckpointFiles("job 7")

    def write(self, name: str, text: str = "") -> None:
        path = self.path / "sub" / name
        self.files.write(str(path), is_writer=True)
        path.write_text(text or name)

    def remove(self, name: str) -> None:
        assert self.files.remove(str(self.path / "sub" / name), is_writer=True)

    def goes_back(self, commit: dict[str, object], *known: str) -> dict[str, str]:
        """Continue in a new process from a commit. Return the names and contents of all files."""
        self.files = CheckpointFiles("job 7")
        self.files.load_state_dict(commit)
        self.files.undo([str(self.path / "sub")], {str(self.path / "sub" / name) for name in known})
        return self.content()

    def content(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in (self.path / "sub").iterdir()}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_new_files_are_removed_and_removed_files_are_back(folder: Folder) -> None:
    folder.write("1.ckpt")
    commit = folder.files.state_dict()
    folder.write("2.ckpt")
    folder.remove("1.ckpt")
    assert sorted(path.name for path in (folder.path / "sub").glob("*.ckpt")) == ["2.ckpt"], "as without elasticstate"
    assert folder.goes_back(commit, "1.ckpt") == {"1.ckpt": "1.ckpt"}


def test_changes_before_the_commit_stay(folder: Folder) -> None:
    folder.write("1.ckpt")
    folder.write("2.ckpt")
    folder.remove("1.ckpt")
    assert folder.goes_back(folder.files.state_dict(), "2.ckpt") == {"2.ckpt": "2.ckpt"}


def test_the_first_change_of_a_file_since_the_commit_counts(folder: Folder) -> None:
    folder.write("best.ckpt", "old")
    commit = folder.files.state_dict()
    folder.remove("best.ckpt")
    for text in ("a", "b"):
        folder.write("best.ckpt", text)
        folder.write("other.ckpt", text)
        folder.remove("best.ckpt")
        folder.remove("other.ckpt")
    assert folder.goes_back(commit) == {"best.ckpt": "old"}


def test_a_file_that_is_overwritten_stays(folder: Folder) -> None:
    folder.write("last.ckpt", "old")
    commit = folder.files.state_dict()
    folder.write("last.ckpt", "new")
    folder.remove("last.ckpt")
    folder.write("last.ckpt", "newer")
    assert folder.goes_back(commit, "last.ckpt") == {"last.ckpt": "new"}


def test_nothing_is_left_of_what_is_settled(folder: Folder) -> None:
    folder.write("1.ckpt")
    folder.write("2.ckpt")
    count = folder.files.count
    folder.remove("1.ckpt")
    folder.files.settle(count)
    assert len(folder.content()) == 2
    folder.files.settle(folder.files.count)
    assert folder.content() == {"2.ckpt": "2.ckpt"}


def test_other_jobs_and_other_files_are_left_alone(folder: Folder) -> None:
    start = folder.files.state_dict()
    folder.write("1.ckpt")
    (folder.path / "sub" / "own.ckpt").write_text("own")
    other = CheckpointFiles("job 8")
    other.undo([str(folder.path / "sub"), str(folder.path / "missing"), "s3://bucket"], ())
    assert len(folder.content()) == 3
    assert folder.goes_back(start) == {"own.ckpt": "own"}


def test_directories_urls_and_other_ranks(folder: Folder) -> None:
    directory = folder.path / "sub" / "1.ckpt"
    commit = folder.files.state_dict()
    folder.files.write(directory, is_writer=True)
    directory.mkdir()
    (directory / "part").write_text("x")
    other = CheckpointFiles("job 7")
    other.write(directory, is_writer=False)
    other.write("s3://bucket/1.ckpt", is_writer=True)
    assert not other.remove("s3://bucket/1.ckpt", is_writer=True)
    assert other.state_dict() == folder.files.state_dict()
    assert folder.goes_back(commit) == {}


def test_without_a_job_nothing_is_kept(tmp_path: Path) -> None:
    files = CheckpointFiles(None)
    files.write(tmp_path / "1.ckpt", is_writer=True)
    assert not files.remove(tmp_path / "1.ckpt", is_writer=True)
    assert not list(tmp_path.iterdir())
