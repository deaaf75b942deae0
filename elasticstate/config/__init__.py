"""The options, and the environment: the only part of the package that reads ``os.environ``."""

from __future__ import annotations

from elasticstate.config.environment import (
    ANY_NCCL,
    COMMIT_DEVICE_MEMORY,
    WorkerEnvironment,
    agent_variable,
    commit_device_memory,
    environment_variable,
    error_file_path,
    forget_plain_variables,
    has_cursor_control,
    inherited_environment,
    missing_temporary_directory,
    passed_on,
    plain_variables,
    replace_environment,
    runtime_directory,
    set_unless_given,
    ssh_client,
    temporary_directory,
    tunes_malloc,
    usable_runtime_directory,
    worker_environment,
)
from elasticstate.config.launchers import LaunchedPlace, launched_local_rank, launched_place, refusal_of_other_launchers
from elasticstate.config.option import PREFIX, Names
from elasticstate.config.options import Options, option_names
from elasticstate.config.reading import read_options, read_options_to_check
from elasticstate.config.slurm import slots_of_step, slurm_allocation, slurm_node, slurm_tasks

__all__ = [
    "ANY_NCCL",
    "COMMIT_DEVICE_MEMORY",
    "PREFIX",
    "LaunchedPlace",
    "Names",
    "Options",
    "WorkerEnvironment",
    "agent_variable",
    "commit_device_memory",
    "environment_variable",
    "error_file_path",
    "forget_plain_variables",
    "has_cursor_control",
    "inherited_environment",
    "launched_local_rank",
    "launched_place",
    "missing_temporary_directory",
    "option_names",
    "passed_on",
    "plain_variables",
    "read_options",
    "read_options_to_check",
    "refusal_of_other_launchers",
    "replace_environment",
    "runtime_directory",
    "set_unless_given",
    "slots_of_step",
    "slurm_allocation",
    "slurm_node",
    "slurm_tasks",
    "ssh_client",
    "temporary_directory",
    "tunes_malloc",
    "usable_runtime_directory",
    "worker_environment",
]
