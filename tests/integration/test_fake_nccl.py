"""Jobs on a fake of NCCL (scripts/fake_nccl.py), with real agents and workers, on a machine without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from forks import SCRIPTS
from job import Job
from scripts import fake_nccl

TORCH_2_15 = {"names": ["nccl-legacy", "nccl2", "nccl"], "nccl_is": "nccl2"}


class FakeJob(Job):
    """A job of train.py on the fake. ``fake``: its settings."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, *options: str, **fake: Any) -> None:
        self.notes = directory / "notes"
        self.notes.mkdir()
        script = [part for name in ("fault", "steps") if name in fake for part in ("--" + name, str(fake.pop(name)))]
        script += ["--log", str(directory / "logs")]
        backend = fake.pop("backend", "nccl")
        monkeypatch.setenv(fake_nccl.VARIABLE, json.dumps({"notes": str(self.notes), **fake}))
        super().__init__(
            directory,
            "--backend",
            backend,
            "--failure-grace",
            "0.5",
            *options,
            command=[sys.executable, str(SCRIPTS / "fake_nccl.py"), str(SCRIPTS / "train.py"), *script],
        )

    def noted(self, what: str) -> list[dict[str, Any]]:
        return fake_nccl.notes(self.notes, what)


@pytest.mark.parametrize(
    "fake", [{"names": ["nccl"]}, TORCH_2_15, {**TORCH_2_15, "backend": "nccl2"}], ids=["2.13", "2.15", "nccl2"]
)
def test_survivors_of_a_dead_member_keep_their_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: dict[str, Any]
) -> None:
    with FakeJob(tmp_path, monkeypatch, "-np", "3", fault="kill@20:rank=1", steps=40, **fake) as job:
        job.finish(0, timeout=90)
        job.check_survival(faults=1)
        assert len({e["pid"] for e in job.log("enter")}) == 4, job.output
