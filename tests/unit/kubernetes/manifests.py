"""The manifests of deploy/kubernetes, as kustomize renders them."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from elasticstate.net.trust import make_token

DEPLOY = Path(__file__).parents[3] / "deploy" / "kubernetes"
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
