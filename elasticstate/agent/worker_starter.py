"""WorkerStarter: starts the processes of workers. They fork from the template process if they can."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from elasticstate import commits, error_file
from elasticstate.agent import exec_shim
from elasticstate.agent.host_storage import HostStorage
from elasticstate.agent.job_place import JobPlace
from elasticstate.agent.liveness import Liveness
from elasticstate.agent.output import Audience, Outputs
from elasticstate.agent.post_mortem import count_oom_kills
from elasticstate.agent.python_command import for_new_process
from elasticstate.agent.template import Template, TemplateError
from elasticstate.agent.worker_handle import WorkerHandle
from elasticstate.agent.worker_process import Child, WorkerProcess, environment_of_workers, start_command
from elasticstate.core.types import PlainPlace, WorkerId
from elasticstate.errors import CommitStorageError
from elasticstate.net.fork_link import ForkRequest
from elasticstate.net.launch import Launch
from elasticstate.net.messages import JobSpec
from elasticstate.net.names import is_loopback, selecting_interface
from elasticstate.net.store_listener import StoreListener
from elasticstate.options import WorkerEnvironment, agent_variable, plain_variables

STORE_PROGRAM = str(Path(exec_shim.__file__).parents[1] / "worker" / "plain_store.py")


FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "256"}
"""Variable that lets torch record the last collectives of a process. Each costs about a microsecond."""


class WorkerStarter:
    """Starter of workers, each with its files, output and environment."""

    def __init__(
        self,
        launch: Launch,
        spec: JobSpec,
        place: JobPlace,
        storage: HostStorage,
        outputs: Outputs,
        local_address: str,
        template: Template | None,
        warn: Callable[[str], None],
    ) -> None:
        """``local_address``: the address at which other hosts reach this one. ``template``: None if it is of no use."""
        self._launch = launch
        self._spec = spec
        self._place = place
        self._storage = storage
        self._outputs = outputs
        self._local_address = local_address
        self._template = template
        self._warn = warn

    async def start(self, worker: WorkerId, reserve_bytes: int, place: PlainPlace | None) -> WorkerHandle:
        """Start a worker. Raises OSError, ValueError or CommitStorageError if that fails."""
        options, storage = self._spec.options, self._storage
        try:
            liveness = Liveness(storage.files(worker.slot).page, storage.owner(worker.slot))
            storage.make_result(worker.slot)
            error_name = commits.error_file(worker.slot)
            error_file.forget(error_name, storage.directory.fd)
            audience = Audience(options.only_ranks)
            pumps = self._outputs.pumps(worker, options, audience)
            child, pipes = await self._start_process(self._environment(worker, reserve_bytes, place))
            process = WorkerProcess(worker, child, *pumps, pipes)
        except (OSError, ValueError, CommitStorageError):
            self._outputs.ended(worker)
            raise
        return WorkerHandle(process, liveness, audience, error_name, count_oom_kills())

    async def _start_process(self, environment: dict[str, str]) -> tuple[Child, tuple[int, int]]:
        """Start the process. Return it, with the ends from which to read its stdout and stderr."""
        (out, stdout), (err, stderr) = os.pipe(), os.pipe()
        try:
            return await self._child(environment, stdout, stderr), (out, err)
        except BaseException:
            os.close(out)
            os.close(err)
            raise
        finally:
            os.close(stdout)
            os.close(stderr)

    async def _child(self, environment: dict[str, str], stdout: int, stderr: int) -> Child:
        command, directory = self._spec.options.command, self._launch.directory
        if self._template is not None:
            try:
                request = ForkRequest(tuple(command), directory, environment)
                return await self._template.fork(request, stdout, stderr)
            except TemplateError as error:
                self._warn(f"a worker starts as a new process, which imports torch anew: the template process {error}")
        return start_command(for_new_process(command, directory, environment), environment, directory, stdout, stderr)

    def _environment(self, worker: WorkerId, reserve_bytes: int, place: PlainPlace | None) -> dict[str, str]:
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
            one_copy=spec.options.one_copy_per_host,
            start_size=spec.options.np,
        )
        common = environment_of_workers(self._launch.environment, spec.environment)
        plain = {} if place is None else plain_variables(place, spec.job, common, self._interface())
        return {**FLIGHT_RECORDER, **common, **plain, **own.variables()}

    def _interface(self) -> str | None:
        """Return the network interface by which other hosts reach this one; None if none do, or if it is not known."""
        return None if is_loopback(self._local_address) else selecting_interface(self._local_address)

    async def start_store(self, listener: StoreListener, stderr: int) -> Child:
        """Start the process that serves a store for plain workers (worker/plain_store.py). Raises OSError."""
        environment = environment_of_workers(self._launch.environment, self._spec.environment)
        environment.update([agent_variable(self._place.mark)])
        command = (sys.executable, STORE_PROGRAM, self._local_address, str(listener.port))
        if self._template is not None:
            try:
                request = ForkRequest(command, "/", environment)
                return await self._template.fork(request, listener.fileno(), stderr)
            except TemplateError:
                pass  # the workers' own starts have reported this
        return start_command(command, environment, "/", listener.fileno(), stderr)
