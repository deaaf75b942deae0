"""The options, and the environment: the only part of the package that reads ``os.environ``."""

from __future__ import annotations

from elasticstate.config.environment import (
    COMMIT_DEVICE_MEMORY,
    WorkerEnvironment,
    commit_device_memory,
    error_file_path,
    foreign_world_size,
    inherited_environment,
    passed_on,
    runtime_directory,
    set_unless_given,
    socket_variable,
    ssh_client,
    worker_environment,
)
from elasticstate.config.options import PREFIX, Names, Options, option_names, read_options, read_options_to_check

__all__ = [
    "COMMIT_DEVICE_MEMORY",
    "PREFIX",
    "Names",
    "Options",
    "WorkerEnvironment",
    "commit_device_memory",
    "error_file_path",
    "foreign_world_size",
    "inherited_environment",
    "option_names",
    "passed_on",
    "read_options",
    "read_options_to_check",
    "runtime_directory",
    "set_unless_given",
    "socket_variable",
    "ssh_client",
    "worker_environment",
]
