"""A stand-in for the API server of Kubernetes, and the manifests of deploy/kubernetes.

The server lists and watches pods over HTTP, as the API concepts describe.
https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from elasticstate.net.trust import make_token

Pod = dict[str, Any]


class ApiServer:
    """API server with the pods of one namespace. Use it as a context manager.

    Attributes:
        requests: paths with queries of all requests so far.
        authorizations: values of their headers of this name.
    """

    def __init__(self, listener: socket.socket | None = None, tls: ssl.SSLContext | None = None) -> None:
        """Listen at the loopback interface, or at ``listener``."""
        self.path = "/api/v1/namespaces/training/pods"
        self.requests: list[str] = []
        self.authorizations: set[str] = set()
        self._changed = threading.Condition()
        self._version = 1000
        self._oldest = 1000  # versions before this one are gone
        self._pods: dict[str, Pod] = {}
        self._events: list[tuple[int, str, Pod]] = []
        self._refusal: tuple[int, str] | None = None
        self._documents: dict[str, object] = {}  # further answers, by path
        self._cuts = 0  # a watch that began before the last one ends
        self._is_over = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self), bind_and_activate=False)
        self._server.daemon_threads = False
        self._server.socket.close()
        listener = listener or socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self._server.socket = listener if tls is None else tls.wrap_socket(listener, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> ApiServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()  # waits for the threads of all requests
        self._thread.join()

    # ------------------------------------------------------------------------------------------------------ the cluster

    def put(self, name: str, *, leaves: bool = False, app: str = "agents", **status: object) -> None:
        """Create or change a pod. ``leaves``: it is being deleted."""
        with self._changed:
            metadata = {"name": name, "namespace": "training", "labels": {"app": app}}
            if leaves:
                metadata |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 60}
            pod = {"metadata": metadata, "spec": {"containers": [{"name": "agent"}]}, "status": status}
            self._record("MODIFIED" if name in self._pods else "ADDED", name, pod)

    def delete(self, name: str) -> None:
        with self._changed:
            self._record("DELETED", name, self._pods[name])

    def _record(self, kind: str, name: str, pod: Pod) -> None:
        self._version += 1
        pod = {**pod, "metadata": {**pod["metadata"], "resourceVersion": str(self._version)}}
        self._pods[name] = pod
        if kind == "DELETED":
            del self._pods[name]
        self._events.append((self._version, kind, pod))
        self._changed.notify_all()

    def bookmark(self) -> int:
        """Send a bookmark to all watches: the present version, without a change of a pod. Return the version."""
        with self._changed:
            self._version += 10
            marked = {"kind": "Pod", "apiVersion": "v1", "metadata": {"resourceVersion": str(self._version)}}
            self._events.append((self._version, "BOOKMARK", marked))
            self._changed.notify_all()
            return self._version

    def cut(self, how: str = "") -> None:
        """End the connections of all watches: in order, or in the middle of an event (``how`` is "hard")."""
        with self._changed:
            self._cuts += 1
            self._hard = how == "hard"
            self._changed.notify_all()

    def forget(self) -> None:
        """Forget all events so far: a watch from an earlier version gets 410 Gone."""
        with self._changed:
            self._version += 1
            self._oldest = self._version

    def refuse(self, status: int = 0, reason: str = "") -> None:
        """Answer all requests with this status; 0: not any more."""
        with self._changed:
            self._refusal = (status, reason) if status else None

    def serve_kinds(self, kinds: Mapping[str, Mapping[str, str]]) -> None:
        """Answer which kinds there are: group and version -> kind -> name of the resource."""
        self._documents["/api"] = {"kind": "APIVersions", "versions": ["v1"]}
        groups = []
        for version, names in kinds.items():
            verbs = ["create", "get", "list", "watch"]
            resources = [
                {"name": name, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
                for kind, name in names.items()
            ]
            path = f"/apis/{version}" if "/" in version else f"/api/{version}"
            self._documents[path] = {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
            if "/" in version:
                group, _, short = version.partition("/")
                served = {"groupVersion": version, "version": short}
                groups.append({"name": group, "versions": [served], "preferredVersion": served})
        self._documents["/apis"] = {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}

    @property
    def watches(self) -> int:
        """The number of watches that have begun."""
        return sum("watch=" in request for request in self.requests)

    @property
    def lists(self) -> int:
        """The number of lists that were asked for."""
        return len(self.requests) - self.watches

    # ----------------------------------------------------------------------------------------------------- the protocol

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        url = urlsplit(handler.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        with self._changed:  # a request that is not refused is one that the cuts from now on end
            self.requests.append(handler.path)
            refusal, cuts = self._refusal, self._cuts
        self.authorizations.add(handler.headers.get("Authorization", ""))
        if refusal is not None:
            _send(handler, *_status(*refusal))
        elif url.path in self._documents:
            _send(handler, 200, self._documents[url.path])
        elif url.path != self.path:
            _send(handler, *_status(404, "NotFound"))
        elif query.get("watch", "").lower() in ("1", "true"):
            self._serve_watch(handler, query, cuts)
        else:
            with self._changed:
                items = [pod for pod in self._pods.values() if _matches(pod, query)]
                metadata = {"resourceVersion": str(self._version)}
            _send(handler, 200, {"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": items})

    def _serve_watch(self, handler: BaseHTTPRequestHandler, query: Mapping[str, str], cuts: int) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        version = int(query["resourceVersion"])
        with suppress(OSError):  # the client has gone
            while True:
                with self._changed:
                    if version < self._oldest:
                        _chunk(handler, {"type": "ERROR", "object": _status(410, "Expired")[1]})
                        break
                    news = [event for event in self._events if event[0] > version]
                    if not news and not self._is_over and cuts == self._cuts:
                        self._changed.wait(0.05)
                        continue
                    is_over = self._is_over or cuts != self._cuts
                for number, kind, pod in news:
                    version = number
                    if kind == "BOOKMARK" and query.get("allowWatchBookmarks", "").lower() not in ("1", "true"):
                        continue
                    if kind == "BOOKMARK" or _matches(pod, query):
                        _chunk(handler, {"type": kind, "object": pod})
                if is_over and not self._is_over and self._hard:
                    handler.wfile.write(b"ffff\r\n" + b'{"type": "MODI')  # the connection breaks in this chunk
                    handler.wfile.flush()
                    return
                if is_over:
                    break
            handler.wfile.write(b"0\r\n\r\n")


def _handler_of(server: ApiServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.close_connection = True
            server.answer(self)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def _matches(pod: Pod, query: Mapping[str, str]) -> bool:
    label, _, value = query.get("labelSelector", "").partition("=")
    return not label or pod["metadata"]["labels"].get(label) == value


def _status(code: int, reason: str) -> tuple[int, dict[str, Any]]:
    body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code}
    return code, {**body, "reason": reason, "message": f"the answer is {reason}"}


def _send(handler: BaseHTTPRequestHandler, code: int, body: object) -> None:
    data = json.dumps(body).encode()
    handler.send_response(code)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(data)))
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.wfile.write(data)


def _chunk(handler: BaseHTTPRequestHandler, body: object) -> None:
    data = json.dumps(body).encode() + b"\n"
    handler.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    handler.wfile.flush()


DEPLOY = Path(__file__).parents[2] / "deploy" / "kubernetes"
Manifest = dict[str, Any]

# As the guide shows it: a job of a user, whose driver watches the pods.
MINE = """
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: training
resources: [../{base}]
components: [../discovery]
"""


@cache
def missing(name: str = "mine") -> str:
    """Return why kubectl cannot render a kustomization here, or "". The older kubectl of Debian 12 renders base."""
    if shutil.which("kubectl") is None:
        return "kubectl is not installed (Debian: kubernetes-client)"
    done = subprocess.run(["kubectl", "version", "--client", "-o", "yaml"], capture_output=True, text=True, timeout=60)
    version = re.search(r"gitVersion: v1\.(\d+)", done.stdout)
    if version is None:
        return f"the version of kubectl is unknown: {done.stderr}"
    is_old = name != "base" and int(version[1]) < 21
    return f"kubectl renders {name} from version 1.21 on; this is 1.{version[1]}" if is_old else ""


def copy(directory: Path) -> Path:
    """Copy the manifests, and add what a user adds: a token, and the kustomizations ``mine`` and ``mine-cuda``."""
    target = directory / "kubernetes"
    shutil.copytree(DEPLOY, target)
    (target / "base" / "token").write_text(make_token() + "\n")
    for name, base in (("mine", "base"), ("mine-cuda", "cuda")):
        (target / name).mkdir()
        (target / name / "kustomization.yaml").write_text(MINE.format(base=base))
    return target


def rendered_by_kubectl(directory: Path) -> list[Manifest]:
    done = subprocess.run(["kubectl", "kustomize", str(directory)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def rendered(directory: Path) -> list[Manifest]:
    """Render a kustomization without kubectl: the part of kustomize that these manifests use."""
    kustomization = yaml.safe_load((directory / "kustomization.yaml").read_text())
    found: list[Manifest] = []
    for name in kustomization.get("resources", []):
        path = directory / name
        found += rendered(path) if path.is_dir() else [d for d in yaml.safe_load_all(path.read_text()) if d]
    _apply(kustomization, directory, found)
    for name in kustomization.get("components", []):
        part = directory / name
        component = yaml.safe_load((part / "kustomization.yaml").read_text())
        found += [d for path in component["resources"] for d in yaml.safe_load_all((part / path).read_text())]
        _apply(component, part, found)
        _name_namespace(kustomization, found)
    return found


def _apply(kustomization: Manifest, directory: Path, found: list[Manifest]) -> None:
    for patch in kustomization.get("patches", []):
        change = yaml.safe_load((directory / patch["path"]).read_text())
        (target,) = (document for document in found if _key(document) == _key(change))
        target.update(_merged(target, change))
    for image in kustomization.get("images", []):
        for pod in filter(None, map(pod_of, found)):
            for container in pod["spec"]["containers"]:
                container["image"] = re.sub(
                    rf"^{image['name']}:.*", f"{image['name']}:{image['newTag']}", container["image"]
                )
    for secret in kustomization.get("secretGenerator", []):
        data = {name: base64.b64encode((directory / name).read_bytes()).decode() for name in secret["files"]}
        found.append(
            {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": secret["name"]}, "type": "Opaque", "data": data}
        )
    _name_namespace(kustomization, found)


def _name_namespace(kustomization: Manifest, found: list[Manifest]) -> None:
    for document in found if "namespace" in kustomization else ():
        document["metadata"]["namespace"] = kustomization["namespace"]
        for subject in document.get("subjects", ()):
            subject["namespace"] = kustomization["namespace"]


def _key(document: Manifest) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


def _merged(old: Any, change: Any) -> Any:
    """Merge as a strategic merge patch does: lists of named things by their names, and null removes."""
    if isinstance(old, dict) and isinstance(change, dict):
        both = {**old, **{name: _merged(old.get(name), value) for name, value in change.items()}}
        return {name: value for name, value in both.items() if value is not None}
    if isinstance(old, list) and change and all(isinstance(each, dict) and "name" in each for each in change):
        changes = {each["name"]: each for each in change}
        kept = [_merged(each, changes.pop(each["name"], {})) for each in old]
        return kept + list(changes.values())
    return change


def pod_of(document: Manifest) -> Manifest | None:
    """Return the pod template of a manifest."""
    template: Manifest | None = document.get("spec", {}).get("template")
    return template


def find(documents: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = (document for document in documents if _key(document) == (kind, name))
    return found
