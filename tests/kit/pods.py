"""Pods in network namespaces: what a kubelet does with a pod's manifest, for real processes.

A pod has the network, the mounts and the shared memory of a simulated host, and its container's command, arguments,
environment, user, probes and grace period from the manifest. The container's process is a process of this machine.
"""

from __future__ import annotations

import base64
import ctypes
import ipaddress
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from datetime import datetime, timedelta, timezone
from math import ceil
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.kit.forks import STARTUP
from tests.kit.kubernetes import Manifest, find
from tests.kit.network import Host

ACCOUNT = "/run/secrets/kubernetes.io/serviceaccount"
# The package under test may be in a directory that only root can read, unlike in an image. All else is as in the pod.
_READ_ALL = "-all,+dac_read_search"


def missing() -> str:
    """Return the reason why pods are impossible here, or ""."""
    return "" if shutil.which("setpriv") else "setpriv is not installed (Debian: util-linux)"


class Pod:
    """A pod with one container. ``records``: directory for volumes that live as long as the pod."""

    def __init__(
        self,
        name: str,
        template: Manifest,
        documents: list[Manifest],
        host: Host,
        directory: Path,
        environment: dict[str, str],
        account: dict[str, str] | None = None,
    ) -> None:
        self.name = name
        self.host = host
        self.spec = template["spec"]
        (self.container,) = self.spec["containers"]
        self.user = self.spec["securityContext"]["runAsUser"]
        self.group = self.spec["securityContext"]["fsGroup"]
        self.output = directory / f"{name}-{host.name}.txt"
        self._directory = directory
        self._environment = {**environment, **self._own_environment()}
        self._mount("tmpfs", "/run", "0755")
        for mount in self.container["volumeMounts"]:
            (volume,) = (each for each in self.spec["volumes"] if each["name"] == mount["name"])
            self._mount_volume(volume, mount["mountPath"], documents)
        if account is not None and self.spec["automountServiceAccountToken"]:
            self._mount("tmpfs", ACCOUNT, "0755")
            for file, text in account.items():
                self._write(f"{ACCOUNT}/{file}", text, "0444")
        self.process: subprocess.Popen[bytes] | None = None

    # ---------------------------------------------------------------------------------------------- as the kubelet does

    def start(self) -> subprocess.Popen[bytes]:
        """Start the container, or start it again."""
        with open(self.output, "ab") as output:
            self.process = subprocess.Popen(
                self._within(*self.container["command"], *self.arguments),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return self.process

    def probe(self, kind: str) -> bool:
        """Run the command of a probe once, with its time-out."""
        probe = self.container[kind]
        try:
            done = subprocess.run(
                self._within(*probe["exec"]["command"]),
                env=self._environment,
                capture_output=True,
                timeout=probe["timeoutSeconds"],
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def terminate(self) -> bool:
        """Send SIGTERM, and SIGKILL after the grace period. Return True if the container has ended by itself."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(self.spec["terminationGracePeriodSeconds"])
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        return True

    def kill(self) -> None:
        """Kill all processes of the container."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        for pid in self.host.storage.pids() if self.host.has_power else ():
            if self.container["command"][0] in _command(pid) or "elasticstate" in _command(pid):
                os.kill(pid, signal.SIGKILL)

    # --------------------------------------------------------------------------------------------------- the manifest

    @property
    def arguments(self) -> list[str]:
        return [re.sub(r"\$\((\w+)\)", lambda m: self._environment[m[1]], each) for each in self.container["args"]]

    def _own_environment(self) -> dict[str, str]:
        found = {}
        for each in self.container["env"]:
            source = each.get("valueFrom", {})
            if "fieldRef" in source:
                assert source["fieldRef"]["fieldPath"] == "metadata.name"
                found[each["name"]] = self.name
            elif "resourceFieldRef" in source:
                kind, _, resource = source["resourceFieldRef"]["resource"].partition(".")
                found[each["name"]] = str(ceil(float(self.container["resources"][kind][resource])))
            else:
                found[each["name"]] = each["value"]
        return found

    def _within(self, *command: str) -> list[str]:
        """Return a command that runs a command in the container, as its user."""
        user = [
            "env",
            f"--chdir={self._directory}",
            "setpriv",
            f"--reuid={self.user}",
            f"--regid={self.group}",
            f"--groups={self.group}",
        ]
        user += [f"--inh-caps={_READ_ALL}", f"--ambient-caps={_READ_ALL}", f"--bounding-set={_READ_ALL}"]
        return self.host.storage.enter(*user, "--no-new-privs", *command)

    def _mount_volume(self, volume: Manifest, path: str, documents: list[Manifest]) -> None:
        if "secret" in volume:
            secret = find(documents, "Secret", volume["secret"]["secretName"])
            self._mount("tmpfs", path, "0755")
            for name, data in secret["data"].items():
                self._write(f"{path}/{name}", base64.b64decode(data).decode(), f"{volume['secret']['defaultMode']:04o}")
        elif volume["emptyDir"].get("medium") == "Memory":
            self._mount(f"size={volume['emptyDir']['sizeLimit'].removesuffix('i').lower()}", path, "2777")
        else:
            self._mount("tmpfs", path, "2777")
        self._run("chown", f"0:{self.group}", path)

    def _mount(self, options: str, path: str, mode: str) -> None:
        self._run("mkdir", "-p", path)
        self._run(
            "mount", "-t", "tmpfs", "-o", f"{'' if options == 'tmpfs' else options + ','}mode={mode}", "tmpfs", path
        )

    def _write(self, path: str, text: str, mode: str) -> None:
        command = self.host.storage.enter(
            "sh", "-c", f"cat > {path} && chown 0:{self.group} {path} && chmod {mode} {path}"
        )
        subprocess.run(command, input=text, text=True, check=True)

    def _run(self, *command: str) -> None:
        self.host.storage.run(*command)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def environment(scripts: Path, package: Path, **options: object) -> dict[str, str]:
    """Return the environment of an image with the package under test. ``options``: of elasticrun, by their twins."""
    kept = ("ELASTICSTATE_TEST_RUN", "ELASTICSTATE_TEST_SLOW_CALLBACKS", "OMP_WAIT_POLICY")
    return {
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), "/usr/bin", "/bin")),
        "PYTHONPATH": os.pathsep.join(map(str, (scripts, package, STARTUP))),
        "OMP_NUM_THREADS": "1",
        **{name: os.environ[name] for name in kept if name in os.environ},
        **{f"ELASTICSTATE_{name.upper()}": str(value) for name, value in options.items()},
    }


def listener_on(host: Host) -> socket.socket:
    """Return a socket of this process that listens in the network of a host."""
    found: list[Any] = []

    def listen() -> None:  # in a thread: setns(2) changes the network of one thread
        try:
            fd = os.open(f"/proc/{host.storage.pid}/ns/net", os.O_RDONLY)
            assert ctypes.CDLL(None, use_errno=True).setns(fd, 0) == 0, os.strerror(ctypes.get_errno())
            os.close(fd)
            found.append(socket.create_server((host.address, 0)))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    server: socket.socket = found[0]
    return server


def certificate(address: str, directory: Path) -> tuple[ssl.SSLContext, str]:
    """Return the TLS context of a server at this address, and its certificate, which signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "API server")])
    now = datetime.now(timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.KeyUsage(True, False, False, False, False, True, True, False, False),
            critical=True,
        )
        .sign(key, hashes.SHA256())
    )
    text = made.public_bytes(serialization.Encoding.PEM).decode()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    path = directory / "api-server.pem"
    path.write_text(private + text)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return context, text
