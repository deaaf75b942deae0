"""Durable copies of a sharded model, through real jobs: faults while they are saved, and all memory lost."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from elasticstate.durable.stored_copies import MANIFEST, milliseconds_of
from tests.kit.durable_job import FAST, damage, processes_of, saved, wait_for_copies
from tests.kit.job import Job, Line

SCRIPT = Path(__file__).parents[1] / "multihost" / "scripts" / "sharded.py"
PARAMETERS = ("scale", "frozen", "tokens.weight", "up.weight", "up.bias", "down.weight", "down.bias")
READER = """
import sys, torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader

path, out = sys.argv[1:]
found = HuggingFaceStorageReader(path).read_metadata().state_dict_metadata
values = {name: torch.full(item.size, 7, dtype=item.properties.dtype) for name, item in found.items()}
dcp.load(values, storage_reader=HuggingFaceStorageReader(path), no_dist=True)
torch.save(values, out)
assert "elasticstate" not in sys.modules
"""


def train(folder: Path, place: Path | str, workers: int, how: str, *options: str) -> Job:
    """Start a job that trains until the file ``stop`` exists."""
    folder.mkdir()
    script = ["--log", str(folder / "logs"), "--how", how, "--step-seconds", "0.05", "--steps", "1"]
    script += ["--until", str(folder / "stop")]
    return Job(
        folder,
        *("-np", str(workers), "-H", "localhost:2,127.0.0.2:2", "--cooldown-range", "0", "0", "--replicas", "0"),
        *("--durable-dir", str(place), *FAST, *options),
        command=[sys.executable, str(SCRIPT), *script],
    )


def digests(job: Job) -> dict[int, set[str]]:
    """Return the digests of all full tensors after each step."""
    found: dict[int, set[str]] = {}
    for line in job.log("step"):
        if line["digest"]:  # of rank 0
            found.setdefault(line["step"], set()).add(line["digest"])
    return found


def entered(job: Job, size: int, after: int = 0) -> tuple[int, int, str]:
    """Wait until a world later than ``after`` has its values. Return generation, step, and digest of its tensors."""

    def lines() -> list[Line] | None:
        late = [line for line in job.log("enter") if line["generation"] > after and line["size"] == size]
        newest = max((line["generation"] for line in late), default=0)
        found = [line for line in late if line["generation"] == newest]
        return found if len(found) == size else None

    found = job.wait_for(f"a world of {size} that has its values", lines, timeout=120)
    assert len({(line["step"], line["digest"]) for line in found}) == 1, "all ranks have the same full tensors"
    return found[0]["generation"], found[0]["step"], found[0]["digest"]


def agent_of(job: Job, host: str) -> psutil.Process:
    return psutil.Process([e for e in job.events("agent_joined") if e["host"] == host][-1]["pid"])


def while_it_uploads(job: Job, place: Path, strike: Callable[[psutil.Process], None]) -> Line:
    """Strike at a process that uploads the part of host 127.0.0.2. Return the failure of the copy."""

    def struck() -> str | None:
        for process in agent_of(job, "127.0.0.2").children():
            with suppress(psutil.Error):
                command = process.cmdline()
                order = json.loads(command[-1]) if "elasticstate.durable.upload" in command else {"parts": []}
                if order["parts"]:
                    strike(process)
                    return str(order["folder"])
        return None

    folder = job.wait_for("an upload of host 127.0.0.2", struck)
    failed: Line = job.wait_for_event("durable_copy", folder=folder)
    assert failed["state"] == "failed", failed
    step = max(digests(job))
    job.wait_for("ten steps more", lambda: max(digests(job)) >= step + 10)
    wait_for_copies(job, 1)
    assert folder not in all_manifests(place)
    assert not (place / folder).exists(), "a later copy removes what a failed attempt has left"
    return failed


def commit_directories(processes: list[psutil.Process], host: str = "") -> set[Path]:
    """Return the commit directories of the workers of a host, or of all hosts."""
    found = set()
    for process in processes:
        with suppress(psutil.Error):
            environment = process.environ()
            if environment.get("ELASTICSTATE_WORKER", "").startswith(host) and "ELASTICSTATE_COMMITS" in environment:
                found.add(Path(environment["ELASTICSTATE_COMMITS"]).parent)
    return found


def all_manifests(place: Path) -> dict[str, int]:
    """Return the number of parts of each complete copy."""
    found = {}
    for copy in place.iterdir():
        with suppress(FileNotFoundError):
            content = json.loads((copy / MANIFEST).read_bytes())["copy"]
            found[copy.name] = len(content["parts"])
    return found


def test_a_sharded_state_survives_faults_lost_shards_and_the_loss_of_all_memory(tmp_path: Path) -> None:
    place = tmp_path / "run"
    patient = ("--durable-timeout", "30")  # no other host's part of a copy fails before the one that is struck
    options = ("--regroup-timeout", "3", "--job-name", "durable-shards", *patient)
    with train(tmp_path / "first", place, 3, "fsdp", *options) as job:
        wait_for_copies(job, 3)
        begun = [milliseconds_of(event["folder"]) or 0 for event in saved(job)]
        assert all(late - early >= 490 for early, late in pairwise(begun)), begun
        assert set(list(all_manifests(place).values())[-1:]) == {3}

        killed = while_it_uploads(job, place, lambda process: process.kill())
        assert (killed["kind"], "was killed by SIGKILL" in killed["reason"]) == ("storage", True), str(killed)
        full = while_it_uploads(job, place, lambda process: process.rlimit(psutil.RLIMIT_FSIZE, (4096, 4096)) and None)
        assert (full["kind"], "File too large" in full["reason"]) == ("full", True), str(full)
        assert not job.events("end"), "no failure of the storage has ended a generation"

        # The shards of one host are lost, and the job goes on from the newest copy.
        agent = agent_of(job, "127.0.0.2")
        (commits,) = commit_directories(agent.children(recursive=True), "127.0.0.2")
        agent.suspend()
        shutil.rmtree(commits)
        agent.kill()
        generation, step, digest = entered(job, 3, after=1)
        assert "the job resumes from the newest durable copy" in job.output
        assert {digest} == digests(job)[step]
        resumed = job.wait_for_event("training_resumed", generation=generation)
        assert resumed["ticks_lost"] > 0
        assert "ticks_lost" in resumed["lower_bounds"]
        wait_for_copies(job, 2)

        # All processes die, the driver, too, and the memory of all hosts is gone.
        doomed = processes_of(job)
        for process in doomed:
            process.suspend()
        for commits in commit_directories(doomed):
            shutil.rmtree(commits)
        for process in doomed:
            process.kill()
        psutil.wait_procs(doomed[1:], 30)
        assert job.process.wait() == -signal.SIGKILL
        before = digests(job)
    for leftover in Path(os.environ["XDG_RUNTIME_DIR"]).glob("elasticstate-*-durable-shards"):
        shutil.rmtree(leftover, ignore_errors=True)

    newest = max(copy for copy in place.iterdir() if (copy / MANIFEST).exists())
    damage(newest / "part-2.safetensors")
    with train(tmp_path / "second", place, 2, "fsdp") as job:
        _, step, digest = entered(job, 2)
        assert f"durable copy {newest.name} cannot be used: part-2.safetensors is damaged" in job.output
        assert {digest} == before[step]
        wait_for_copies(job, 1)
        committed, at = max(line["step"] for line in job.log("commit")), time.time()
        job.process.send_signal(signal.SIGINT)
        job.finish(status=130)
        after, newest_copy = digests(job), saved(job)[-1]
        last = newest_copy["commit"][1] + step
        assert newest_copy["time"] > at
        assert last >= committed, "a last commit is saved before the workers are stopped"
    check_readers(place, tmp_path, after[last])

    with train(tmp_path / "third", place, 4, "hsdp") as job:
        _, step, digest = entered(job, 4)
        assert (step, {digest}) == (last, after[last])
        wait_for_copies(job, 1)
        job.stop_file.touch()
        job.finish()
    newest = saved(job)[-1]
    assert all_manifests(place)[newest["folder"]] == 2, "replicas are saved once"
    assert newest["time"] > job.log("final")[-1]["time"]
    check_readers(place, tmp_path, digests(job)[max(digests(job))])


@pytest.mark.long  # test_durable.py saves a whole state there
def test_shards_in_an_object_store(tmp_path: Path, object_store: str) -> None:
    slow = ("--durable-timeout", "20", "--durable-interval", "3")  # each upload imports the client of the store
    with train(tmp_path / "first", object_store, 3, "fsdp", *slow) as job:
        wait_for_copies(job, 1)
        job.process.send_signal(signal.SIGINT)
        job.finish(status=130)
        last = saved(job)[-1]["commit"][1]
        final = digests(job)[last]
    with train(tmp_path / "second", object_store, 2, "fsdp", *slow) as job:
        _, step, digest = entered(job, 2)
        assert (step, {digest}) == (last, final)
        wait_for_copies(job, 1)
        job.stop_file.touch()
        job.finish()
    place = tmp_path / "downloaded"
    download = "import sys, fsspec; fs, path = fsspec.url_to_fs(sys.argv[1]); fs.get(path, sys.argv[2], recursive=True)"
    subprocess.run([sys.executable, "-c", download, object_store, str(place)], check=True, timeout=60)
    check_readers(place, tmp_path, digests(job)[max(digests(job))])


def check_readers(place: Path, folder: Path, digest: set[str]) -> None:
    """Check what torch alone reads from the newest copy, and what is exported."""
    copy, out = max(place.iterdir()), folder / "tensors"
    subprocess.run([sys.executable, "-I", "-W", "ignore", "-c", READER, str(copy), str(out)], check=True, timeout=120)
    read = torch.load(out)
    assert {digest_of(read)} == digest
    assert "model.head.weight" not in read, "a tied parameter has its first name alone"
    command = [sys.executable, "-m", "elasticstate", "export", str(place), "-o", str(out)]
    subprocess.run(command, check=True, timeout=60, stdout=subprocess.DEVNULL)
    assert {digest_of(load_file(out))} == digest


def digest_of(tensors: dict[str, torch.Tensor]) -> str:
    """Return what sharded.py calls the digest of its model and optimizer."""
    found = hashlib.sha256()
    for name in PARAMETERS:
        state = {key: f"optimizer.state.model.{name}.{key}" for key in ("step", "exp_avg", "exp_avg_sq")}
        for key, full in {"": f"model.{name}", **({} if name == "frozen" else state)}.items():
            found.update(f"{name} {key}".encode() + tensors[full].contiguous().numpy().tobytes())
    return found.hexdigest()


SMALL = """
import json, os, signal, sys, time
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import elasticstate as elastic
from elasticstate.state.attached import AttachedValues

logs, name, steps, death = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
state = elastic.TorchState(step=0)

def die(self):
    time.sleep(0.5)  # the others have sealed their shards, and wait for this rank
    open(death, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)

@elastic.run
def train(state):
    if death and elastic.rank() == 1 and not os.path.exists(death):
        AttachedValues.digest = die  # after this rank has sealed its shards, too
    begun = state.step
    model = torch.nn.Linear(5, 7, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (elastic.size(),)))
    weight = model.weight.to_local().detach()
    state.attach(**{name: model}, init=lambda: weight.fill_(0.0))
    line = {"what": "enter", "time": time.time(), "generation": elastic.generation(), "size": elastic.size(),
            "rank": elastic.rank(), "step": begun, "digest": weight.unique().tolist()}
    with open(os.path.join(logs, f"{os.getpid()}.jsonl"), "a") as file:
        print(json.dumps(line), file=file)
    while state.step < begun + steps:
        dist.barrier()
        state.step += 1
        weight.fill_(state.step)
        state.commit()
train(state)
"""


def test_a_world_that_dies_while_it_attaches_never_mixes_a_copy_with_new_weights(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(SMALL)

    def small(folder: str, name: str, death: str, *options: str) -> Job:
        (tmp_path / folder).mkdir()
        command = [sys.executable, str(tmp_path / "small.py"), str(tmp_path / folder / "logs"), name, "5", death]
        places = ("-np", "2", "--durable-dir", str(tmp_path / "run"), "--cooldown-range", "0", "0")
        return Job(tmp_path / folder, *places, *options, command=command)

    def check(job: Job, generation: int, step: int) -> None:
        lines = [line for line in job.log("enter") if line["generation"] == generation]
        values = [[step]] * 2
        assert [(line["step"], line["digest"]) for line in lines] == [(step, value) for value in values]

    for number, step in (("first", 0), ("second", 5)):  # without a copy, and with one
        death = tmp_path / f"death-{number}"
        with small(number, "model", str(death)) as job:
            job.finish()
            assert death.exists()
            assert [line["generation"] for line in job.log("enter")] == [2, 2]
            check(job, 2, step)
            assert len(saved(job)) == 1
    with small("third", "net", "", "--reset-limit", "0") as job:
        job.finish(status=3)
        assert "attach() has the values net, and the commit has model" in job.output
