"""``python -m elasticstate.worker.call NAME``: a worker of ``launch()``. It calls the function that its agent has for
it, and leaves there what the function returns. NAME is for people who look at processes.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from elasticstate.commits import call_file, result_file
from elasticstate.config import worker_environment
from elasticstate.errors import UsageError
from elasticstate.worker.record import record


def pack(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """What :func:`main` reads. The caller's module path comes first: the function's modules may be found only there."""
    return bytes(cloudpickle.dumps((sys.path, cloudpickle.dumps((function, args, kwargs)))))


@record
def main() -> None:
    """Raises what the function raises; TypeError if its result cannot be pickled."""
    environment = worker_environment()
    if environment is None:
        raise UsageError("elasticstate.worker.call is run by elasticstate.launch() and by nobody else")
    path, packed = pickle.loads(Path(call_file(environment.commits)).read_bytes())
    sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
    function, args, kwargs = pickle.loads(packed)
    _keep(function(*args, **kwargs), result_file(environment.commits))


def _keep(result: Any, path: str) -> None:
    """Whole or not at all."""
    if result is None:
        return
    try:
        data = cloudpickle.dumps(result)
    except Exception as error:
        raise TypeError(f"launch(): the result is a {type(result).__name__} that cannot be pickled: {error}") from error
    fresh = path + ".new"
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)
    os.replace(fresh, path)


if __name__ == "__main__":
    main()
