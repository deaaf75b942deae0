"""Options for where the hosts of a job come from, and for how agents start there."""

from __future__ import annotations

from dataclasses import dataclass

from elasticstate import kinds
from elasticstate.config.option import option

DISCOVERY, REMOTE = "host discovery", "other hosts"


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """Options of host discovery, and of other hosts. Times are in seconds. None means: not given."""

    discovery: str | None = option(
        None,
        DISCOVERY,
        kinds.NAME,
        "--discovery",
        "Host source: list, hostfile, script, dial-in, slurm, ray, kubernetes, or one of an installed package "
        "(default: by the other options; inside an allocation of Slurm: slurm).",
    )
    host_discovery_script: str | None = option(
        None,
        DISCOVERY,
        kinds.PATH,
        "--host-discovery-script",
        "Program or shell command that prints one host or host:slots per line, perhaps followed by rack=NAME. It runs "
        "every --discovery-interval.",
    )
    discovery_interval_s: float | None = option(
        None,
        DISCOVERY,
        kinds.at_least_s(0.05),
        "--discovery-interval",
        "Seconds between two calls of host discovery (default: 1; slurm: 10).",
    )
    pod_selector: str | None = option(
        None,
        DISCOVERY,
        kinds.SELECTOR,
        "--pod-selector",
        "Label selector of the agents' pods in this namespace of Kubernetes, with --listen. The host of a pod that is "
        "being deleted is drained.",
    )
    launcher: str | None = option(
        None,
        REMOTE,
        kinds.NAME,
        "--launcher",
        "Program that starts an agent on each host: local, ssh, slurm, ray, or one of an installed package (default: "
        "local on this machine and ssh elsewhere; with --discovery slurm or ray: the same).",
    )
    ssh_port: int | None = option(
        None, REMOTE, kinds.PORT, "--ssh-port -p", "Port of the ssh servers (default: from ssh's configuration)."
    )
    ssh_identity_file: str | None = option(
        None,
        REMOTE,
        kinds.PATH,
        "--ssh-identity-file -i",
        "File with the private key for ssh (default: from ssh's configuration).",
    )
    listen: str | None = option(
        None,
        REMOTE,
        kinds.ADDRESS,
        "--listen",
        "Address and port for agents that dial in (elasticrun agent --join ADDR:PORT). Their hosts are the hosts of "
        "the job, without ssh and without discovery.",
    )
    token_file: str | None = option(
        None,
        REMOTE,
        kinds.PATH,
        "--token-file",
        "File with the token by which agents that dial in authenticate. elasticrun creates a missing file.",
    )
    env: tuple[str, ...] = option(
        (),
        REMOTE,
        kinds.NAMES,
        "--env",
        "Environment variables to pass to workers on other hosts, for example HF_TOKEN,NCCL_*. They never appear on a "
        "command line.",
    )
