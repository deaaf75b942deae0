"""The logger of a worker process, with and without logging configured by the script."""

from __future__ import annotations

import subprocess
import sys


def lines(program: str) -> list[str]:
    """Run a script that may configure logging, and return what it writes to stderr."""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == ""
    return done.stderr.splitlines()


WARN = "from elasticstate.log import logger\nlogger.info('a detail')\nlogger.warning('commit %s is damaged', (1, 2))\n"


def test_a_script_without_logging_gets_warnings_on_stderr() -> None:
    assert lines(WARN) == ["elasticstate: commit (1, 2) is damaged"]


def test_further_lines_and_control_characters_cannot_look_like_messages() -> None:
    program = "from elasticstate.log import logger\nlogger.error('a\\nb\\x1b[31m')\n"
    assert lines(program) == ["elasticstate: a", "  b\\x1b[31m"]


def test_a_script_that_configures_logging_gets_each_record_once() -> None:
    configure = "import logging\nlogging.basicConfig(format='%(levelname)s %(name)s %(message)s', level='INFO')\n"
    expected = ["INFO elasticstate a detail", "WARNING elasticstate commit (1, 2) is damaged"]
    assert lines(configure + WARN) == expected
    assert lines("import elasticstate.log\n" + configure + WARN) == expected


def test_a_handler_of_the_logger_itself_replaces_stderr() -> None:
    assert lines("import logging\nlogging.getLogger('elasticstate').addHandler(logging.NullHandler())\n" + WARN) == []


def test_a_closed_stderr_does_not_stop_the_script() -> None:
    assert lines("import sys\nsys.stderr.close()\n" + WARN) == []
    assert lines("import sys\nsys.stderr = None\n" + WARN) == []
