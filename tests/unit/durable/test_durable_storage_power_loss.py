"""StoredCopies on a disk that loses power at any operation: the newest complete one is found, and never a torn one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from elasticstate.durable import stored_copies
from elasticstate.durable.durable_storage import Directory
from elasticstate.durable.parts import cut
from elasticstate.durable.stored_copies import DamagedCopyError, copy_name, milliseconds_of
from elasticstate.durable.upload import upload
from tests.kit.durable import Sent, commit_of, order
from tests.unit.durable.disk import Disk, PowerLoss

COMMITS = [commit_of({"weight": torch.full((3,), float(n)), "step": n}) for n in range(8)]
PLACE = "/disk/run"


def save(disk: Disk, number: int, keep: int, earlier: tuple[str, ...] = ()) -> Sent:
    sent = Sent()
    commit = COMMITS[number % len(COMMITS)]
    upload(order(number, commit, keep, earlier), memoryview(commit), Directory(PLACE, disk), sent)
    return sent


def read(disk: Disk, name: str) -> bytes:
    """Return the commit in a copy. Raises DamagedCopyError."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_copies, "open_storage", lambda place, owners: Directory(place, disk))
        stored = stored_copies.StoredCopies(PLACE, 5.0)
        part = stored.manifest(name).parts[0]
        return stored.file(name, part.head) + b"".join(stored.data(name, part)) + stored.file(name, part.objects)


def newest(disk: Disk) -> int | None:
    """Return the number of the newest copy that is intact; its commit must be the one that was saved."""
    for name in sorted((name for name in Directory(PLACE, disk).folders()), reverse=True):
        number = milliseconds_of(name)
        assert number is not None, name
        try:
            found = read(disk, name)
        except DamagedCopyError:
            continue
        assert found == COMMITS[number % len(COMMITS)], f"copy {number} is torn"
        return number
    return None


def operations_of_a_save(keep: int) -> int:
    """Return the operations of a save that also removes an old copy."""
    disk = Disk()
    for number in range(keep):
        save(disk, number, keep)
    before = disk.operations
    save(disk, keep, keep)
    return disk.operations - before


OPERATIONS = operations_of_a_save(keep=2)


def test_power_fails_before_each_operation_of_a_save() -> None:
    assert OPERATIONS > 20
    found = set()
    for fails_after in range(OPERATIONS):
        for part in (0.0, 0.5, 1.0):
            disk = Disk()
            for number in range(2):
                save(disk, number, keep=2)
            disk.fails_after, disk.operations = fails_after, 0
            with pytest.raises(PowerLoss):
                save(disk, 2, keep=2)
            disk.lose_power(lambda n, part=part: int(n * part))  # type: ignore[misc]
            found.add(newest(disk))
            assert newest(disk) in (1, 2)
            assert save(disk, 3, keep=2).last.is_saved
            assert newest(disk) == 3
    assert found == {1, 2}, "the power must fail before and after the manifest"


@settings(max_examples=100)
@given(st.data())
def test_random_programs_of_saves_losses_of_power_and_of_files(data: st.DataObject) -> None:
    disk, keep = Disk(), data.draw(st.integers(1, 3), "keep")
    kept: dict[int, bool] = {}  # copies that must be there, the oldest first; False: a byte of it has changed
    for number in range(data.draw(st.integers(1, 12), "steps")):
        what = data.draw(st.sampled_from(["save", "save", "crash", "lose", "damage"]), "what")
        intact = [n for n, is_intact in kept.items() if is_intact]
        if what in ("save", "crash"):
            disk.fails_after = data.draw(st.integers(0, OPERATIONS), "fails after") if what == "crash" else None
            disk.operations = 0
            try:
                save(disk, number, keep)
                is_saved = True
            except PowerLoss:
                disk.lose_power(lambda n: n * data.draw(st.integers(0, 4), "quarters") // 4)
                is_saved = newest(disk) == number
                assert is_saved or newest(disk) == (intact[-1] if intact else None)
            if is_saved:
                kept = dict([*kept.items(), (number, True)][-keep:])
        elif intact:
            files = sorted(path for path in disk.files() if copy_name(intact[-1]) in path)
            path = data.draw(st.sampled_from(files), "file")
            if what == "lose":
                disk.lose(path)
                del kept[intact[-1]]
            else:
                disk.damage(path, data.draw(st.integers(0, 1 << 16), "at"))
                kept[intact[-1]] = False
        intact = [n for n, is_intact in kept.items() if is_intact]
        if intact:
            assert newest(disk) == intact[-1]


def test_a_copy_that_the_storage_has_lost_is_reported_by_the_next_upload() -> None:
    disk = Disk()
    save(disk, 1, keep=3)
    assert save(disk, 2, 3, (copy_name(1),)).last.lost == ""
    disk.lose(f"{PLACE}/{copy_name(2)}/part-1.safetensors")
    assert newest(disk) == 1
    sent = save(disk, 3, 3, (copy_name(2),))
    assert sent.last.is_saved
    assert "part-1.safetensors is missing" in sent.last.lost
    assert newest(disk) == 3


def test_copies_before_the_newest_ones_are_removed_and_nothing_else() -> None:
    disk = Disk()
    save(disk, 0, keep=2)
    disk.make_directory(f"{PLACE}/notes")
    disk.write(f"{PLACE}/notes/mine", [b"text"])
    for number in range(1, 5):
        save(disk, number, keep=2)
    assert Directory(PLACE, disk).folders() == [copy_name(3), copy_name(4), "notes"]


def test_what_failed_attempts_have_left_is_removed_before_the_next_one() -> None:
    disk = Disk()
    save(disk, 1, keep=3)
    for number in (2, 3):  # the processes were killed
        disk.write(f"{PLACE}/{copy_name(number)}/part-1.head", [b"half of it"])
        disk.make_directory(f"{PLACE}/{copy_name(number)}")
    disk.damage(f"{PLACE}/{copy_name(1)}/part-1.head", 0)
    commit = memoryview(COMMITS[0])
    with pytest.raises(ValueError, match="no header"):
        upload(order(4, COMMITS[0]), memoryview(bytes(len(commit))), Directory(PLACE, disk), Sent())
    assert Directory(PLACE, disk).folders() == [copy_name(1)], "complete copies stay, whatever their bytes are"


def test_the_parts_of_a_commit_are_found() -> None:
    found = cut(memoryview(COMMITS[1]))
    assert 8 < found.random < found.tensors < found.objects < len(COMMITS[1])
    with pytest.raises(ValueError, match="no header"):
        cut(memoryview(bytes(100)))
