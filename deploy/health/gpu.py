#!/usr/bin/env python3
"""Check the NVIDIA GPUs of this host. A command for elasticrun --health-check.

It asks nvidia-smi for uncorrectable memory errors since the driver was loaded, pages that wait for their retirement,
and failed remaps of rows. On each GPU that no process uses, most memory must be free, and torch, if it is installed,
computes a product of matrices, which must be equal to that of the CPU. What a GPU or a driver does not report is
skipped. The last line names all faults; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator

LIMIT_S = 20.0  # for each call of nvidia-smi
SIZE = 1024  # of the matrices; their values are small integers, so each product is exact


def ask(query: str, fields: str) -> list[list[str]]:
    """Return the rows that nvidia-smi prints; [] if it does not know the query or a field."""
    command = ["nvidia-smi", f"--query-{query}={fields}", "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False)
    rows = [[part.strip() for part in line.split(",")] for line in answer.stdout.splitlines()]
    return [row for row in rows if len(row) == fields.count(",") + 1] if answer.returncode == 0 else []


def counted(query: str, field: str, what: str) -> Iterator[str]:
    """Yield a fault for each GPU for which a counter, or an answer of Yes or No, is not zero."""
    for gpu, value in ask(query, f"gpu_bus_id,{field}"):
        if value.lower() == "yes" or (value.isdigit() and int(value) > 0):
            yield f"GPU {gpu}: {what} ({value})"


def product_faults(unused: list[int]) -> Iterator[str]:
    """Yield a fault for each of these GPUs that cannot compute a product of matrices."""
    if not unused:
        return
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order of nvidia-smi
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        import torch
    except ImportError:
        return
    if not torch.cuda.is_available():
        yield "torch finds no GPU"
        return
    values = torch.Generator().manual_seed(1)
    first, second = (torch.randint(-4, 5, (SIZE, SIZE), generator=values).float() for _ in range(2))
    expected = first @ second
    for index in unused:
        try:
            is_right = torch.equal((first.to(f"cuda:{index}") @ second.to(f"cuda:{index}")).cpu(), expected)
        except RuntimeError as error:  # noqa: PERF203
            yield f"GPU {index}: {str(error).splitlines()[0]}"
        else:
            if not is_right:
                yield f"GPU {index}: a product of matrices is wrong"


def faults(least_free: float) -> Iterator[str]:
    try:
        gpus = ask("gpu", "index,gpu_uuid,memory.free,memory.total")
    except FileNotFoundError:
        yield "nvidia-smi is not installed"
        return
    except subprocess.TimeoutExpired:
        yield f"nvidia-smi does not answer within {LIMIT_S:g} s"
        return
    if not gpus:
        yield "nvidia-smi finds no GPU"
        return
    yield from counted("gpu", "ecc.errors.uncorrected.volatile.total", "uncorrectable memory errors")
    yield from counted("gpu", "retired_pages.pending", "pages wait for their retirement, which a reset makes")
    yield from counted("remapped-rows", "remapped_rows.failure", "a remap of rows has failed")
    used = {uuid for uuid, _ in ask("compute-apps", "gpu_uuid,pid")}
    unused = []
    for index, uuid, free, total in gpus:
        if uuid in used:
            continue
        unused.append(int(index))
        if free.isdigit() and total.isdigit() and int(free) < least_free * int(total):
            yield f"GPU {index}: {free} of {total} MB are free, though no process uses it"
    yield from product_faults(unused)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--free",
        type=float,
        default=0.9,
        metavar="PART",
        help="least part of the memory that is free on a GPU without processes (0.9); 0 in a container that does not "
        "see the processes of others",
    )
    found = list(faults(parser.parse_args().free))
    print("; ".join(found) or "all GPUs are well")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
