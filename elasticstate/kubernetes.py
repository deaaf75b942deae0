"""Jobs in pods of Kubernetes: agents dial in from their pods, and the driver watches these pods.

See docs/guides/kubernetes.md. A thread lists the present pods of the label selector, and then watches them. The API
server ends each watch after some time, and the next one continues from the last version that this one has seen. A
version that is too old (410 Gone), and any other error, makes the thread list the pods again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from elasticstate.core.ids import HostSlots
from elasticstate.discovery import DiscoveryFault, Hosts, HostSource
from elasticstate.errors import OptionError
from elasticstate.options import Options
from elasticstate.threads import in_thread

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_WATCH_S = 60  # longest duration of one watch
_REQUEST_S = (10.0, 75.0)  # to connect; without any data: the connection is dead then
_PAUSE_S = 0.5  # between two requests
_STOP_S = 5.0


class PodWatch:
    """Watch of the pods of a label selector, in this pod's namespace; outside of a pod, in that of the kubeconfig.

    Attributes:
        pods: names of the present pods; True: the pod may work, False: it leaves. Replaced, never changed.
        fault: why the pods are unknown now, or "".
        has_begun: set when there are pods, or a fault.
    """

    def __init__(self, selector: str) -> None:
        self.pods: Mapping[str, bool] = {}
        self.fault = ""
        self.has_begun = threading.Event()
        self._selector = selector
        self._thread: threading.Thread | None = None
        self._is_over, self._has_ended = threading.Event(), threading.Event()
        self._watch: Any = None

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pods", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread; it takes a moment."""
        self._is_over.set()
        if self._watch is not None:
            self._watch.stop()
        if self._thread is not None:
            self._has_ended.wait(_STOP_S)

    def _run(self) -> None:
        version: str | None = None  # None: the pods must be listed
        while not self._is_over.is_set():
            try:
                version = version or self._list()
                self.has_begun.set()
                version = self._follow(version)
            except Exception as error:
                if version is None:
                    self.fault = _text_of(error)
                version = None  # a watch that fails is no fault: the list that follows shows if the pods are known
            self.has_begun.set()
            self._is_over.wait(_PAUSE_S)
        self._has_ended.set()

    def _list(self) -> str:
        """Get the present pods. Return the version of the answer."""
        with _connected() as (api, namespace):
            answer = api.list_namespaced_pod(namespace, label_selector=self._selector, _request_timeout=_REQUEST_S)
        self.pods = {pod.metadata.name: may_work(pod) for pod in answer.items}
        self.fault = ""
        version: str = answer.metadata.resource_version
        return version

    def _follow(self, version: str) -> str:
        """Follow the changes after a version until the server ends the watch. Return the last version."""
        watch = self._watch = import_module("kubernetes.watch").Watch()
        with _connected() as (api, namespace):
            for event in watch.stream(
                api.list_namespaced_pod,
                namespace,
                label_selector=self._selector,
                resource_version=version,
                allow_watch_bookmarks=True,
                timeout_seconds=_WATCH_S,
                _request_timeout=_REQUEST_S,
            ):
                if event["type"] != "BOOKMARK":
                    self._change(event["type"], event["object"])
                if self._is_over.is_set():
                    break
        return watch.resource_version or version

    def _change(self, kind: str, pod: Any) -> None:
        others = {name: works for name, works in self.pods.items() if name != pod.metadata.name}
        self.pods = others if kind == "DELETED" else {**others, pod.metadata.name: may_work(pod)}


def may_work(pod: Any) -> bool:
    """Return False if a pod is being deleted, evicted or preempted, or has ended."""
    if pod.metadata.deletion_timestamp is not None:
        return False
    if pod.status is None:
        return True
    disrupted = (c.type == "DisruptionTarget" and c.status == "True" for c in pod.status.conditions or ())
    return pod.status.phase not in ("Succeeded", "Failed") and not any(disrupted)


@contextmanager
def _connected() -> Iterator[tuple[Any, str]]:
    """Provide a client, and the namespace. The client reads the token of the service account, which changes, anew."""
    client, config = import_module("kubernetes.client"), import_module("kubernetes.config")
    try:
        config.load_incluster_config()
        namespace = _NAMESPACE_FILE.read_text().strip()
    except config.ConfigException:  # this is no pod
        config.load_kube_config()
        _, context = config.list_kube_config_contexts()
        namespace = context["context"].get("namespace", "default")
    with client.ApiClient() as connection:
        yield client.CoreV1Api(connection), namespace


def _text_of(error: Exception) -> str:
    """Return why there are no pods, and what the user can do about it."""
    status, reason = getattr(error, "status", None), getattr(error, "reason", None)
    if status in (401, 403):
        return f"the API server refuses to list pods ({status} {reason}). Give the service account the role for it"
    text = f"{status} {reason}" if status else f"{type(error).__name__}: {error}"
    return f"the pods cannot be listed: {text}"


class Pods(HostSource):
    """The agents' pods. A pod that is being deleted, evicted or preempted, or has ended, has no slots."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        if find_spec("kubernetes") is None:  # its import takes 0.3 s, and would hold up the event loop
            raise OptionError(
                "--pod-selector: the client of Kubernetes is not installed. Run: pip install 'elasticstate[kubernetes]'"
            )
        self._watch = PodWatch(options.pod_selector or "")
        self._timeout_s = options.discovery_timeout_s

    async def hosts(self) -> Hosts:
        self._watch.start()
        if not await in_thread(self._watch.has_begun.wait, self._timeout_s):
            raise DiscoveryFault(
                "timeout", f"the API server did not answer within {self._timeout_s:g} s (see --discovery-interval)"
            )
        if fault := self._watch.fault:
            raise DiscoveryFault("failed", fault)
        return tuple(HostSlots(name, int(works)) for name, works in sorted(self._watch.pods.items()))

    async def close(self) -> None:
        await in_thread(self._watch.stop)
