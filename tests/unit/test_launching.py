"""Errors of ``launch()`` before any process is started."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest

import elasticstate as elastic
from elasticstate.failures import WorkerFailure


def nothing() -> None: ...


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"np": 0}, r"^-np/--num-proc: '0': must be a whole number"),
        ({"np": 2, "min_np": 3}, r"^--min-np: 3: must be at most -np"),
        ({"np": 2, "hosts": ["a:2", "b:x"]}, r"^-H/--hosts: 'a:2,b:x': must be host or host:slots"),
        ({"np": 2, "elastic_timout": 3}, r"unknown option 'elastic_timout'\. Did you mean 'elastic_timeout'\?$"),
        ({"np": 2, "qqq": 3}, r"unknown option 'qqq'\. elasticrun --help-all lists all options\.$"),
        ({"np": 2, "cooldown_range": (5, 1)}, r"^--cooldown-range/.*: '5 1': must be two times"),
        ({"np": 2, "verbose": "perhaps"}, r"^--verbose: 'perhaps': must be"),
        ({"np": 2, "commit_dir": "/no/such/directory"}, r"^--commit-dir: '/no/such/directory': cannot hold commits"),
    ],
)
def test_a_bad_option_names_option_value_and_valid_values(options: dict[str, Any], said: str) -> None:
    with pytest.raises(elastic.OptionError, match=said):
        elastic.launch(nothing, **options)


@pytest.mark.parametrize("what", ["python train.py", [], 5, b"x"])
def test_what_is_no_function_and_no_command_is_refused(what: Any) -> None:
    with pytest.raises(elastic.UsageError, match="must be a function, or a command as a list of words"):
        elastic.launch(what, np=1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"args": 5}, r"^launch\(\): args=5: must be a tuple or a list\. For one argument, write args=\(5,\)\.$"),
        ({"args": "lr"}, r"write args=\('lr',\)\.$"),
        ({"args": {"lr": 1}}, "must be a tuple or a list"),
        ({"kwargs": 5}, r"^launch\(\): kwargs=5: must be a dict that gives arguments by their names\.$"),
    ],
)
def test_arguments_in_another_form_are_refused_with_the_remedy(given: dict[str, Any], said: str) -> None:
    with pytest.raises(elastic.UsageError, match=said):
        elastic.launch(nothing, **given, np=1)


def test_what_cannot_be_pickled_or_is_too_large_is_refused_with_the_remedy() -> None:
    with pytest.raises(elastic.UsageError, match=r"nothing or its arguments cannot be pickled: .*lock"):
        elastic.launch(nothing, (threading.Lock(),), np=1)
    with pytest.raises(
        elastic.UsageError, match=r"have 5\.0 MB pickled, more than the limit of 4\.1 MB\. Pass the path"
    ):
        elastic.launch(nothing, (b"x" * 5_000_000,), np=1)


def test_an_error_with_its_failures_can_be_pickled() -> None:
    cause = WorkerFailure("h:1 ended: exit code 3", "h", 1, 2, 5, 3, None, "Traceback\nValueError: x", 7)
    error = pickle.loads(pickle.dumps(elastic.WorkerFailedError(cause, [cause])))
    assert (error.root_cause, error.failures) == (cause, (cause,))
    assert str(error).splitlines() == [
        "h:1 ended: exit code 3",
        "  rank 2, generation 5",
        "  Traceback",
        "  ValueError: x",
    ]
