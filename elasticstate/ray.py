"""Jobs on a cluster of Ray: the nodes are the hosts, and agents run in actors (docs/guides/ray.md)."""

from __future__ import annotations

import logging
import os
import resource
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from elasticstate.core.ids import HostSlots
from elasticstate.discovery import DiscoveryFault, Hosts, HostSource
from elasticstate.errors import OptionError
from elasticstate.failures import how_it_ended
from elasticstate.launchers import Launcher
from elasticstate.net.messages import Launch
from elasticstate.options import Options
from elasticstate.threads import in_thread

# ---------------------------------------------------------------------------------------------------------------- nodes
# The nodes of a cluster as hosts. The functions block: call them in a thread.


_PREFIX = "ray-"
_connecting = threading.Lock()


class Node(NamedTuple):
    """A living node of the cluster. ``host``: name of the host in the job."""

    host: str
    id: str
    gpus: int
    cpus: int

    def slots(self, slots_per_host: int | None) -> int:
        """Return ``--slots-per-host``, else one slot for each GPU, else one for each CPU."""
        return slots_per_host or self.gpus or self.cpus


def require_ray() -> None:
    """Raise OptionError if Ray is not installed."""
    if find_spec("ray") is None:  # its import takes 0.2 s, and would hold up the event loop
        raise OptionError("--discovery: 'ray': Ray is not installed. Run: pip install 'elasticstate[ray]'")


def connected() -> Any:
    """Return the module of Ray, connected to the cluster of RAY_ADDRESS or of this machine. Raises ConnectionError."""
    import ray

    with _connecting:
        if not ray.is_initialized():
            ray.init(address="auto", namespace="elasticstate", logging_level=logging.WARNING)
    return ray


def nodes() -> list[Node]:
    """Return the living nodes that nobody drains. Raises ConnectionError."""
    from elasticstate.compat.libraries import draining_nodes

    found = connected().nodes()
    leaving = draining_nodes()
    return [
        Node(host_of(node["NodeID"]), node["NodeID"], *(int(node["Resources"].get(kind, 0)) for kind in ("GPU", "CPU")))
        for node in found
        if node["Alive"] and node["NodeID"] not in leaving
    ]


def host_of(node_id: str) -> str:
    """Return the name of a node in the job. Nodes have no unique name of their own, and may share an address."""
    return _PREFIX + node_id[:12]


def request(workers: int, kind: str) -> None:
    """Ask Ray's autoscaler for so many GPUs or CPUs in all, until the next request. 0: for none."""
    connected()
    from ray.autoscaler.sdk import request_resources  # type: ignore[import-not-found,unused-ignore]

    request_resources(bundles=[{kind: 1}] * workers)


class RayNodes(HostSource):
    """The living nodes of the cluster, without those that are being drained.

    If the cluster has fewer slots than ``-np`` at the start, Ray's autoscaler is asked for the rest.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        require_ray()
        self._np = options.np
        self._slots_per_host = options.slots_per_host
        self._has_asked = False
        self._has_requested = False

    async def hosts(self) -> Hosts:
        try:
            return await in_thread(self._hosts)
        except (ConnectionError, RuntimeError) as error:
            raise DiscoveryFault("failed", f"the cluster of Ray cannot be reached: {error}") from error

    def _hosts(self) -> Hosts:
        found = nodes()
        if not self._has_asked:
            self._has_asked = True
            self._has_requested = sum(node.slots(self._slots_per_host) for node in found) < self._np
            if self._has_requested:
                request(self._np, "GPU" if any(node.gpus for node in found) else "CPU")
        hosts = (HostSlots(node.host, node.slots(self._slots_per_host)) for node in found)
        return tuple(sorted(host for host in hosts if host.slots))

    async def close(self) -> None:
        """Withdraw the request, or the cluster would never become smaller."""
        if self._has_requested:
            await in_thread(request, 0, "CPU")


# --------------------------------------------------------------------------------------------------------------- agents
# Agents in actors: an actor reserves what its node has for the job, and runs the agent as a child process.


_AGENT = "elasticstate.agent"
_SHIM = Path(__file__).parent / "agent" / "exec_shim.py"


class RayLauncher(Launcher):
    """Launcher that starts each agent in an actor on its node."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        require_ray()

    def start(self, launch: Launch, log: Path) -> RayAgent:
        return RayAgent(launch, self.options)


class RayAgent:
    """An agent in an actor on another node."""

    is_local = False

    def __init__(self, launch: Launch, options: Options) -> None:
        self._launch = launch
        self._slots_per_host = options.slots_per_host
        self._actor: Any = None
        self._was_killed = False

    async def ended(self) -> str:
        """Start the actor, and wait for its end. Return how it ended."""
        return await in_thread(self._run)

    def _run(self) -> str:
        node = next((node for node in nodes() if node.host == self._launch.host), None)
        if node is None or self._was_killed:
            return "its node has left the cluster of Ray"
        ray = connected()
        self._actor = _actor(ray, node, self._slots_per_host)
        done = self._actor.run.remote(msgspec.json.encode(self._launch))
        if self._was_killed:
            ray.kill(self._actor)
        try:
            return how_it_ended(ray.get(done))
        except ray.exceptions.RayActorError:
            return "its actor was lost with the node" if not self._was_killed else "was killed"
        except ray.exceptions.RayError as error:
            return f"could not run in an actor: {error}"

    def kill(self) -> None:
        """Kill the actor. The agent dies with it (PR_SET_PDEATHSIG), and its workers with the agent."""
        self._was_killed = True
        if self._actor is not None:
            connected().kill(self._actor)

    async def clear(self) -> None:
        """Do nothing: nothing outlives the actor."""


def _actor(ray: Any, node: Node, slots_per_host: int | None) -> Any:
    """Start an actor on a node. It has the node's GPUs, or CPUs, as many as there are slots."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # type: ignore[import-not-found,unused-ignore]

    slots = node.slots(slots_per_host)
    needs = {"num_gpus": min(slots, node.gpus), "num_cpus": 0} if node.gpus else {"num_cpus": min(slots, node.cpus)}
    strategy = NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
    return ray.remote(_Host).options(scheduling_strategy=strategy, max_restarts=0, **needs).remote()


class _Host:
    """Actor that runs the agent of its node. Ray sets CUDA_VISIBLE_DEVICES for the actor, and so for the workers."""

    def run(self, parameters: bytes) -> int:
        """Run the agent until its end; return its exit code, negative for a signal."""
        own = sys.executable
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        shim = [own, "-I", "-S", str(_SHIM), str(os.getpid()), str(limit)]
        agent = subprocess.Popen([*shim, own, "-m", _AGENT], stdin=subprocess.PIPE, cwd="/")
        assert agent.stdin is not None
        agent.stdin.write(parameters + b"\n")
        agent.stdin.flush()  # and stays open: its end would mean that the driver has ended
        return agent.wait()
