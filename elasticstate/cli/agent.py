"""``elasticrun agent --join``: run workers on this machine for the job of an ``elasticrun --listen``."""

from __future__ import annotations

from collections.abc import Sequence

from elasticstate.cli.parser import CommandParser
from elasticstate.errors import OptionError
from elasticstate.machine import host_name
from elasticstate.net.names import host_port
from elasticstate.options import CONNECT_TIMEOUT_S, slots_of_step, slurm_node
from elasticstate.options.kinds import RACK_RULE, SECONDS, SLOTS, Kind, is_host_name, split_address
from elasticstate.options.reading import value_of


def main(argv: Sequence[str]) -> int:
    """Serve a driver that listens, until the end of its job (``elasticrun agent``)."""
    parser = CommandParser(
        prog="elasticrun agent",
        usage="elasticrun agent --join HOST:PORT --token-file F [options]",
        description="Run workers on this machine for the job of an elasticrun --listen. Run the same command on each "
        "machine, in any order, at any time.\nThe agent ends with the job. Ctrl-C drains this host first, as SIGTERM "
        "does; a second Ctrl-C kills its workers at once.",
    )
    add = parser.add_argument
    add(
        "--join",
        required=True,
        metavar="HOST:PORT",
        help="Host name and port where the driver listens. Several, separated by commas: where the next driver may "
        "listen, too.",
    )
    add("--token-file", required=True, metavar="F", help="Token file of the driver, or a copy of it.")
    add(
        "--slots",
        default="auto",
        metavar="N|auto",
        help="Number of workers that may run here. 0: none; the agent only helps to keep the record of a job with "
        "--standbys. auto: one for each GPU, or for each CPU core if there is no GPU; in "
        "a step of Slurm, of those that the step has.",
    )
    add(
        "--name",
        default=slurm_node() or host_name(),
        metavar="NAME",
        help="Name of this host in the job, unique among its hosts (default: the name of this machine; in a step of "
        "Slurm, that of the node).",
    )
    add("--rack", default="", metavar="NAME", help="Rack of this host: replicas of its shards are kept in other racks.")
    add(
        "--wait",
        default="600",
        metavar="S",
        help="Seconds to wait for a driver. After that the agent gives up (default: 600).",
    )
    add(
        "--status-socket",
        default="",
        metavar="PATH",
        help="Path of a Unix socket where elasticrun status --agent PATH asks this agent for its status.",
    )
    given = parser.parse_args(argv)
    addresses = value_of("--join", given.join, _JOIN)
    slots = 0 if given.slots == "0" else value_of("--slots", given.slots, SLOTS) or slots_of_step() or None
    wait_s = value_of("--wait", given.wait, SECONDS)
    if not is_host_name(given.name):
        raise OptionError(
            f"--name: {given.name!r}: must be letters, digits, dots, dashes and underscores, and not begin with a dot. "
            "Choose another name for this host."
        )
    if given.rack and not is_host_name(given.rack):
        raise OptionError(f"--rack: {given.rack!r}: {RACK_RULE}.")
    from elasticstate.agent.agent import join
    from elasticstate.processes import allow_many_descriptors, keep_owner_access

    allow_many_descriptors()
    keep_owner_access()
    return join(
        addresses,
        given.token_file,
        given.name,
        slots,
        wait_s=wait_s,
        connect_timeout_s=CONNECT_TIMEOUT_S,
        status_socket=given.status_socket,
        rack=given.rack,
    )


def _addresses(text: str) -> tuple[str, ...]:
    found = []
    for part in text.split(","):
        host, port = split_address(part)
        if not 0 < port < 1 << 16:
            raise ValueError(text)
        found.append(host_port(host, port))
    return tuple(found)


_JOIN = Kind("HOST:PORT", "HOST:PORT, with a port number from 1 to 65535", _addresses)
