"""The manifests are valid, strictly; their values fit the options' defaults, and each other."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticstate.options import Options, declarations
from tests.kit import kubernetes as manifests
from tests.kit.kubernetes import ApiServer, Manifest, find, pod_of
from tests.kit.options import parse_options

validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
pytest.importorskip("kubernetes", reason="the client of Kubernetes is not installed")

ROOT = manifests.DEPLOY.parents[1]
VERSION = "1.37"
ALL = ("base", "cuda", "mine", "mine-cuda")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return manifests.copy(tmp_path)


@pytest.mark.parametrize("name", ALL)
def test_all_manifests_are_valid(directory: Path, name: str) -> None:
    documents = manifests.rendered(directory / name)
    kinds = {document["kind"] for document in documents}
    assert kinds >= {"Job", "StatefulSet", "Service", "Secret", "PodDisruptionBudget"}
    assert ("Role" in kinds) == name.startswith("mine")
    for document in documents:
        validate.validate(document, VERSION, strict=True)


def test_the_validation_is_strict(directory: Path) -> None:
    job = find(manifests.rendered(directory / "base"), "Job", "elastic-driver")
    job["spec"]["backofLimit"] = 1
    with pytest.raises(validate.ValidationError):
        validate.validate(job, VERSION, strict=True)


def with_kubectl(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.skipif(bool(manifests.missing(name)), reason=manifests.missing(name)))


@pytest.mark.parametrize("name", [with_kubectl(name) for name in ALL])
def test_kubectl_renders_the_same(directory: Path, name: str) -> None:
    def ordered(documents: list[Manifest]) -> list[Any]:
        return sorted((ordered_lists(each) for each in documents), key=repr)

    assert ordered(manifests.rendered(directory / name)) == ordered(manifests.rendered_by_kubectl(directory / name))


def ordered_lists(value: Any) -> Any:
    """Sort lists of named things: their order has no meaning."""
    if isinstance(value, dict):
        return {name: ordered_lists(each) for name, each in sorted(value.items())}
    if isinstance(value, list):
        values = [ordered_lists(each) for each in value]
        return sorted(values, key=repr) if all(isinstance(each, dict) for each in value) else values
    return value


RESOURCES = {
    "v1": {"Pod": "pods", "Secret": "secrets", "Service": "services", "ServiceAccount": "serviceaccounts"},
    "apps/v1": {"StatefulSet": "statefulsets"},
    "batch/v1": {"Job": "jobs"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
    "rbac.authorization.k8s.io/v1": {"Role": "roles", "RoleBinding": "rolebindings"},
}


@pytest.mark.parametrize("name", [with_kubectl("base"), with_kubectl("mine")])
def test_kubectl_accepts_all_manifests(directory: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run of the client asks a server only for the kinds that there are."""
    monkeypatch.setenv("HOME", str(directory))
    with ApiServer() as server:
        server.serve_kinds(RESOURCES)
        kubectl = ["kubectl", f"--server=http://127.0.0.1:{server.port}"]
        create = ["create", "--dry-run=client", "--validate=false", "-k", str(directory / name), "-o", "name"]
        done = subprocess.run([*kubectl, *create], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    base = {
        *("job.batch/elastic-driver", "statefulset.apps/elastic-agents", "secret/elastic-token"),
        *("service/elastic-driver", "service/elastic-agents"),
        *("poddisruptionbudget.policy/elastic-driver", "poddisruptionbudget.policy/elastic-agents"),
    }
    access = {"serviceaccount/elastic-driver"}
    access |= {f"{kind}.rbac.authorization.k8s.io/elastic-driver" for kind in ("role", "rolebinding")}
    assert set(done.stdout.split()) == (base if name == "base" else base | access)


@pytest.mark.parametrize("name", ALL)
def test_the_values_fit_each_other(directory: Path, name: str) -> None:
    documents = manifests.rendered(directory / name)
    job = find(documents, "Job", "elastic-driver")
    stateful = find(documents, "StatefulSet", "elastic-agents")
    driver, agents = pod_of(job), pod_of(stateful)
    assert driver is not None
    assert agents is not None
    options = options_of(driver)
    assert options.drain_timeout_s == 30
    needed = options.policy().preemption_window_s + options.drain_timeout_s + options.stop_timeout_s
    assert agents["spec"]["terminationGracePeriodSeconds"] > needed
    assert driver["spec"]["terminationGracePeriodSeconds"] > options.stop_timeout_s + options.heartbeat_timeout_s
    assert stateful["spec"]["podManagementPolicy"] == "Parallel"
    assert stateful["spec"]["replicas"] >= options.np
    assert options.max_np is None, "kubectl scale has no limit"

    container = agents["spec"]["containers"][0]
    (commits,) = (mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == options.commit_dir)
    (volume,) = (volume for volume in agents["spec"]["volumes"] if volume["name"] == commits)
    assert volume["emptyDir"]["medium"] == "Memory"
    assert gibibytes(volume["emptyDir"]["sizeLimit"]) < gibibytes(container["resources"]["limits"]["memory"])

    service = find(documents, "Service", "elastic-driver")
    (port,) = (port["port"] for port in service["spec"]["ports"])
    assert f"--join=elastic-driver:{port}" in container["args"]
    assert options.listen == f"0.0.0.0:{port}"
    assert driver["spec"]["containers"][0]["ports"][0]["containerPort"] == port
    for each, template in ((service, driver), (find(documents, "Service", "elastic-agents"), agents)):
        assert each["spec"]["clusterIP"] == "None"
        assert each["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        budget = find(documents, "PodDisruptionBudget", each["metadata"]["name"])
        assert budget["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert stateful["spec"]["selector"]["matchLabels"] == agents["metadata"]["labels"]
    if name.startswith("mine"):
        assert options.pod_selector == "app=" + agents["metadata"]["labels"]["app"]
        (rule,) = find(documents, "Role", "elastic-driver")["rules"]
        assert rule == {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
        assert find(documents, "RoleBinding", "elastic-driver")["subjects"] == [
            {"kind": "ServiceAccount", "name": driver["spec"]["serviceAccountName"], "namespace": "training"}
        ]


def options_of(driver: Manifest) -> Options:
    (container,) = driver["spec"]["containers"]
    assert container["command"] == ["elasticrun"]
    twins = {twin: option.names[-1] for option in declarations().values() for twin in option.twins}
    given = {twins[each["name"]]: each["value"] for each in container["env"] if each["name"] in twins}
    return parse_options([*(f"{name}={value}" for name, value in given.items()), *container["args"]])


def gibibytes(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(\w+)", text).groups()  # type: ignore[union-attr]
    assert unit == "Gi"
    return int(number)


DOCKERFILE = (manifests.DEPLOY / "Dockerfile").read_text()


def instructions(name: str) -> list[str]:
    lines = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", DOCKERFILE)).splitlines()
    return [line.partition(" ")[2] for line in lines if line.startswith(name + " ")]


def test_the_image_has_the_sources_of_the_package(tmp_path: Path) -> None:
    """No image can be built in a test. What pip does there first is done here, with what COPY copies."""
    for instruction in instructions("COPY"):
        if not instruction.startswith("--from="):
            *sources, target = shlex.split(instruction)
            for source in sources:
                assert (ROOT / source).exists(), source
                to = tmp_path / (target if target != "./" else source)
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, to, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
                else:
                    shutil.copy(ROOT / source, to)
    (wheel,) = (line for line in instructions("RUN") if "pip wheel" in line)
    assert {"--no-build-isolation", "--no-deps", "."} <= set(wheel.split())
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-build-isolation", "--no-deps"]
    pip += ["--ignore-installed", "--quiet", "--report", "report", "."]
    done = subprocess.run(pip, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = (tmp_path / "report").read_text()
    assert '"name": "elasticstate"' in report
    assert '"provides_extra"' in report
    assert "kubernetes" in report


def test_the_commands_of_the_image_are_valid_shell() -> None:
    commands = instructions("RUN")
    assert len(commands) == 6
    for command in commands:
        subprocess.run(["sh", "-n", "-c", command], check=True, timeout=60)


def test_the_image_runs_as_the_user_of_the_manifests(directory: Path) -> None:
    users = set(re.findall(r"--uid (\d+)", DOCKERFILE)) | set(instructions("USER"))
    templates = filter(None, map(pod_of, manifests.rendered(directory / "base")))
    users |= {str(pod["spec"]["securityContext"][key]) for pod in templates for key in ("runAsUser", "fsGroup")}
    assert users == {"10001"}
