#!/usr/bin/env python3
"""Check the processors, the shared memory and the disk of this host. A command for elasticrun --health-check.

It computes a product of matrices twice, on two cores if there are, compares the results, and looks for free space in
/dev/shm, where commits live. It writes, reads and removes a file in the working directory of the job. It takes less
than a second. The last line names all faults; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress

SIZE = 96  # of the matrices
FILE_BYTES = 1 << 20


def product(core: int) -> list[list[float]]:
    """Return a product of two matrices, which is the same each time, computed on this core if that is allowed."""
    with suppress(OSError):
        os.sched_setaffinity(0, {core})
    values = random.Random(1)
    first, second = ([[values.random() for _ in range(SIZE)] for _ in range(SIZE)] for _ in range(2))
    columns = list(zip(*second, strict=True))
    return [[sum(a * b for a, b in zip(row, column, strict=True)) for column in columns] for row in first]


def faults(shared_mb: int, directory: str) -> Iterator[str]:
    cores = sorted(os.sched_getaffinity(0))
    pair = random.sample(cores, 2) if len(cores) > 1 else cores * 2
    if product(pair[0]) != product(pair[1]):
        yield f"a product of matrices differs between core {pair[0]} and core {pair[1]}"
    try:
        found = os.statvfs("/dev/shm")
        if (free_mb := found.f_bavail * found.f_frsize >> 20) < shared_mb:
            yield f"/dev/shm has {free_mb} MB free, less than {shared_mb} MB"
    except OSError as error:
        yield f"/dev/shm: {error.strerror}"
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".health-") as file:
            data = os.urandom(FILE_BYTES)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            if file.read() != data:
                yield f"{directory}: a file has other bytes than were written"
    except OSError as error:
        yield f"{directory}: cannot write a file: {error.strerror}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shared", type=int, default=64, metavar="MB", help="least free space in /dev/shm (64)")
    parser.add_argument("--directory", default=".", help="where a file is written (the working directory)")
    given = parser.parse_args()
    found = list(faults(given.shared, given.directory))
    print("; ".join(found) or "processors, shared memory and disk are well")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
