"""Runs at the start of each Python process of the tests: drivers and agents watch their event loops."""

import atexit
import gc
import os
import sys

# Imports make almost no garbage. With Python's own threshold, collections take a third of the time of importing torch,
# which many processes of the tests do. Scripts and jobs that fork have Python's own (kit/forks).
gc.set_threshold(200_000, *gc.get_threshold()[1:])


def _freeze() -> None:
    """Skip the collection at the end of the process, which takes half a second with torch.

    Triton needs it, and so do tests of what happens at the end.
    """
    if "triton" not in sys.modules and "ELASTICSTATE_TEST_LAST_COLLECTION" not in os.environ:
        gc.freeze()


atexit.register(_freeze)  # the last exit function

if "ELASTICSTATE_TEST_SLOW_CALLBACKS" in os.environ:
    command = sys.orig_argv[1:3]
    if command[:1] == ["-m"] and command[1:] in (["elasticstate"], ["elasticstate.agent"]):
        from loop_watch import watch_loops

        watch_loops(os.environ["ELASTICSTATE_TEST_SLOW_CALLBACKS"])
