"""WorkerStarter: starts the processes of workers."""

from __future__ import annotations

from elasticstate import commits, error_file
from elasticstate.agent.host_storage import HostStorage
from elasticstate.agent.job_place import JobPlace
from elasticstate.agent.liveness import Liveness
from elasticstate.agent.output import Audience, Outputs
from elasticstate.agent.post_mortem import count_oom_kills
from elasticstate.agent.worker_handle import WorkerHandle
from elasticstate.agent.worker_process import WorkerProcess, environment_of_worker
from elasticstate.config import WorkerEnvironment
from elasticstate.core.types import WorkerId
from elasticstate.errors import CommitStorageError
from elasticstate.net.launch import Launch
from elasticstate.net.messages import JobSpec


class WorkerStarter:
    """Starter of workers, each with its files, output and environment."""

    def __init__(
        self, launch: Launch, spec: JobSpec, place: JobPlace, storage: HostStorage, outputs: Outputs, local_address: str
    ) -> None:
        """``local_address``: the address at which other hosts reach this one."""
        self._launch = launch
        self._spec = spec
        self._place = place
        self._storage = storage
        self._outputs = outputs
        self._local_address = local_address

    def start(self, worker: WorkerId, reserve_bytes: int) -> WorkerHandle:
        """Start a worker. Raises OSError, ValueError or CommitStorageError if that fails."""
        options, storage = self._spec.options, self._storage
        try:
            liveness = Liveness(storage.files(worker.slot).page, storage.owner(worker.slot))
            storage.make_result(worker.slot)
            error_name = commits.error_file(worker.slot)
            error_file.forget(error_name, storage.directory.fd)
            audience = Audience(options.only_ranks)
            pumps = self._outputs.pumps(worker, options, audience)
            process = WorkerProcess(
                worker, options.command, self._environment(worker, reserve_bytes), self._launch.directory, *pumps
            )
        except (OSError, ValueError, CommitStorageError):
            self._outputs.ended(worker)
            raise
        return WorkerHandle(process, liveness, audience, error_name, count_oom_kills())

    def _environment(self, worker: WorkerId, reserve_bytes: int) -> dict[str, str]:
        spec = self._spec
        own = WorkerEnvironment(
            socket=self._place.socket,
            agent=self._place.mark,
            worker=worker,
            job=spec.job,
            job_id=spec.job_id,
            local_address=self._local_address,
            commits=str(self._storage.directory.path / str(worker.slot)),
            reserve_bytes=reserve_bytes,
            preemption_signals=spec.options.preemption_signals,
            backend=spec.options.backend,
        )
        return environment_of_worker(self._launch.environment, spec.environment, own)
