"""Options from texts: of the command line, of ``launch()``, of the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from elasticstate.core.policy import LEASE_MARGIN
from elasticstate.errors import OptionError
from elasticstate.machine import cores_of_this_machine
from elasticstate.options import kinds
from elasticstate.options.launched import slurm_allocation, slurm_tasks
from elasticstate.options.options import HOROVOD, Options, declarations
from elasticstate.options.spellings import visible_gpus

_HOROVOD_TWINS = {"start_timeout_s": ("HOROVOD_START_TIMEOUT",), "elastic_timeout_s": ("HOROVOD_ELASTIC_TIMEOUT",)}
_NO_STALL_CHECK = "HOROVOD_STALL_CHECK_DISABLE"


def read_options(
    given: Mapping[str, str | None], command: Sequence[str], environ: Mapping[str, str] | None = None
) -> Options:
    """Return the options from texts (field name -> text). An option without a text is read from its environment twin.

    Raises OptionError (one line) if a value is invalid, missing, or in conflict with another one.
    """
    values = _parse(given, environ)
    _use_allocation(values, environ)
    if not command:
        raise OptionError("COMMAND is missing. Add the command of the workers: elasticrun -np 2 python train.py")
    if "np" not in values:
        behind = next((word for word in command if word.partition("=")[0] in declarations()["np"].names), None)
        if behind is not None:
            raise OptionError(
                f"-np/--num-proc is missing: {behind!r} after COMMAND belongs to COMMAND. Write options before COMMAND."
            )
        values.update(_default_np(values))
        if (np := _whole_groups(values, values["np"])) != values["np"]:
            values.update(np=np, reason_of_np=f"{values['reason_of_np']}, in whole groups of {values['np_multiple']}")
    return _complete(values, list(command))


def read_options_to_check(
    given: Mapping[str, str | None], environ: Mapping[str, str] | None = None
) -> tuple[Options, frozenset[str]]:
    """Return the options for ``--check``, and the names of those that were given. COMMAND and ``-np`` are not required.

    Raises OptionError.
    """
    values = _parse(given, environ)
    _use_allocation(values, environ)
    options = _complete({"np": max(values.get("np_multiple", 1), values.get("min_np", 1)), **values}, ["true"])
    return options, frozenset(values)


def _parse(given: Mapping[str, str | None], environ: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the values of the options that were given. Raises OptionError."""
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for name, option in declarations().items():
        source, text = "/".join(option.names), given.get(name)
        if text is None:
            twins = [*option.twins, *(_HOROVOD_TWINS.get(name, ()) if values.get("horovod") else ())]
            source = next((twin for twin in twins if environ.get(twin)), "")
            text = environ.get(source)
        if text is None:
            source, text = _horovod_text(name, environ)
        if text is not None:
            values[name] = value_of(source, text, option.kind)
    for name, kind in (("timeline_filename", kinds.PATH), ("timeline_mark_cycles", kinds.FLAG)):
        variable, text = _horovod_text(name, environ)
        if (text := given.get(name) or text) is not None:
            values[name] = value_of(variable, text, kind)
    return values


def _horovod_text(name: str, environ: Mapping[str, str]) -> tuple[str, str | None]:
    """Return Horovod's variable for a field, and the text that it gives; None: it is not set."""
    if name == "stall_check_s" and environ.get(_NO_STALL_CHECK, "0") not in ("", "0"):
        return _NO_STALL_CHECK, "off"
    variable = HOROVOD.get(name, "")
    return variable, environ.get(variable) or None


def value_of(source: str, text: str, kind: kinds.Kind) -> Any:
    """Return the value that a text of this source means. Raises OptionError."""
    try:
        return kind.parse(text)
    except ValueError:
        raise OptionError(f"{source}: {text!r}: must be {kind.valid}") from None


def _use_allocation(values: dict[str, Any], environ: Mapping[str, str] | None) -> None:
    """Inside an allocation of Slurm, take hosts and default sizes from it, unless an option says where hosts are.

    Raises OptionError.
    """
    if values.keys() & {"hosts", "hostfile", "host_discovery_script", "listen", "launcher"}:
        return
    allocation = slurm_allocation(environ)
    if allocation is None or values.get("discovery", "slurm") != "slurm":
        return
    if (tasks := slurm_tasks(environ)) > 1:
        raise OptionError(
            f"srun has started {tasks} processes of elasticrun, and one is enough: it starts an agent on each node of "
            "the allocation. Write elasticrun without srun in the batch script."
        )
    slots = sum(allocation.slots(values.get("slots_per_host")))
    if values.get("np", 0) > slots:
        raise OptionError(
            f"-np: {values['np']}: the allocation of Slurm has {slots} slots. Ask Slurm for more (--nodes, --ntasks, "
            "--gpus-per-node), give --slots-per-host, or name the hosts: -H localhost:N."
        )
    values["discovery"] = "slurm"
    if "np" not in values:
        values["np"] = max(_whole_groups(values, slots), values.get("min_np", 1))
        values.setdefault("min_np", values.get("np_multiple", 1))


def _whole_groups(values: Mapping[str, Any], workers: int) -> int:
    """Return the largest multiple of ``--np-multiple`` up to this number, at least one group."""
    multiple: int = values.get("np_multiple", 1)
    return max(multiple, workers - workers % multiple)


def _default_np(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``np`` and why: a worker for each slot of the hosts, or of this machine. Raises OptionError."""
    slots = values.get("slots_per_host")  # 0: auto, which only the driver can count for other hosts
    if "hosts" in values and slots != 0:
        np = sum(kinds.parse_host(host, slots or 1).slots for host in values["hosts"])
        return {"np": np, "reason_of_np": "one for each slot of the hosts"}
    if values.keys() & {*_SOURCES.values(), "discovery", "launcher"}:
        raise OptionError("-np/--num-proc is missing. Give the number of workers to start with.")
    if slots:
        return {"np": slots, "reason_of_np": "one for each slot"}
    gpus = visible_gpus()
    what = "GPU" if gpus else "core"
    return {"np": gpus or cores_of_this_machine(), "reason_of_np": f"one for each {what} of this machine"}


def _complete(values: dict[str, Any], command: list[str]) -> Options:
    """Fill in the defaults that depend on other options. Raises OptionError if two options contradict each other."""
    if command[0].endswith(".py"):
        command = [sys.executable, "-u", *command]
    places = [name for name in ("hosts", "hostfile", "host_discovery_script") if name in values]
    if len(places) > 1:
        both = " and ".join("--" + name.replace("_", "-") for name in places)
        raise OptionError(f"{both} exclude each other. Give only one of them.")
    _refuse_unfit_source(values)
    if "listen" in values and places:
        raise OptionError(f"--listen and --{places[0].replace('_', '-')} exclude each other. Give only one of them.")
    if "listen" in values and "token_file" not in values:
        raise OptionError("--listen requires --token-file. Agents that dial in authenticate with the token.")
    if "token_file" in values and "listen" not in values:
        raise OptionError("--token-file requires --listen. Add --listen, or leave --token-file out.")
    if values.get("tee", 3) != 3 and "log_dir" not in values:
        raise OptionError(
            f"--tee: {values['tee']}: must be 3 without --log-dir, or output would be lost. Add --log-dir."
        )
    np = values["np"]
    is_other_source = values.get("discovery") not in (None, *_SOURCES)  # one that reads no option of its own
    hosts_may_change = bool({"host_discovery_script", "listen"} & set(values)) or is_other_source
    is_horovod = values.get("horovod", False)
    # horovodrun's rule: only these options make a job elastic. Such a job has no limit above.
    is_elastic = hosts_may_change or (is_horovod and "min_np" in values)
    if is_horovod and not is_elastic:
        values.setdefault("reset_limit", 0)
    values.setdefault("min_np", np)
    values.setdefault("max_np", None if is_elastic else np)
    _refuse_broken_groups(values)
    if values["min_np"] > np:
        raise OptionError(
            f"--min-np: {values['min_np']}: must be at most -np, which is {np}. Lower --min-np, or raise -np."
        )
    if values["max_np"] is not None and values["max_np"] < np:
        raise OptionError(
            f"--max-np: {values['max_np']}: must be at least -np, which is {np}. Raise --max-np, or lower -np."
        )
    if values.get("debug_rank", 0) >= np:
        raise OptionError(f"--debug-rank: {values['debug_rank']}: must be less than -np, which is {np}.")
    if "debug_rank" in values and "listen" in values:
        raise OptionError(
            "--debug-rank and --listen exclude each other: agents that dial in do not have this terminal. Call "
            "debugpy.listen() in the script, and attach an editor."
        )
    if values.get("spares") and values["max_np"] is None:
        raise OptionError(
            f"--spares: {values['spares']}: requires --max-np, or all workers join the world. Add --max-np."
        )
    if "durable_dir" in values and "://" not in values["durable_dir"]:
        values["durable_dir"] = os.path.abspath(values["durable_dir"])
    if values.get("one_copy_per_host") and values.get("backend") == "mpi":
        raise OptionError(
            "--one-copy-per-host and --backend mpi: not tested together. Use --backend gloo or nccl, or leave "
            "--one-copy-per-host out."
        )
    if values.get("one_copy_per_host") and values.get("divergence") == "restore":
        raise OptionError(
            "--divergence restore and --one-copy-per-host exclude each other: workers that keep no commits are not "
            "compared. Use --divergence warn, or leave --one-copy-per-host out."
        )
    _settle_time_limits(values, hosts_may_change or "hostfile" in values)
    _refuse_early_shutdown(values)
    _refuse_too_few_slots(values)
    return Options(command=tuple(command), **values)


_SOURCES = {
    "list": "hosts",
    "hostfile": "hostfile",
    "script": "host_discovery_script",
    "dial-in": "listen",
    "kubernetes": "pod_selector",
}


def _refuse_unfit_source(values: Mapping[str, Any]) -> None:
    """Raise OptionError if ``--discovery`` and the options that name hosts contradict each other."""
    if "pod_selector" in values and "listen" not in values:
        raise OptionError("--pod-selector requires --listen. Agents in pods dial in: add --listen and --token-file.")
    discovery = values.get("discovery")
    if discovery is None:
        return
    for source, name in _SOURCES.items():
        option = "/".join(declarations()[name].names)
        if name in values and discovery != source and (name, discovery) != ("listen", "kubernetes"):
            raise OptionError(f"--discovery: {discovery!r}: excludes {option}. Give only one of them.")
        if name not in values and discovery == source and source != "list":
            raise OptionError(f"--discovery: {discovery!r}: requires {option}. Add it.")


def _refuse_broken_groups(values: Mapping[str, Any]) -> None:
    """Raise OptionError if a number of workers is no multiple of ``--np-multiple``."""
    multiple = values.get("np_multiple", 1)
    for name in ("np", "min_np", "max_np"):
        number = values[name]
        if number is not None and number % multiple:
            option, more = declarations()[name].names[0], number - number % multiple + multiple
            valid = f"{more - multiple} or {more}" if number > multiple else more
            raise OptionError(
                f"{option}: {number}: must be a multiple of --np-multiple, which is {multiple}. Give {valid}."
            )


def _refuse_early_shutdown(values: Mapping[str, Any]) -> None:
    """Raise OptionError if a stall would end the job before it is reported."""
    check_s = values.get("stall_check_s", declarations()["stall_check_s"].default)
    shutdown_s = values.get("stall_shutdown_s")
    if check_s is not None and shutdown_s is not None and shutdown_s < check_s:
        raise OptionError(
            f"--stall-shutdown-time: {shutdown_s:g}: must be at least --stall-check-time, which is {check_s:g}. Raise "
            "it, or lower --stall-check-time."
        )


def _refuse_too_few_slots(values: Mapping[str, Any]) -> None:
    """Raise OptionError if the hosts cannot change and have too few slots for any world."""
    default_slots = values.get("slots_per_host", 1)
    if "hosts" not in values or not default_slots:
        return  # the hosts may change, or only the driver can count the devices
    slots = sum(kinds.parse_host(host, default_slots).slots for host in values["hosts"])
    fewest = values["np"] if values.get("horovod") else values["min_np"]
    if slots < fewest:
        least = "-np" if fewest == values["np"] else "--min-np"
        raise OptionError(
            f"-H/--hosts: the hosts have {slots} slots, fewer than {least}, which is {fewest}. Add hosts or "
            f"slots (host:slots, --slots-per-host), or lower {least}."
        )


# ------------------------------------------------------------------- time limits that contradict each other


class _Pair(NamedTuple):
    """``short`` times ``factor`` must be at most ``long``."""

    short: str
    long: str
    reason: str
    factor: float = 1.0


_LEASE = _Pair(
    "lease_s",
    "elastic_timeout_s",
    f"the others wait {LEASE_MARGIN:g} times the lease for an unreachable host, and the job would end before",
    factor=LEASE_MARGIN,
)
_DISCOVERY = "the job would end before it asks for hosts again"
_PAIRS_OF_DISCOVERY = tuple(
    _Pair("discovery_interval_s", long, _DISCOVERY) for long in ("start_timeout_s", "elastic_timeout_s")
)


def _settle_time_limits(values: dict[str, Any], hosts_may_change: bool) -> None:
    """Let defaults follow the time limits that were given. Raises OptionError if two that were given contradict.

    If only the short one of two is given, the default of the long one follows it. So no single option is refused.
    """
    given = dict(values)
    for pair in (_LEASE, *(_PAIRS_OF_DISCOVERY if hosts_may_change else ())):
        short, long = given.get(pair.short), given.get(pair.long)
        if short is not None and long is not None and short * pair.factor > long:
            raise OptionError(_refusal(pair, short, long))
        if short is not None and long is None:
            values[pair.long] = max(values.get(pair.long, declarations()[pair.long].default), short * pair.factor)


def _refusal(pair: _Pair, short: float, long: float) -> str:
    short_name, long_name = declarations()[pair.short].names[0], declarations()[pair.long].names[0]
    most = f"{long_name}, which is {long:g}"
    if pair.factor != 1.0:
        most = f"{long / pair.factor:g}, as {long_name} is {long:g}"
    return f"{short_name}: {short:g}: must be at most {most}: {pair.reason}. Lower {short_name}, or raise {long_name}."
