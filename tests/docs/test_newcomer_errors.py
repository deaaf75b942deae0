"""The common mistakes print what docs/troubleshooting.md and plain_mistakes.txt show."""

from __future__ import annotations

import difflib

from tests.docs.newcomer_errors import CASES, HOME, ROOT_CAUSE, examples, run_all, shown, stable


def test_each_case_is_written_down_once() -> None:
    assert sorted(examples()) == sorted(CASES)


def test_each_mistake_prints_what_is_written_down() -> None:
    results = dict(run_all(CASES))
    wrong = []
    for name, example in examples().items():
        if name not in results:
            print(f"--- {name}: cannot be run on this machine")
            continue
        result = results[name]
        print(f"--- {name}: exit status {result.status}, {result.seconds:.1f} s\n{result.complete}")
        if result.status != CASES[name].status:
            wrong.append(f"{name}: exit status {result.status} instead of {CASES[name].status}")
        if "/elasticstate/" in result.complete:
            wrong.append(f"{name}: the output has a frame of the package:\n{result.complete}")
        on_page, printed = stable(example.output), stable(result.output)
        if printed != on_page:
            wrong += difflib.unified_diff(on_page, printed, f"{name} as written", f"{name} as printed", lineterm="")
    assert not wrong, "\n".join([*wrong, "To update: python tests/docs/newcomer_errors.py --update"])


def test_a_block_has_the_lines_that_matter() -> None:
    assert shown("elasticrun: COMMAND is missing\n") == "elasticrun: COMMAND is missing"
    assert shown(f"elasticrun: a\n{ROOT_CAUSE} b\nelasticrun:   c\n") == f"{ROOT_CAUSE} b\nelasticrun:   c"
    usual = "elasticrun: host localhost added: 2 slots\nelasticrun: generation 1: 2 workers on 1 host\n"
    assert shown(f"{usual}[localhost:0] said\n[localhost:1] said\n") == "[localhost:0] said"
    traceback = (
        f"{ROOT_CAUSE} localhost:0#1 exited with 1\n"
        "elasticrun:   rank 0, generation 1\n"
        "elasticrun:   Traceback (most recent call last):\n"
        f'elasticrun:     File "{HOME}/train.py", line 5, in train\n'
        "elasticrun:       fail()\n"
        "elasticrun:       ^^^^^^\n"
        'elasticrun:     File "/usr/lib/other.py", line 7, in fail\n'
        "elasticrun:       raise ValueError(\n"
        "elasticrun:   ValueError: no\n"
    )
    assert shown(traceback) == "elasticrun:       fail()\nelasticrun:   ValueError: no"


def test_lines_are_compared_without_order_times_and_slots() -> None:
    first = "elasticrun: job job-12ab34 failed after 1.2 s\n[localhost:0] no\n[localhost:1] no"
    second = "[localhost:1] no\nelasticrun: job job-99ab34 failed after 10 s"
    assert stable(first) == stable(second)
    assert stable(first) != stable(second.replace("no", "yes"))
