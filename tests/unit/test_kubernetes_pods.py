"""Discovery of pods: the official client speaks to a stand-in for the API server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from elasticstate.core.ids import HostSlots
from elasticstate.discovery import Discovery, host_source
from elasticstate.errors import DiscoveryError, OptionError
from elasticstate.options import Options, read_options
from tests.kit.kubernetes import ApiServer

pytest.importorskip("kubernetes", reason="the client of Kubernetes is not installed")

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: here
clusters: [{name: c, cluster: {server: "http://127.0.0.1:%d"}}]
users: [{name: u, user: {}}]
contexts: [{name: here, context: {cluster: c, user: u, namespace: training}}]
"""
GIVEN = {"np": "1", "listen": "127.0.0.1", "token_file": "t"}


def options(**given: str) -> Options:
    return read_options({**GIVEN, "pod_selector": "app=agents", "discovery_interval_s": "0.05", **given}, ["x"], {})


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with ApiServer() as server:
        config = tmp_path / "config"
        config.write_text(KUBECONFIG % server.port)
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(config))
        yield server


class Seen:
    """Answers and warnings of a discovery that runs."""

    def __init__(self) -> None:
        self.answer: dict[str, int] = {}
        self.warnings: list[str] = []

    async def get(self, **expected: int) -> None:
        """Wait for an answer. The names have _ for -."""
        wanted = {name.replace("_", "-"): slots for name, slots in expected.items()}
        await self.wait(f"answer {wanted}", lambda: self.answer == wanted)

    async def wait(self, what: str, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, f"no {what}, but {self.answer}, {self.warnings}"
            await asyncio.sleep(0.01)


def discover(meanwhile: Callable[[Seen], Awaitable[None]], chosen: Options | None = None) -> Seen:
    """Run a discovery while ``meanwhile`` runs."""
    seen = Seen()

    def show(hosts: tuple[HostSlots, ...]) -> None:
        seen.answer = {host.name: host.slots for host in hosts}

    async def scenario() -> None:
        discovery = Discovery(host_source(chosen or options()), lambda _: "", seen.warnings.append)
        try:
            show(await discovery.first())

            async def follow() -> None:
                async for hosts in discovery.changes():
                    show(hosts)

            following = asyncio.ensure_future(follow())
            await meanwhile(seen)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        finally:
            await discovery.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))
    return seen


def test_the_pods_are_followed_through_all_that_ends_a_watch(server: ApiServer) -> None:
    server.put("agents-0")
    server.put("other", app="web")

    async def scenario(seen: Seen) -> None:
        assert seen.answer == {"agents-0": 1}
        server.put("agents-1", phase="Pending")
        await seen.get(agents_0=1, agents_1=1)
        server.put("agents-1", leaves=True)
        await seen.get(agents_0=1, agents_1=0)
        server.delete("agents-1")
        await seen.get(agents_0=1)
        server.put(
            "agents-0", conditions=[{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]
        )
        await seen.get(agents_0=0)
        server.put("agents-0", phase="Running", conditions=[{"type": "Ready", "status": "False"}])
        await seen.get(agents_0=1)
        assert server.watches == 1, "one watch reports all of this"

        last = server.bookmark()
        server.put("agents-2")
        await seen.get(agents_0=1, agents_2=1)
        server.cut()
        await seen.wait("second watch", lambda: server.watches == 2)
        assert f"resourceVersion={last + 1}" in server.requests[-1], "it continues, and lists nothing again"
        marked = server.bookmark()
        server.put("other", app="web", phase="Running")  # no event for this selector
        server.cut()
        await seen.wait("third watch", lambda: server.watches == 3)
        assert f"resourceVersion={marked}" in server.requests[-1], "the bookmark's version"
        assert server.lists == 1

        server.put("agents-3")
        await seen.get(agents_0=1, agents_2=1, agents_3=1)
        server.cut("hard")
        await seen.wait("second list", lambda: server.lists == 2)
        server.delete("agents-3")
        await seen.get(agents_0=1, agents_2=1)

        server.forget()
        server.cut()
        server.delete("agents-2")
        await seen.wait("410 Gone", lambda: server.lists == 3)
        await seen.get(agents_0=1)
        server.put("agents-0", phase="Failed")
        await seen.get(agents_0=0)

    assert discover(scenario).warnings == []


def test_an_api_server_that_fails_changes_nothing_and_is_one_warning(server: ApiServer) -> None:
    server.put("agents-0")

    async def scenario(seen: Seen) -> None:
        server.refuse(500, "InternalError")
        server.cut()
        await seen.wait("warning", lambda: seen.warnings)
        assert seen.answer == {"agents-0": 1}
        server.refuse()
        server.put("agents-1")
        await seen.get(agents_0=1, agents_1=1)

    (warning,) = discover(scenario).warnings
    assert "host discovery failed: the pods cannot be listed: 500" in warning


def test_a_driver_that_may_not_list_pods_fails_with_the_remedy(server: ApiServer) -> None:
    server.refuse(403, "Forbidden")

    async def nothing(_: Seen) -> None:
        raise AssertionError("there is no answer")

    with pytest.raises(DiscoveryError, match=r"403 Forbidden.*Give the service account the role for it"):
        discover(nothing)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"listen": None, "token_file": None}, "--pod-selector requires --listen"),
        ({"discovery": "ray"}, "--discovery: 'ray': excludes --listen"),
        ({"discovery": "kubernetes", "pod_selector": None}, "'kubernetes': requires --pod-selector"),
        ({"discovery": "dial-in"}, "--discovery: 'dial-in': excludes --pod-selector"),
        ({"pod_selector": " "}, "--pod-selector: ' ': must be a label selector"),
    ],
)
def test_unfit_options_are_usage_errors(given: dict[str, str | None], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        read_options({**GIVEN, "pod_selector": "app=agents", **given}, ["x"], {})
