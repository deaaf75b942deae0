"""Agents in actors of Ray: an actor reserves what its node has for the job, and runs the agent as a child process."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from elasticstate.exit_status import how_it_ended
from elasticstate.launchers import Launcher
from elasticstate.net.messages import Launch
from elasticstate.options import Options
from elasticstate.ray.nodes import (
    Node,
    connected,
    nodes,
    require_ray,
)
from elasticstate.threads import in_thread

_AGENT = "elasticstate.agent"
_SHIM = Path(__file__).parents[1] / "agent" / "exec_shim.py"


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
