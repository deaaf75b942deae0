"""Options of torchrun, horovodrun and mpirun: accepted if they mean the same here; else the error names our option.

With ``--horovod``, options of horovodrun have their meaning there. reading.py computes the defaults that differ.
"""

from __future__ import annotations

import argparse
import difflib
import re
import textwrap
from collections.abc import Iterable
from typing import Any, NoReturn

from elasticstate.errors import OptionError
from elasticstate.machine import cores_of_this_machine, gpus_of_this_machine
from elasticstate.options.environment import inherited_environment
from elasticstate.options.options import Options, declarations

_HOSTS = "name the hosts with -H, --hostfile or --host-discovery-script, or use --listen."
_ONCE = f"elasticrun runs once per job, not once per host. Leave this option out, and {_HOSTS}"
_TUNING = "elasticstate does not have the part of Horovod that this option sets"
_LEFT_OUT = "elasticrun has no such option and does not need it. Leave this option out."
_OUTPUT = "elasticrun has no such option. Use --log-dir, and --tee for the streams that the terminal gets."
_CHECK = "elasticrun has no such option. Use --check."

# Other spellings, with their values, and what they mean here.
_TAKEN = {
    "--nproc-per-node": ("N|gpu|cpu|auto", "-np, on this machine alone"),
    "--nnodes": ("1", "this machine alone"),
    "--max-restarts": ("N", "--reset-limit, on this machine alone"),
    "-hostfile": ("PATH", "--hostfile"),
    "--output-filename": ("PATH", "--log-dir"),
    "--gloo-timeout-seconds": ("S", "--collective-timeout"),
    "--log-level": ("L", "--verbose if L is debug or trace"),
    "--timeline-filename": ("PATH", "HOROVOD_TIMELINE=PATH"),
    "--numa-binding": ("node|exclusive", "--bind numa or cores"),
}
_TAKEN_FLAGS = {
    "--standalone": "this machine alone",
    "--gloo": "--backend gloo",
    "--mpi": "--backend mpi",
    "--stall-check": "the default",
    "--no-stall-check": "--stall-check-time off",
    "--timeline-mark-cycles": "HOROVOD_TIMELINE_MARK_CYCLES=1",
    "--no-timeline-mark-cycles": "the default",
}
_REFUSED = {
    "--rdzv-backend": _ONCE,
    "--rdzv-endpoint": _ONCE,
    "--rdzv-conf": _ONCE,
    "--rdzv-id": "elasticrun has no such option. Use --job-name.",
    "--node-rank": _ONCE,
    "--master-addr": _ONCE,
    "--master-port": _ONCE,
    "--local-addr": _ONCE,
    "--monitor-interval": "elasticrun detects the end of a process at once. Leave this option out.",
    "--start-method": _LEFT_OUT,
    "--role": _LEFT_OUT,
    "--no-python": "a COMMAND that does not end in .py runs as it is typed. Leave this option out.",
    "--redirects": _OUTPUT,
    "-r": _OUTPUT,
    "-t": _OUTPUT,
    "--local-ranks-filter": "elasticrun has no such option. Use --only-ranks, which counts the ranks of the world.",
    "--event-log-handler": "elasticrun has no such option. Use --events-file.",
    "--check-build": _CHECK,
    "-cb": _CHECK,
    "--config-file": "elasticrun reads no such file. Set ELASTICSTATE_<OPTION> in the environment.",
    "--mpi-args": "elasticrun calls mpirun itself. Leave this option out.",
    "--binding-args": "elasticrun calls mpirun itself. Use --bind, or taskset in COMMAND.",
    "--jsrun": "elasticrun starts the workers itself. Leave this option out, or start a fixed world with jsrun.",
    "--tcp": "Gloo uses only TCP. Leave this option out, and set NCCL_IB_DISABLE=1 for NCCL.",
    "--prefix-output-with-timestamp": "elasticrun has no such option. Use --events-file for times.",
    "-prefix-timestamp": "elasticrun has no such option. Use --events-file for times.",
}

# Options of horovodrun that set nothing here: without effect after --horovod, else refused.
_TUNES = (
    "--fusion-threshold-mb",
    "--cycle-time-ms",
    "--cache-capacity",
    "--autotune-log-file",
    "--autotune-warmup-samples",
    "--autotune-steps-per-sample",
    "--autotune-bayes-opt-max-samples",
    "--autotune-gaussian-process-noise",
    "--num-nccl-streams",
    "--thread-affinity",
)
_TUNES_FLAGS = (
    "--disable-cache",
    "--hierarchical-allreduce",
    "--no-hierarchical-allreduce",
    "--hierarchical-allgather",
    "--no-hierarchical-allgather",
    "--autotune",
    "--no-autotune",
    "--mpi-threads-disable",
    "--no-mpi-threads-disable",
    "--log-with-timestamp",
    "--log-without-timestamp",
    "--log-hide-timestamp",
    "--no-log-hide-timestamp",
)
_BINDINGS = {"node": "numa", "exclusive": "cores"}
_LEVEL = "--log-level"
_QUIET_LEVELS = ("warning", "error", "fatal")


class _Refuse(argparse.Action):
    def __call__(self, parser: object, namespace: object, values: object, option: str | None = None) -> NoReturn:
        assert option is not None
        raise OptionError(f"{option}: {_REFUSED.get(option, '') or _REFUSED[option.replace('_', '-')]}")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of other launchers. Underscores work as well, as in torchrun."""
    add = parser.add_argument
    add("-n", dest="-n", default=None, help=argparse.SUPPRESS)
    add("-m", "--module", dest="--module", action="store_true", default=None, help=argparse.SUPPRESS)
    for name in (*_TAKEN, *_TUNES):
        add(*_spellings(name), dest=name, default=None, help=argparse.SUPPRESS)
    for name in (*_TAKEN_FLAGS, *_TUNES_FLAGS):
        add(*_spellings(name), dest=name, action="store_true", default=None, help=argparse.SUPPRESS)
    for name in _REFUSED:
        add(*_spellings(name), dest=argparse.SUPPRESS, nargs="?", action=_Refuse, help=argparse.SUPPRESS)


def help_text(width: int) -> str:
    """Return the section of ``--help-all`` about the options of other launchers."""
    meant = [
        "-n N: -np",
        "-m, --module: python -m COMMAND",
        *(f"{name} {value}: {ours}" for name, (value, ours) in _TAKEN.items()),
    ]
    meant += [f"{name}: {ours}" for name, ours in _TAKEN_FLAGS.items()]
    tunes = ", ".join((*_TUNES, *_TUNES_FLAGS, "--log-level warning"))
    paragraphs = ("; ".join(meant), f"With --horovod these are accepted, without effect: {tunes}.")
    filled = (
        textwrap.fill(text, width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
        for text in paragraphs
    )
    return "\n".join(("other spellings, of torchrun and horovodrun:", *filled))


def _spellings(name: str) -> list[str]:
    return list(dict.fromkeys([name, f"--{name[2:].replace('-', '_')}"])) if name.startswith("--") else [name]


def translate(given: dict[str, Any], texts: dict[str, str | None]) -> None:
    """Copy the ``given`` options of other launchers to ``texts``, under the names of our fields.

    Raises OptionError.
    """
    if (count := given["-n"]) is not None:
        if count.startswith("p"):
            raise OptionError(f"unknown option '-n{count}'. Write -np {count[1:]}")
        _put(texts, "-n", "np", count)
    per_node, nodes = given["--nproc-per-node"], given["--nnodes"]
    if nodes is not None:
        _one_node(nodes, per_node)
    if per_node is not None:
        _put(texts, "--nproc-per-node", "np", str(_workers(per_node)))
    for name, field, value in (
        ("--max-restarts", "reset_limit", given["--max-restarts"]),
        ("--output-filename", "log_dir", given["--output-filename"]),
        ("-hostfile", "hostfile", given["-hostfile"]),
        ("--gloo-timeout-seconds", "collective_timeout_s", given["--gloo-timeout-seconds"]),
        ("--gloo", "backend", "gloo" if given["--gloo"] else None),
        ("--mpi", "backend", "mpi" if given["--mpi"] else None),
        ("--no-stall-check", "stall_check_s", "off" if given["--no-stall-check"] else None),
    ):
        if value is not None:
            _put(texts, name, field, value)
    if (binding := given["--numa-binding"]) is not None:
        if binding not in _BINDINGS:
            raise OptionError(f"--numa-binding: {binding!r}: must be node or exclusive. Or use --bind.")
        _put(texts, "--numa-binding", "bind", _BINDINGS[binding])
    texts["timeline_filename"] = given["--timeline-filename"]
    if given["--timeline-mark-cycles"]:
        texts["timeline_mark_cycles"] = "1"
    level = (given[_LEVEL] or "").lower()
    if level in ("debug", "trace"):
        texts["verbose"] = "1"
    elif level not in ("", "info", *_QUIET_LEVELS):
        raise OptionError(f"{_LEVEL}: {given[_LEVEL]!r}: must be trace, debug or info")


def check(given: dict[str, Any], options: Options) -> None:
    """Raise OptionError for options that set nothing here, or that mean something else with these options."""
    if not options.horovod and (idle := _without_effect(given)):
        if idle[0] != _LEVEL:
            raise OptionError(f"{idle[0]}: {_TUNING}. Leave this option out, or add --horovod to ignore it.")
        raise OptionError(
            f"{_LEVEL}: {given[_LEVEL]!r}: elasticrun prints one line for each event (info), and with --verbose also "
            "its reasons (debug). Leave this option out, or use --verbose."
        )
    if not (options.hosts or options.hostfile or options.host_discovery_script or options.listen):
        return
    for name in ("--nproc-per-node", "--nnodes", "--standalone"):
        if given[name] is not None:
            raise OptionError(
                f"{name} is for a job on this machine alone. With -H or other hosts use -np and host:slots."
            )
    if given["--max-restarts"] is not None:
        raise OptionError(
            "--max-restarts counts the failures of each host. Use --reset-limit, which counts the failures of the job."
        )


def note(given: dict[str, Any]) -> str:
    """Return a note about the ``given`` options of horovodrun that have no effect; "" if there are none."""
    idle = _without_effect(given)
    return f"without effect: {', '.join(idle)}" if idle else ""


def _without_effect(given: dict[str, Any]) -> list[str]:
    idle = [name for name in (*_TUNES, *_TUNES_FLAGS) if given[name] is not None]
    return [*idle, _LEVEL] if (given[_LEVEL] or "").lower() in _QUIET_LEVELS else idle


def _put(texts: dict[str, str | None], name: str, field: str, value: str) -> None:
    if texts[field] is not None:
        raise OptionError(f"{name} and {declarations()[field].names[0]} exclude each other. Give only one of them.")
    texts[field] = value


def _workers(text: str) -> int:
    """Read torchrun's ``N``, ``gpu``, ``cpu`` or ``auto`` (the GPUs; without any, the cores). Raises OptionError."""
    if text.isdecimal() and int(text):
        return int(text)
    if text not in ("gpu", "cpu", "auto"):
        raise OptionError(f"--nproc-per-node: {text!r}: must be a whole number, at least 1, or gpu, cpu or auto")
    gpus = visible_gpus()
    if text == "gpu" and not gpus:
        raise OptionError("--nproc-per-node: 'gpu': this machine has no NVIDIA GPU. Use a number, or auto.")
    return cores_of_this_machine() if text == "cpu" or not gpus else gpus


def visible_gpus() -> int:
    """Return the number of NVIDIA GPUs of this machine that CUDA_VISIBLE_DEVICES does not hide."""
    gpus, visible = gpus_of_this_machine(), inherited_environment().get("CUDA_VISIBLE_DEVICES")
    return gpus if visible is None else min(gpus, len(re.findall(r"[^,]+", visible)))


def _one_node(text: str, per_node: str | None) -> None:
    """Raise OptionError unless torchrun's ``N`` or ``MIN:MAX`` means one host, which is this machine."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if match is None:
        raise OptionError(f"--nnodes: {text!r}: must be a whole number, or MIN:MAX")
    least, most = int(match[1]), int(match[2] or match[1])
    if (least, most) == (1, 1):
        return
    each = int(per_node) if per_node is not None and per_node.isdecimal() else 0
    sizes = "-np N --min-np M --max-np N"
    if each:
        sizes = f"-np {most * each} --min-np {least * each} --max-np {most * each}"
    raise OptionError(f"--nnodes: {text!r}: elasticrun runs once per job, not once per host. Use {sizes}, and {_HOSTS}")


def unknown(text: str, names: Iterable[str]) -> OptionError:
    """Return the error for an unknown option; it names the nearest option that exists."""
    name = text.partition("=")[0]
    nearest = difflib.get_close_matches(name.replace("_", "-"), list(names), n=1, cutoff=0.75)
    remedy = f"Did you mean {nearest[0]}?" if nearest else "elasticrun --help-all lists all options."
    return OptionError(f"unknown option {name!r}. {remedy}")
