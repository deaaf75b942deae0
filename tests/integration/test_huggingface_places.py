"""A host whose slot 0 is missing has one local main process all the same, and the global batch stays that of -np."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.kit.forks import SCRIPTS
from tests.kit.job import Job

WITH_TRAINER = pytest.mark.skipif(find_spec("transformers") is None, reason="Transformers requires Python 3.11")
OPTIONS = ("--join-window", "4", "--min-interrupt-distance", "0.2", "--min-np", "1")


@pytest.mark.parametrize("kind", ["accelerator", pytest.param("trainer", marks=WITH_TRAINER)])
def test_one_worker_is_local_main_while_slot_0_is_missing(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    train = [sys.executable, str(SCRIPTS / "huggingface_places.py"), str(tmp_path), kind]
    with Job(tmp_path, "-np", "3", *OPTIONS, "--preload", f"elasticstate.huggingface.{kind}", command=train) as job:
        job.finish(0)
    found = re.findall(r"world (\d): slot (\d) place (\d) of (\d) main (\w+)", job.output)
    worlds = {int(line[0]) for line in found}
    assert worlds >= {2, 3}
    for world in worlds - {1}:
        members = {int(slot): (int(place), main) for g, slot, place, _, main in found if int(g) == world}
        slots = [1, 2] if world == 2 else [1, 2, 0]  # by age
        assert members == {slot: (place, str(place == 0)) for place, slot in enumerate(slots)}
    if kind == "accelerator":
        assert re.findall(r"world 2: printed by slot (\d)", job.output) == ["1"]
        assert set(re.findall(r"world 2: bar of slot (\d)", job.output)) == {"1"}
    else:
        assert set(re.findall(r"localhost:(\d)\] \{'loss':", job.output)) == {"1"}
    assert set(re.findall(r"global batch .*", job.output)) == {"global batch 6 = 2 x 1 x 3 workers"}
