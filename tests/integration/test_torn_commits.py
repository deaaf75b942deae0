"""Interrupted, damaged and random commit files: one whole commit always remains, and no wrong one is ever read."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from elasticstate import TorchState
from elasticstate._native import checksum
from elasticstate.commits import header_digest
from elasticstate.core.ids import CommitId
from elasticstate.errors import StateError
from elasticstate.state import rng
from elasticstate.state.base import committer_of
from elasticstate.state.snapshot import Snapshot
from tests.integration.scripts.torn_writers import OWNER, FileStorage
from tests.kit.pages import page_at
from tests.kit.state import read_commit

WRITERS = Path(__file__).parent / "scripts" / "torn_writers.py"
NAMES = ("control", "0.safetensors", "1.safetensors")


@pytest.fixture
def shared_memory(tmp_path: Path) -> Iterator[Path]:
    folder = Path("/dev/shm") / f"elasticstate-test-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


# ---------------------------------------------------------------------------------------------- interrupted commits


@pytest.mark.parametrize("wanted", [80, pytest.param(320, marks=pytest.mark.long)])
def test_after_a_kill_at_any_moment_of_a_commit_a_whole_one_is_there(shared_memory: Path, wanted: int) -> None:
    done = subprocess.run(
        [sys.executable, str(WRITERS), str(shared_memory), str(wanted), "7"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=True,
    )
    kills = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kills) == wanted
    for kill in kills:
        assert kill["signal"] == 9
        held = {int(tick): wrong for tick, wrong in kill["held"].items()}
        assert kill["newest"] in (kill["ended"], kill["begun"]), kill  # no commit whose commit() returned is lost
        assert held.keys() <= {kill["begun"], kill["ended"], kill["ended"] - 1}, kill
        assert all(wrong == [] for wrong in held.values()), kill
    inside = [kill for kill in kills if kill["begun"] > kill["ended"]]
    torn = [kill for kill in inside if len(kill["held"]) == 1]  # one buffer had lost its seal, and had no new seal yet
    print(f"{len(inside)} of {wanted} kills struck inside a commit, {len(torn)} while a buffer was being written")
    assert len(inside) >= 0.6 * wanted
    assert len(torn) >= 0.2 * wanted


def test_a_seal_that_is_half_written_is_none(tmp_path: Path) -> None:
    """A process that dies has written some words of a change, in order. The seal must be the old one or the new one."""
    path = tmp_path / "control"
    path.write_bytes(bytes(4096))
    page = page_at(path)
    images, seals = [path.read_bytes()], [page.sealed(0, OWNER)]
    changes = [
        lambda: page.seal(0, OWNER, 1, 1, 2, 3, 4),
        lambda: page.seal(0, OWNER, 2, 0, 2, 3, 4),  # the same bytes under a new id
        lambda: page.seal(0, OWNER, 3, 0, 2, 3, 4),
        lambda: page.unseal(0),
        lambda: page.seal(0, OWNER, 3, 1, 2, 3, 4),
    ]
    for change in changes:
        change()
        images.append(path.read_bytes())
        seals.append(page.sealed(0, OWNER))
    cut = tmp_path / "cut"
    for step in range(len(changes)):
        before, after = (np.frombuffer(image, dtype=np.uint64) for image in images[step : step + 2])
        words = np.flatnonzero(before != after)
        if seals[step + 1] is None:  # the deciding word, here the first one, is cleared last
            words = np.roll(words, len(words) // 2)
        for n in range(len(words) + 1):
            image = before.copy()
            image[words[:n]] = after[words[:n]]
            cut.write_bytes(image.tobytes())
            assert page_at(cut).sealed(0, OWNER) in (seals[step], seals[step + 1]), (step, n)


# ---------------------------------------------------------------------------------------------------- damaged files


def a_state(tick: int) -> TorchState:
    """Return a state so small that some thousand random bits cover a good part of it."""
    generator = torch.Generator().manual_seed(tick)
    model = torch.nn.Linear(20, 10)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator))
    return TorchState(model=model, many=torch.arange(100) * tick, odd=torch.ones(7, dtype=torch.bool), note=[tick])


def content_of(state: TorchState) -> list[bytes]:
    return [parameter.detach().numpy().tobytes() for parameter in state.model.parameters()] + [
        state.many.numpy().tobytes(),
        state.odd.numpy().tobytes(),
        repr(state.note).encode(),
    ]


@pytest.fixture
def sealed(tmp_path: Path) -> FileStorage:
    """Storage with the commits (1, 1) and (1, 2)."""
    storage = FileStorage(tmp_path / "slot")
    snapshot = Snapshot(storage)
    for tick in (1, 2):
        snapshot.write(a_state(tick).capture(), rng.capture(), CommitId(1, tick))
    return storage


def images_of(storage: FileStorage) -> dict[str, np.ndarray]:
    """Return writable maps of the three files."""
    return {name: np.memmap(storage.file(name), dtype=np.uint8, mode="r+") for name in NAMES}


def lengths_of(storage: FileStorage) -> list[int]:
    seals = [storage.page.sealed(index, OWNER) for index in (0, 1)]
    assert None not in seals
    return [seal[3] for seal in seals if seal is not None]


@pytest.mark.parametrize("flips", [2_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_no_bit_of_a_commit_can_change_unnoticed(
    sealed: FileStorage, caplog: pytest.LogCaptureFixture, flips: int
) -> None:
    older, newer = CommitId(1, 1), CommitId(1, 2)  # in buffer 0, in buffer 1
    expected = {commit: content_of(a_state(commit.tick)) for commit in (older, newer)}
    images, lengths = images_of(sealed), lengths_of(sealed)
    pristine_page = images["control"].copy()
    state = a_state(9)
    chance = random.Random(11)
    seals_lost = 0
    for _ in range(flips):
        name = chance.choice(NAMES)
        at = chance.randrange(images[name].size if name == "control" else lengths[int(name[0])])
        bit = 1 << chance.randrange(8)
        images[name][at] ^= bit
        committer_of(state).use_storage(sealed)
        assert committer_of(state).resume()
        newest, previous = state.commits
        assert content_of(state) == expected[newest]
        if name == "control":
            seals_lost += previous is None
        elif name == "1.safetensors":
            assert (newest, previous) == (older, None), (name, at, bit)
        elif previous is not None:  # the older buffer has not been read yet
            assert (newest, previous) == (newer, older)
            with pytest.raises(StateError, match="damaged"):
                read_commit(committer_of(state).snapshot, older)
        images[name][at] ^= bit
        images["control"][:] = pristine_page
        caplog.clear()
    assert flips / 500 < seals_lost < flips / 10  # most of the page is not part of a seal


# ----------------------------------------------------------------------------------------------------- random files


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files of a commit storage with two commits."""
    storage = FileStorage(tmp_path_factory.mktemp("whole") / "slot")
    snapshot = Snapshot(storage)
    for tick in (1, 2):
        snapshot.write(a_state(tick).capture(), rng.capture(), CommitId(1, tick))
    return {name: storage.file(name).read_bytes() for name in NAMES}


def read_all(folder: Path, files: dict[str, bytes]) -> dict[int, list[bytes]]:
    """Return the commits that a new worker finds in these files: their content by tick."""
    for name in NAMES:
        (folder / f"slot.{name}").write_bytes(files[name])
    snapshot = Snapshot(FileStorage(folder / "slot"))
    held = {}
    for commit in (snapshot.newest, snapshot.previous):
        if commit is None:
            continue
        state = a_state(9)
        try:
            values = read_commit(snapshot, commit)
            for name in values.entries:
                values[name]
            state.apply(values)
        except StateError:
            continue
        held[commit.tick] = content_of(state)
    return held


fuzz = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
changes = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 40), st.binary(max_size=40)), min_size=1, max_size=4)


def changed(data: bytes, edits: list[tuple[float, int, bytes]], within: int) -> bytes:
    """Replace runs of bytes among the first ``within``. The rest keeps its place if the lengths are equal."""
    for where, length, new in edits:
        at = int(where * within)
        data = data[:at] + new + data[at + length :]
    return data


@fuzz
@given(st.lists(st.binary(max_size=9000), min_size=3, max_size=3))
def test_rubbish_is_no_commit(tmp_path: Path, whole: dict[str, bytes], rubbish: list[bytes]) -> None:
    page, *buffers = rubbish
    assert read_all(tmp_path, dict(zip(NAMES, [page.ljust(4096, b"\0"), *buffers], strict=True))) == {}
    assert read_all(tmp_path, dict(zip(NAMES, [whole["control"], *buffers], strict=True))) == {}


@fuzz
@given(st.sampled_from(NAMES[1:]), changes, st.integers(0, 100))
def test_of_changed_files_only_what_is_whole_is_read(
    tmp_path: Path, whole: dict[str, bytes], name: str, edits: list[tuple[float, int, bytes]], cut: int
) -> None:
    data = changed(whole[name], edits, 6000)
    held = read_all(tmp_path, {**whole, name: data[: len(data) - cut * cut]})
    expected = {tick: content_of(a_state(tick)) for tick in (1, 2)}
    assert held.items() <= expected.items()
    other = 2 - int(name[0])
    assert other in held


@fuzz
@given(changes)
def test_a_header_of_nonsense_crashes_nothing_even_with_a_right_seal(
    tmp_path: Path, whole: dict[str, bytes], edits: list[tuple[float, int, bytes]]
) -> None:
    """All checksums match. Impossible offsets, shapes and dtypes must be detected before any access to memory."""
    data = whole["0.safetensors"]
    room = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + room].rstrip(b" ")
    text = changed(text, edits, len(text))[:room].ljust(room)
    data = data[:8] + text + data[8 + room :]
    (tmp_path / "slot.control").write_bytes(bytes(4096))
    page = page_at(tmp_path / "slot.control")
    buffer = np.frombuffer(data, dtype=np.uint8)
    length = 8 + room + (len(data) - 8 - room) // 2
    page.seal(0, OWNER, 1, 1, header_digest(data[: 8 + room]), length, checksum(buffer, 0, length))
    control = (tmp_path / "slot.control").read_bytes()
    read_all(tmp_path, {"control": control, "0.safetensors": data, "1.safetensors": b""})
