"""The options, and the environment: the only part of the package that reads ``os.environ``."""

from __future__ import annotations

from elasticstate.options.environment import (
    ANY_NCCL as ANY_NCCL,
    COMMIT_DEVICE_MEMORY as COMMIT_DEVICE_MEMORY,
    WorkerEnvironment as WorkerEnvironment,
    agent_variable as agent_variable,
    commit_device_memory as commit_device_memory,
    environment_variable as environment_variable,
    error_file_path as error_file_path,
    forget_plain_variables as forget_plain_variables,
    has_cursor_control as has_cursor_control,
    inherited_environment as inherited_environment,
    interface_variables as interface_variables,
    missing_temporary_directory as missing_temporary_directory,
    passed_on as passed_on,
    plain_variables as plain_variables,
    replace_environment as replace_environment,
    runtime_directory as runtime_directory,
    set_unless_given as set_unless_given,
    ssh_client as ssh_client,
    temporary_directory as temporary_directory,
    tunes_malloc as tunes_malloc,
    usable_runtime_directory as usable_runtime_directory,
    worker_environment as worker_environment,
)
from elasticstate.options.launched import (
    LaunchedPlace as LaunchedPlace,
    launched_local_rank as launched_local_rank,
    launched_place as launched_place,
    refusal_of_other_launchers as refusal_of_other_launchers,
    slots_of_step as slots_of_step,
    slurm_allocation as slurm_allocation,
    slurm_node as slurm_node,
)
from elasticstate.options.options import (
    CONNECT_TIMEOUT_S as CONNECT_TIMEOUT_S,
    Declaration as Declaration,
    Options as Options,
    declarations as declarations,
)
from elasticstate.options.reading import (
    read_options as read_options,
    read_options_to_check as read_options_to_check,
)
