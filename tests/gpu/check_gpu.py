"""Check of the NCCL path on one GPU: ``make check-gpu``, or ``python tests/gpu/check_gpu.py --out FOLDER``.

Several ranks share the GPU, each with an NCCL_HOSTID of its own, so NCCL connects them by sockets as if each was on
another host. That is enough to see aborts, new groups, leaks and faults; it says nothing about bandwidth.

Each section is a process of its own with a limit of time. If it fails, the end of its output is in the report, and the
next section runs. ``FOLDER/check-gpu.md`` and ``.json`` are written again after each section, so a run that is cut
leaves what it has found.

``--backend nccl2`` checks torch's new NCCL backend instead of the older one.

Exit status: 0 if all holds, 1 if something does not, 77 if torch finds no GPU. ``--fake`` runs the same sections, each
of them small, on a machine without a GPU: with Gloo, and with a device that is a thread.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NO_GPU = 77
BUDGET_S = 470.0  # for all sections together
TAIL = 6000  # characters of the output of a section that fails
MARK = "CHECK_GPU_SECTION"  # in the environment of all processes of a section
FAKE_PATIENCE = 4  # the simulated device, on a machine that may be loaded, is given as many times the limits
SIZE = 4  # ranks of a job
PATIENCE_S = 60.0  # longest wait for the next step after a fault
LONG = ("stop", "kill", "assert", "leave", "kill", "stop", "assert", "kill", "leave", "kill", "assert", "kill", "leave")
SHORT = ("kill", "leave", "kill", "assert", "stop", "stay")
FAKES = {"nccl": {"names": ["nccl-legacy"]}, "nccl2": {"names": ["nccl-legacy", "nccl2", "nccl"], "nccl_is": "nccl2"}}
FORK = """
import importlib, os, sys
from elasticstate.worker.template import MODULES
for name in MODULES:
    importlib.import_module(name)
import torch
if (pid := os.fork()) == 0:
    torch.zeros(1, device="cuda").item()
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@dataclass
class Found:
    """The findings of a section, written into a file at each change."""

    path: Path
    figures: dict[str, Any] = field(default_factory=dict)
    checks: list[tuple[str, bool, str]] = field(default_factory=list)
    is_complete: bool = False

    def figure(self, name: str, value: Any) -> None:
        self.figures[name] = value
        self.write()

    def check(self, name: str, holds: bool, text: str = "") -> None:
        self.checks.append((name, bool(holds), text))
        self.write()

    def write(self) -> None:
        fresh = self.path.with_suffix(".new")
        what = {"figures": self.figures, "checks": self.checks, "is_complete": self.is_complete}
        fresh.write_text(json.dumps(what))
        fresh.replace(self.path)


@dataclass
class Machine:
    """The differences between a GPU and ``--fake``, and between the backends."""

    fake: bool
    backend: str  # nccl or nccl2, as in elasticrun's --backend

    @property
    def device(self) -> str:
        return "fake" if self.fake else "cuda:0"

    @property
    def size(self) -> int:
        return 3 if self.fake else SIZE

    def script(self, device: str = "") -> list[str]:
        """Return the arguments of train.py."""
        return ["--device", device or self.device, *(["--numbers", "4096"] if self.fake else [])]

    @property
    def patience_s(self) -> float:
        """Longest wait of a job for its next step after a fault."""
        return PATIENCE_S * (FAKE_PATIENCE if self.fake else 1)

    @property
    def tests(self) -> str:
        """The tests of a module with this machine's NCCL, as pytest selects them: -k nccl also means nccl2."""
        if self.fake:
            return f"fake and {self.torch_name}"
        return self.backend + (" and not nccl2" if self.backend == "nccl" else "") + " and not fake"

    @property
    def torch_name(self) -> str:
        """Name by which torch knows the backend."""
        if self.fake:
            return "nccl-legacy" if self.backend == "nccl" else self.backend
        from elasticstate.worker.contexts import nccl

        return nccl.torch_name(self.backend)


# ------------------------------------------------------------------------------------------------------------- sections


def names(found: Found, machine: Machine, folder: Path) -> None:
    """Versions, the parts of torch's default group, and ``elasticrun --check``."""
    import torch
    import torch.distributed as dist

    from elasticstate.compat import process_groups
    from elasticstate.worker.contexts import nccl

    for name, value in {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "processors": os.cpu_count(),
        "kernel": platform.release(),
        "torch knows the backends": sorted(dist.Backend.backend_list),
        f"--backend {machine.backend} is torch's": machine.torch_name,
    }.items():
        found.figure(name, value)
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    found.figure("commit", commit.stdout.strip())
    if not machine.fake:
        found.figure("NCCL", ".".join(map(str, nccl.nccl_version())))
        found.figure("GPU", torch.cuda.get_device_name(0))
        found.figure("warnings of the settings", nccl.apply_settings())
        ask = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,compute_mode", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            found.figure("nvidia-smi", subprocess.run(ask, capture_output=True, text=True, timeout=20).stdout.strip())
        torch.cuda.set_device(0)
    else:
        import fake_nccl

        fake_nccl.install()
    store, device = dist.FileStore(str(folder / "store"), 1), torch.device("cuda", 0)
    dist.init_process_group(f"cpu:gloo,cuda:{machine.torch_name}", store=store, rank=0, world_size=1, device_id=device)
    parts = {kind: process_groups.part_for(dist.group.WORLD, torch.device(kind)) for kind in ("cpu", "cuda")}
    for kind, part in parts.items():
        if part is not None:
            found.figure(f"part for {kind}", f"{type(part).__name__} {part.name()!r}, abort: {hasattr(part, 'abort')}")
    found.check("the product finds the part that it aborts", nccl._nccl_of(dist.group.WORLD) is not None)
    dist.destroy_process_group()
    if not machine.fake:
        forks = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, cwd=ROOT)
        found.check("a fork of a template process can use the device", forks.returncode == 0, forks.stderr[-500:])
    backend = [] if machine.fake else ["--backend", machine.backend]
    command = [sys.executable, "-m", "elasticstate", "--check", *backend]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    found.figure("elasticrun --check", checked.stdout + checked.stderr)
    found.check("elasticrun --check ends with 0", checked.returncode == 0, f"status {checked.returncode}")


def bare_torch(found: Found, machine: Machine, folder: Path) -> None:
    """Bare torch: a hung collective is aborted from another thread, and the process makes another group."""
    settings = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0", "NCCL_NVLS_ENABLE": "0"}
    debug = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV", "NCCL_DEBUG_FILE": str(folder / "nccl.%p")}
    for size in (2,) if machine.fake else (2, SIZE):
        name, place = f"{size} ranks", folder / str(size)
        place.mkdir()
        command = [sys.executable, HERE / "bare_torch.py", machine.device, machine.torch_name, size, place]
        ran = subprocess.run(list(map(str, command)), env=os.environ | settings | debug, capture_output=True, text=True)
        print(ran.stdout, ran.stderr[-TAIL:], flush=True)
        lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
        if lines:
            found.figure(name, json.loads(lines[-1]))
        last = " ".join(ran.stderr[-1500:].split()) if ran.returncode else ""
        found.check(f"{name}: a group, an abort, another group", ran.returncode == 0 and bool(lines), last)
    said = "".join(path.read_text(errors="replace") for path in folder.glob("nccl.*"))
    used = {line.partition("NCCL INFO ")[2] for line in said.splitlines() if "Using" in line}
    found.figure("NCCL says of the network", sorted(used)[:12])


def short_job(found: Found, machine: Machine, folder: Path) -> None:
    """A real job under each kind of fault."""
    faults = ("kill", "leave", "assert", "stay") if machine.fake else SHORT
    run_job(found, folder / "job", machine.backend, machine, faults)


def long_job(found: Found, machine: Machine, folder: Path) -> None:
    """A real job under more faults: with those of the short one, at least twenty."""
    run_job(found, folder / "job", machine.backend, machine, LONG)


def run_job(found: Found, folder: Path, backend: str, machine: Machine, faults: tuple[str, ...], of: str = "") -> None:
    """Run a job under these faults, and check its result. ``of``: begin of the names of figures and checks."""
    from faults import TRAIN, Training

    from tests.kit import forks

    milliseconds: dict[str, list[float]] = {}
    began = time.monotonic()
    script = machine.script()
    # On the simulated device the job forks, as those of tests do. On a GPU all processes are new ones.
    in_use, within = (forks.template_in_use(set()), ()) if machine.fake else (contextlib.nullcontext(), ("env",))
    patience_s = machine.patience_s
    with in_use, Training(folder, backend, machine.size, *script, patience_s=patience_s, within=within) as training:
        try:
            training.wait_until_full()
            found.figure(f"{of}seconds until the first steps of all", round(time.monotonic() - began, 1))
            for turn, kind in enumerate(faults):
                milliseconds.setdefault(kind, []).append(round(training.strike(kind, turn)))
                print(f"{time.monotonic() - began:.1f} s: {kind}, {milliseconds[kind][-1]} ms", flush=True)
                found.figure(f"{of}ms from a fault to the next step of the last survivor", milliseconds)
            steps, digests = training.finish()
        finally:
            changed = training.changed_processes
            found.check(f"{of}survivors keep their processes", not changed, "; ".join(changed))
            note_job(found, training, of)
        undisturbed = digest_alone([str(TRAIN), "--folder", str(folder), *script, "--alone", str(steps)], machine)
    found.figure(f"{of}steps", steps)
    found.check(
        f"{of}the weights have the same bits as without faults",
        digests == {undisturbed},
        f"{len(digests)} kinds of weights, {steps} steps",
    )
    struck = sum(map(len, milliseconds.values()))
    found.check(f"{of}{len(faults)} faults", struck == len(faults), f"{struck} have struck")


def digest_alone(command: list[str], machine: Machine) -> str:
    """Run the training without a job. Return the digest of its weights."""
    if not machine.fake:
        return subprocess.check_output([sys.executable, *command], text=True, timeout=120, cwd=ROOT).strip()
    from tests.kit import forks

    with tempfile.TemporaryDirectory() as name:
        started = forks.Started(forks.template(), Path(name, "alone"), command, forks.environment())
        status, printed, error = started.finish(120)
    if status != 0:
        raise RuntimeError(f"the training without a job has ended with status {status}: {error[-TAIL:]}")
    return printed.strip()


def note_job(found: Found, training: Any, of: str) -> None:
    """Record what the logs of a job say, also of one that has failed."""
    job = training.job
    print(job.output[-TAIL:], flush=True)
    for kind in ("warning", "error"):
        said = [line for line in job.output.splitlines() if f"elasticstate: {kind}" in line.lower()]
        if said:
            found.figure(f"{of}{kind}s", said[:10])
    restarted = [line for line in job.output.splitlines() if "this worker is restarted" in line]
    if restarted:
        found.figure(f"{of}workers that restarted themselves", restarted[:10])
    entered = [line for line in job.log("enter") if line["size"] == training.size and "device_bytes" in line]
    if entered:
        generations = sorted({line["generation"] for line in entered})
        most = [max(e["device_bytes"] for e in entered if e["generation"] == g) >> 20 for g in generations]
        found.figure(f"{of}MiB of the device at the begin of each full world", most)
    by_process: dict[tuple[int, int], list[int]] = {}
    for line in job.log("step"):
        by_process.setdefault((line["pid"], line["generation"]), []).append(line["ns"])
    steps = [b - a for times in by_process.values() for a, b in pairwise(times)]
    if steps:
        found.figure(f"{of}ms of a step, median", round(median(steps) / 1e6, 1))


def recovery(found: Found, machine: Machine, folder: Path) -> None:
    """The same kill under Gloo, and under torchrun, which restarts all workers."""
    from faults import Restarted

    kills = 1 if machine.fake else 2
    if not machine.fake:
        run_job(found, folder / "gloo", "gloo", machine, ("kill",) * 3, "Gloo: ")
    size = 1 if machine.fake else SIZE
    backend, device = ("gloo", "cpu") if machine.fake else (f"cpu:gloo,cuda:{machine.torch_name}", machine.device)
    script = machine.script(device)
    with Restarted(folder / "torchrun", backend, size, *script, patience_s=machine.patience_s) as restarted:
        try:
            milliseconds = [round(restarted.strike(turn)) for turn in range(kills)]
        finally:
            print(restarted.tail(), flush=True)
    found.figure("torchrun: ms from a kill to the next step of the last rank", milliseconds)


def contexts(found: Found, machine: Machine, folder: Path) -> None:
    """The conformance suite of contexts, in worlds of one to four ranks."""
    pytest(found, folder, ["tests/integration/test_contexts.py", "-k", machine.tests + " and not fifty"])


def memory(found: Found, machine: Machine, folder: Path) -> None:
    """Fifty worlds in the same processes, every second one cut in a collective: what they leave behind."""
    pytest(found, folder, ["tests/integration/test_contexts.py", "-k", machine.tests + " and fifty"])


def aborts(found: Found, machine: Machine, folder: Path) -> None:
    """Aborts with pending kernels, with a captured graph, and with compiled code."""
    some = " and pending" if machine.fake else ""
    pytest(found, folder, ["tests/integration/test_aborts.py", "-k", machine.tests + some], machine.fake)


def zoo(found: Found, machine: Machine, folder: Path) -> None:
    """Ordinary programs with all their tensors on the device: disturbed, they end with the bits of undisturbed ones."""
    os.environ["ZOO_DEVICE"] = machine.device
    chosen = "optimizers or schedulers or modes or steps or values or modules or elastic_loader"
    # A process of a loader cannot use the device, and NCCL has no sparse tensors, both also without elasticstate.
    pytest(found, folder, ["tests/zoo", "-n", "7", "-k", f"({chosen}) and not worker_process and not sparse"])


def cuda(found: Found, machine: Machine, folder: Path) -> None:
    """The tests of commits from a device."""
    pytest(found, folder, ["tests/unit/state/test_async_commit_cuda.py"])


def lost_devices(found: Found, machine: Machine, folder: Path) -> None:
    """The jobs of tests/integration/test_nccl.py that need a device."""
    pytest(found, folder, ["tests/integration/test_nccl.py", "-k", "world_of_one or assert or survivor"])


def bench(found: Found, machine: Machine, folder: Path) -> None:
    """The cost of a commit from a device."""
    command = [sys.executable, "tests/bench/bench_gpu.py", "--rounds", "5", "--gigabytes", "2"]
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(ran.stdout, flush=True)
    found.figure("bench_gpu.py", ran.stdout)
    found.check("bench_gpu.py meets its goals", ran.returncode == 0, f"status {ran.returncode}")


def pytest(found: Found, folder: Path, arguments: list[str], fake: bool = False) -> None:
    """Run tests, and record each of them."""
    report = folder / "junit.xml"
    options = ["-v", "-o", "filterwarnings=default", "-p", "no:cacheprovider", "--durations=0", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    # The template process of tests forks, so nothing in it may initialise CUDA to count devices.
    variables = {**({} if fake else {"RANKS_SOON_S": "12"}), **os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    status = subprocess.run(command, cwd=ROOT, env=variables).returncode
    ran = 0
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        bad = [part for part in case if part.tag in ("failure", "error")]
        text = " ".join((bad[0].get("message") or bad[0].text or "").split())[:600] if bad else ""
        if case.find("skipped") is None:
            ran += 1
            found.check(str(case.get("name")), not bad, text or f"{float(case.get('time') or 0):.1f} s")
        for said in case.iter("property"):
            if said.get("name") == "report":
                found.figure(str(case.get("name")), said.get("value"))
    found.check("tests ran", status == 0 and ran > 0, f"{ran} tests, status {status}")


@dataclass(frozen=True)
class Section:
    run: Callable[[Found, Machine, Path], None]
    limit_s: float
    in_fake: bool = True  # False: another section runs the same code
    alone: bool = True  # False: it measures nothing, so it runs beside others of this kind

    @property
    def name(self) -> str:
        return self.run.__name__


# The most valuable and cheapest ones come first.
SECTIONS = (
    Section(names, 60),
    Section(bare_torch, 110),
    Section(short_job, 110),
    Section(contexts, 150, in_fake=False, alone=False),
    Section(aborts, 150, alone=False),
    Section(cuda, 100, in_fake=False, alone=False),
    Section(lost_devices, 120, in_fake=False, alone=False),
    Section(zoo, 150, in_fake=False, alone=False),
    Section(memory, 110, in_fake=False),
    Section(recovery, 80),
    Section(bench, 60),
    Section(long_job, 150, in_fake=False),
)


def side_by_side(sections: Sequence[Section], fake: bool) -> Iterator[list[Section]]:
    """Yield the sections that run at the same time. No time is measured on a simulated device: all of them there."""
    found: list[Section] = []
    for section in sections:
        if found and not fake and (section.alone or found[0].alone):
            yield found
            found = []
        found.append(section)
    yield found


# ------------------------------------------------------------------------------------------------- the process of a run


@dataclass
class Result:
    """A section in the report."""

    name: str
    about: str
    holds: bool
    why: str  # it does not hold
    seconds: float
    limit_s: float
    checks: list[tuple[str, bool, str]]
    figures: dict[str, Any]
    tail: str  # of its output, if it does not hold


def run_section(section: Section, command: list[str], folder: Path, limit_s: float) -> Result:
    """Run a section in a process of its own, and kill all that it leaves. ``command``: of all sections."""
    folder.mkdir()
    mark = f"{os.getpid()}-{section.name}"
    path, output = folder / "found.json", folder / "output.txt"
    began = time.monotonic()
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--section", section.name, "--out", str(folder)],
            cwd=ROOT,
            env=environment() | {MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
            why = "" if status == 0 else f"it has ended with status {status}"
        except subprocess.TimeoutExpired:
            why = f"it has not ended within {limit_s:.0f} s"
        finally:
            seconds = time.monotonic() - began
            left = kill_all(mark)
            process.wait()
    said = json.loads(path.read_text()) if path.exists() else {"checks": [], "figures": {}, "is_complete": False}
    bad = [name for name, holds, _ in said["checks"] if not holds]
    if left and not why:
        why = "it has left processes behind: " + "; ".join(left[:3])
    why = "; ".join([*([why] if why else []), *bad]) or ("" if said["is_complete"] else "it has not come to its end")
    tail = output.read_text(errors="replace")[-TAIL:] if why else ""
    about = str(section.run.__doc__)
    return Result(section.name, about, not why, why, round(seconds, 1), limit_s, said["checks"], said["figures"], tail)


def environment() -> dict[str, str]:
    """Return the environment of all sections: this package and what the tests share can be imported."""
    shared = ROOT / "tests" / "integration"
    paths = [str(ROOT), str(shared), str(shared / "scripts"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}


def marked(mark: str) -> Iterator[int]:
    """Yield the processes that a section has started, in whatever session they are."""
    wanted = f"\0{MARK}={mark}\0".encode()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            is_dead = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            if not is_dead and wanted in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                yield int(pid)


def kill_all(mark: str) -> list[str]:
    """Kill all processes of a section. Return the commands of those that were still there."""
    found: dict[int, str] = {}
    deadline = time.monotonic() + 10
    while (pids := list(marked(mark))) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(OSError):
                found.setdefault(pid, Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200].strip())
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return list(found.values())


def write_report(out: Path, results: list[Result], machine: Machine, seconds: float, is_over: bool) -> None:
    holds = is_over and all(result.holds for result in results)
    what = {
        "holds": holds,
        "is_over": is_over,
        "fake": machine.fake,
        "backend": machine.backend,
        "seconds": round(seconds, 1),
        "sections": [asdict(result) for result in results],
    }
    (out / "check-gpu.json").write_text(json.dumps(what, indent=1) + "\n")
    (out / "check-gpu.md").write_text("\n".join(markdown(results, machine, seconds, holds, is_over)) + "\n")


def markdown(results: list[Result], machine: Machine, seconds: float, holds: bool, is_over: bool) -> Iterator[str]:
    yield f"# Check of {machine.backend} on a {'simulated device' if machine.fake else 'GPU'}"
    yield ""
    bad = sum(not result.holds for result in results)
    end = "" if is_over else "The run was not over when this was written. "
    yield f"{end}{'All holds' if holds else f'{bad} of {len(results)} sections do not hold'}; {seconds:.0f} s."
    yield ""
    yield "| section | holds | seconds | |"
    yield "|---|---|---|---|"
    for result in results:
        yield f"| {result.name} | {'yes' if result.holds else '**no**'} | {result.seconds} | {cell(result.why)} |"
    for result in results:
        yield ""
        yield f"## {result.name}"
        yield result.about
        yield ""
        for name, value in result.figures.items():
            yield from figure(name, value)
        for name, is_so, text in result.checks:
            yield f"- [{'x' if is_so else ' '}] {name}" + (f": {cell(text)}" if text else "")
        if result.tail:
            yield ""
            yield "```"
            yield result.tail.replace("```", "'''").rstrip()
            yield "```"


def figure(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, str) and "\n" in value:
        yield from (f"- {name}:", "", "  ```", *(f"  {line}" for line in value.rstrip().splitlines()), "  ```")
    elif isinstance(value, dict):
        yield f"- {name}:"
        for key, each in value.items():
            yield f"    - {key}: {cell(each)}"
    else:
        yield f"- {name}: {cell(value)}"


def cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def has_gpu() -> bool:
    ask = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", ask], env=environment(), timeout=120).returncode == 0


def pack(folder: Path, results: list[Result], archive: Path) -> None:
    """Keep the logs of the sections that do not hold."""
    with tarfile.open(archive, "w:gz") as packed:
        for result in results:
            for path in sorted((folder / result.name).rglob("*")) if not result.holds else ():
                if path.is_file() and path.stat().st_size < 4 << 20:
                    packed.add(path, path.relative_to(folder))


def be_section(section: Section, machine: Machine, folder: Path) -> int:
    """Run one section in this process."""
    if machine.fake:
        os.environ["FAKE_NCCL"] = json.dumps(FAKES[machine.backend])  # for fake_nccl.py in all its processes
    found = Found(folder / "found.json")
    try:
        section.run(found, machine, folder)
    except Exception as error:
        traceback.print_exc()
        found.check("the section comes to its end", False, f"{type(error).__name__}: {error}"[:1000])
        return 1
    found.is_complete = True
    found.write()
    return 0


def main(known: Sequence[Section] = SECTIONS, program: str = __file__) -> int:
    """Run all sections. ``program``: what calls this function."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fake", action="store_true", help="Gloo, and a device that is a thread")
    parser.add_argument("--backend", choices=["nccl", "nccl2"], default="nccl", help="elasticrun's name of it")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "check-gpu", help="folder for the report")
    parser.add_argument(
        "--only", nargs="+", choices=[section.name for section in known], help="sections to run, in this order"
    )
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for all sections")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    args = parser.parse_args()
    machine, out = Machine(args.fake, args.backend), args.out.resolve()
    if args.section:
        return be_section(next(section for section in known if section.name == args.section), machine, out)
    if not args.fake and not has_gpu():
        print("nothing is checked: torch finds no GPU here (--fake checks this script)")
        return NO_GPU
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    began = time.monotonic()
    by_name = {section.name: section for section in known}
    sections = [by_name[name] for name in args.only or by_name if args.only or by_name[name].in_fake or not args.fake]
    command = [sys.executable, program, "--backend", args.backend, *(["--fake"] if args.fake else [])]
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="check-gpu-", ignore_cleanup_errors=True) as name:
        folder = Path(name)

        def run(section: Section) -> Result:
            left_s = args.budget - (time.monotonic() - began)
            if left_s < 5:
                why = f"no time is left of {args.budget:.0f} s"
                return Result(section.name, str(section.run.__doc__), False, why, 0, 0, [], {}, "")
            limit_s = section.limit_s * (FAKE_PATIENCE if args.fake else 1)
            return run_section(section, command, folder / section.name, min(limit_s, left_s))

        with ThreadPoolExecutor(len(sections)) as threads:
            for result in (result for some in side_by_side(sections, args.fake) for result in threads.map(run, some)):
                results.append(result)
                print(f"{result.name}: {'holds' if result.holds else result.why} ({result.seconds} s)", flush=True)
                write_report(out, results, machine, time.monotonic() - began, len(results) == len(sections))
                if not result.holds:
                    pack(folder, results, out / "check-gpu-logs.tar.gz")
    print(f"report: {out / 'check-gpu.md'}")
    return 0 if all(result.holds for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
