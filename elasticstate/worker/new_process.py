"""Program that runs a worker's Python command in a new process: ``python new_process.py x.py ARGS``, or ``-m x ARGS``.

A worker that does not fork from the template process ends as a forked one does (worker/script.py), too.
"""

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # the directory of this file, which is not the script's

import elasticstate.worker.script as script  # noqa: I001  (first: its exit function must be the last one to run)

import os

from elasticstate.worker.gloo_rest import watch_models


def main() -> None:
    command = [*sys.orig_argv[: -len(sys.argv)], *sys.argv[1:]]
    directory = os.getcwd() if sys.argv[1] == "-m" else os.path.dirname(os.path.realpath(sys.argv[1]))
    if script.hidden_module(directory):  # by one of the few imports above
        os.execv(sys.executable, command)
    watch_models()
    script.run(command)


if __name__ == "__main__":
    main()
