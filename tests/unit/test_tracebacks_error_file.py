"""Our error files are read by torch's tools, and torch's by us."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record

from elasticstate import tracebacks
from elasticstate.worker.record import ErrorHandler, record as our_record


def raised() -> ValueError:
    try:
        try:
            {}["x"]
        except KeyError as missing:
            raise ValueError("no") from missing
    except ValueError as error:
        return error
    raise AssertionError


def test_torch_reads_what_we_write(tmp_path: Path) -> None:
    path = str(tmp_path / "error")
    assert tracebacks.write(path, tracebacks.describe(raised(), 1_790_000_000_123_456_789, rank=3))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=path)
    assert failure.timestamp == 1_790_000_000
    assert "ValueError: no" in ChildFailedError("train", {0: failure}).format_msg()


def test_what_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "error"
    tracebacks.write(str(path), tracebacks.describe(raised(), 5, rank=3))
    content = json.loads(path.read_text())
    assert content["message"]["message"] == "ValueError: no"
    assert content["worker"] == {"chain": ["ValueError: no", "KeyError: 'x'"], "time_ns": 5, "rank": 3}
    found = tracebacks.read(str(path))
    assert found is not None
    assert found.time_ns == 5
    assert found.text == content["message"]["extraInfo"]["py_callstack"]


def test_we_read_what_torch_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))

    @record
    def main() -> None:
        raise ValueError("torch's")

    with pytest.raises(ValueError, match="torch's"):
        main()
    found = tracebacks.read(str(path))
    assert found is not None
    assert "ValueError: torch's" in found.text
    assert found.time_ns == path.stat().st_mtime_ns


def test_the_first_exception_is_the_one_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))

    @our_record
    def main() -> None:
        ErrorHandler().record_exception(KeyError("first"), 1)
        raise ValueError("later")

    with pytest.raises(ValueError, match="later"):
        main()
    found = tracebacks.read(str(path))
    assert found is not None
    assert found.time_ns == 1
    assert [file.name for file in tmp_path.iterdir()] == ["error"]
    tracebacks.forget(str(path))
    tracebacks.forget(str(path))
    assert tracebacks.read(str(path)) is None


class Mute(Exception):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()  # cannot be pickled

    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_exception_that_cannot_be_pickled_or_printed_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "error")
    assert tracebacks.write(path, tracebacks.describe(Mute(), 1))
    found = tracebacks.read(path)
    assert found is not None
    assert "Mute" in found.text


def test_a_handler_of_ones_own_says_more_and_its_faults_hide_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error"))

    class Ours(ErrorHandler):
        def describe(self, error: BaseException, time_ns: int, tick: int | None = None) -> dict[str, object]:
            return {**super().describe(error, time_ns, tick), "build": 7}

    class Broken(ErrorHandler):
        def record_exception(self, error: BaseException, time_ns: int, tick: int | None = None) -> None:
            raise OSError("disk")

    def main() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        our_record(error_handler=Broken())(main)()
    assert caplog.messages == ["the error handler failed, so the error is not recorded: OSError: disk"]
    with pytest.raises(ValueError, match="mine"):
        our_record(error_handler=Ours())(main)()
    assert json.loads((tmp_path / "error").read_text())["build"] == 7


@pytest.mark.parametrize(
    "content",
    ["", "no json", "[]", "{}", '{"message": 3}', '{"message": {}}', '{"message": {"message": "x"}, "worker": 1}'],
)
def test_rubbish_is_no_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "error"
    path.write_text(content)
    assert tracebacks.read(str(path)) is None


def test_a_text_that_is_too_long_keeps_its_ends(tmp_path: Path) -> None:
    path = str(tmp_path / "error")
    tracebacks.write(path, tracebacks.describe(ValueError("x" * 100_000), 1))
    found = tracebacks.read(path)
    assert found is not None
    assert len(found.text) <= 32 * 1024
    assert found.text.startswith("ValueError: xxx")
    assert "(cut: too long)" in found.text
