"""Runs at the start of each Python process of the tests: drivers and agents watch their event loops."""

import os
import sys

if "ELASTICSTATE_TEST_SLOW_CALLBACKS" in os.environ:
    command = sys.orig_argv[1:3]
    if command[:1] == ["-m"] and command[1:] in (["elasticstate"], ["elasticstate.agent"]):
        from loop_watch import watch_loops

        watch_loops(os.environ["ELASTICSTATE_TEST_SLOW_CALLBACKS"])
