"""A script that a launcher other than elasticrun has started several times."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elasticstate.mpi.installation import AS_ROOT

PROGRAM = """
import elasticstate, elasticstate.horovod as hvd, torch.distributed as dist
state = elasticstate.ObjectState(step=0)
train = elasticstate.run(lambda state: print("trained", flush=True))
for call in (hvd.init, lambda: train(state), state.commit):
    try:
        call()
        print("no error", flush=True)
    except elasticstate.UsageError as error:
        print(f"error: {error}", flush=True)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
state.commit()
print("committed", flush=True)
"""
MPIRUN = Path(sys.executable).parent / "mpirun"


@pytest.mark.skipif(not MPIRUN.exists(), reason="needs mpirun: pip install 'elasticstate[mpi]'")
def test_mpirun_does_not_train_worlds_of_one() -> None:
    """Refused with Horovod's API and with ours. A script that makes its own process group may commit."""
    command = [str(MPIRUN), "--oversubscribe", "-np", "2", sys.executable, "-c", PROGRAM]
    environment = {**os.environ, **AS_ROOT, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = sorted(done.stdout.splitlines())
    assert len(lines) == 2 * 4, done.stdout
    assert lines[:2] == ["committed"] * 2
    assert set(lines[2:]) == {
        "error: OMPI_COMM_WORLD_SIZE=2: another launcher has started 2 processes, and each of them would train alone. "
        "Start the script with 'elasticrun -np 2 python ...', or unset OMPI_COMM_WORLD_SIZE to train alone."
    }
