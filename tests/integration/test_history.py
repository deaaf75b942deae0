"""A real job through a kill, a join and a leave. Its event file gives the trace and the report."""

from __future__ import annotations

import signal
from pathlib import Path

from elasticstate.cli import main
from elasticstate.core.types import number_of
from elasticstate.history.page import duration
from tests.kit.chrome_format import checked, lanes
from tests.kit.job import Hosts, Job

FAST = (
    "--join-window",
    "0.1",
    "--min-interrupt-distance",
    "0.2",
    "--cooldown-range",
    "0",
    "0",
)


def test_a_real_job_gives_a_trace_and_a_report(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:2")
    script = {"steps": 10, "until": tmp_path / "stop", "step_seconds": 0.02}
    with Job(tmp_path, "-np", "2", "--min-np", "1", *hosts.options, *FAST, **script) as job:

        def trained(size: int, after: int) -> int:
            """Wait until a world of this size trains, newer than the generation ``after``; return its number."""

            def formed() -> int | None:
                worlds = job.events("world_formed")
                return next((w["generation"] for w in worlds if w["size"] == size and w["generation"] > after), None)

            generation = int(job.wait_for(f"a world of {size} after generation {after}", formed))
            job.wait_for_event("training_resumed", generation=generation)
            return generation

        job.wait_for_step(10)
        hosts.set("localhost:2", "127.0.0.2:1")
        generation = trained(3, after=1)
        job.kill(1)
        job.wait_for_event("worker_exited", signal=signal.SIGKILL, worker="localhost:1#1")
        generation = trained(3, after=generation)
        hosts.set("localhost:2")
        trained(2, after=generation)
        job.stop_file.touch()
        job.finish()
        job.check_survival()
    check_trace(job, tmp_path / "trace.json")
    check_report(job, tmp_path / "report.html")


def check_trace(job: Job, path: Path) -> None:
    """Check that each worker has its spans, with the ranks that the events and the workers report."""
    assert main(["trace", str(job.events_file), "-o", str(path)]) == 0
    spans = lanes(checked(path))
    started = {(e["host"], e["slot"]) for e in job.events("worker_started")}
    assert {lane for lane in spans if lane[1].startswith("slot")} == {
        (f"host {host}", f"slot {slot}") for host, slot in started
    }
    for e in job.events("worker_started"):
        lane = spans[f"host {e['host']}", f"slot {e['slot']}"]
        (life,) = [span for span in lane if span["name"] == e["worker"]]
        end = life["ts"] + life["dur"]
        inside = [span["name"] for span in lane if life["ts"] <= span["ts"] and span["ts"] + span["dur"] <= end]
        assert {"boot", "world formation"} <= {*inside}
        (exited,) = [x for x in job.events("worker_exited") if x["worker"] == e["worker"]]
        assert life["args"]["exit"] == ("SIGKILL" if exited["signal"] else "exit code 0")
    in_trace = {
        (span["args"]["generation"], span["args"]["rank"], process.removeprefix("host "), int(thread.split()[1]))
        for (process, thread), lane in spans.items()
        for span in lane
        if span["name"].startswith("training in generation")
    }
    entered = {
        (line["generation"], line["rank"], host, int(slot))
        for path in job.logs.glob("*.jsonl")
        for host, slot, _ in [path.stem.rsplit("-", 2)]
        for line in job.log_of(f"{host}-{slot}")
        if line["what"] == "enter"
    }
    assert entered <= in_trace, "a world may end before a member enters it"
    for e in job.events("world_formed"):
        assert sorted(rank for number, rank, _, _ in in_trace if number == e["generation"]) == [*range(e["size"])]
    assert [span["name"] for span in spans[f"job {job.events()[0]['job']}", "generations"]] == [
        f"generation {e['generation']}: {number_of(e['size'], 'worker')}" for e in job.events("world_formed")
    ]


def check_report(job: Job, path: Path) -> None:
    assert main(["report", str(job.events_file), "-o", str(path)]) == 0
    page = path.read_text()
    for e in job.events("end"):
        assert e["cause"] in page
    (finished,) = job.events("job_finished")
    account = page.partition("<h2>Account of time</h2>")[2]
    for cause, seconds in finished["badput_s"].items():
        share = f"{duration(seconds)} ({seconds / finished['wall_s']:.1%})"
        assert f'<th scope="row">{cause.replace("_", " ")}</th><td class="n">{share}</td>' in account
    for text in ("SIGKILL", "World size over time", "Ticks per second", "Downtime of each change"):
        assert text in page
