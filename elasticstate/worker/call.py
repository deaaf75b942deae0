"""Worker of ``launch()``: ``python -m elasticstate.worker.call NAME``.

It calls the function that its agent holds, and writes the function's result to the agent's file. NAME is only shown in
process lists.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from elasticstate.commits import RESULT_HEAD_BYTES, result_hasher
from elasticstate.errors import UsageError
from elasticstate.net.link import Given, StorageLink
from elasticstate.options import worker_environment
from elasticstate.worker.record import record

_NOT_LAUNCHED = "Only elasticstate.launch() runs elasticstate.worker.call. Call elasticstate.launch(function) instead."


def pack(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Return the bytes that :func:`main` reads. The caller's module path comes first: unpickling may need it."""
    return bytes(cloudpickle.dumps((sys.path, cloudpickle.dumps((function, args, kwargs)))))


@record
def main() -> None:
    """Call the function and store its result.

    Raises the function's errors, and TypeError if the result cannot be pickled.
    """
    environment = worker_environment()
    if environment is None:
        raise UsageError(_NOT_LAUNCHED)
    storage = StorageLink(environment.socket, environment.worker)
    given = storage.ask()
    storage.close()
    for fd in (given.page, *given.buffers):
        os.close(fd)
    if given.call is None:
        raise UsageError(_NOT_LAUNCHED)
    with open(given.call, "rb") as file:  # the agent's memory: it received the call from the driver
        path, packed = pickle.loads(os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0))
    sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
    function, args, kwargs = pickle.loads(packed)
    _store_result(function(*args, **kwargs), given)


def _store_result(result: Any, given: Given) -> None:
    """Write the result. The keyed checksum is written last, so a partial result is never valid."""
    if result is None:
        return
    try:
        data = cloudpickle.dumps(result)
    except Exception as error:
        raise TypeError(
            f"launch(): the result is a {type(result).__name__} that cannot be pickled: {error}. Return another value."
        ) from error
    hasher = result_hasher(given.key)
    hasher.update(data)
    with open(given.result, "r+b") as file:
        file.write(bytes(RESULT_HEAD_BYTES))
        file.write(data)
        file.flush()
        os.pwrite(file.fileno(), hasher.digest(), 0)


if __name__ == "__main__":
    main()
