"""Kubernetes' own servers on loopback: etcd, kube-apiserver and, beside them, what is asked for.

Plain processes of binaries in one folder (build.sh); no container, no kubelet.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ETCD = "127.0.0.1:12379"
API_PORT, CRD_PORT = 16443, 16446
START_S = 180.0
Document = dict[str, Any]


class Api:
    """A server of Kubernetes' API, by HTTP. Certificates are not looked at: it is ours."""

    def __init__(self, port: int, token: str) -> None:
        self._url, self._token = f"https://127.0.0.1:{port}", token
        self._context = ssl.create_default_context()
        self._context.check_hostname = False
        self._context.verify_mode = ssl.CERT_NONE

    def call(
        self, method: str, path: str, body: Document | None = None, patch: str = "merge"
    ) -> tuple[int, Document]:
        """(status, answer)."""
        kind = f"application/{patch}-patch+json" if method == "PATCH" else "application/json"
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": kind}
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, context=self._context, timeout=60) as answer:
                return answer.status, _parsed(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, _parsed(error.read())

    def items(self, path: str) -> list[Document]:
        """A list's items."""
        return list(self.call("GET", path)[1].get("items") or ())

    def ready(self) -> bool:
        """Whether it answers and says so."""
        with contextlib.suppress(OSError):
            return self.call("GET", "/readyz")[0] == 200
        return False


def _parsed(text: bytes) -> Document:
    try:
        found = json.loads(text)
    except ValueError:
        return {"message": text.decode(errors="replace")}
    return found if isinstance(found, dict) else {}


class Servers:
    """etcd and kube-apiserver, and further servers; a context manager that stops them."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self.binaries, self.folder = binaries, folder
        self._running: list[subprocess.Popen[bytes]] = []
        self.token = secrets.token_hex(16)
        self.api = Api(API_PORT, self.token)
        self.kubeconfig = folder / "kubeconfig"

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "tokens.csv").write_text(f"{self.token},me,me,system:masters\n")
        self.kubeconfig.write_text(json.dumps(_kubeconfig(API_PORT, self.token)))
        key = self.folder / "accounts.pem"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        peers = "http://127.0.0.1:12380"
        etcd = [f"--data-dir={self.folder / 'etcd'}", f"--listen-peer-urls={peers}"]
        etcd += [f"--listen-client-urls=http://{ETCD}", f"--advertise-client-urls=http://{ETCD}"]
        etcd += [f"--initial-advertise-peer-urls={peers}", f"--initial-cluster=default={peers}"]
        self.start("etcd", *etcd, "--unsafe-no-fsync")
        self.start(
            "kube-apiserver",
            f"--etcd-servers=http://{ETCD}",
            "--bind-address=127.0.0.1",
            f"--secure-port={API_PORT}",
            "--endpoint-reconciler-type=none",
            f"--cert-dir={self.folder / 'api'}",
            "--service-cluster-ip-range=10.0.0.0/20",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={key}",
            f"--service-account-key-file={key}",
        )
        wait("the API server", self.api.ready, self.alive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in reversed(self._running):
            process.terminate()
        for process in self._running:
            process.wait(30)

    def control(self) -> None:
        """Start controllers and scheduler."""
        own = [f"--kubeconfig={self.kubeconfig}", "--leader-elect=false"]
        own += ["--bind-address=127.0.0.1", "--port=0"]
        key = f"--service-account-private-key-file={self.folder / 'accounts.pem'}"
        self.start("kube-controller-manager", *own, "--secure-port=16444", key)
        self.start("kube-scheduler", *own, "--secure-port=16445")

    def crds(self) -> Api:
        """Start the server of custom resources."""
        self.start(
            "apiextensions-apiserver",
            f"--etcd-servers=http://{ETCD}",
            "--etcd-prefix=/crds",
            "--bind-address=127.0.0.1",
            f"--secure-port={CRD_PORT}",
            f"--cert-dir={self.folder / 'crds'}",
            *(f"--{name}-kubeconfig={self.kubeconfig}" for name in _DELEGATED),
            f"--kubeconfig={self.kubeconfig}",
            # It comes alone: flow control and admission by objects need the newer server beside it.
            "--enable-priority-and-fairness=false",
            f"--disable-admission-plugins={','.join(_NEED_MORE)}",
        )
        api = Api(CRD_PORT, self.token)
        wait("the server of custom resources", api.ready, self.alive)
        return api

    def start(self, name: str, *flags: str) -> None:
        """Start a binary; what it says is in the folder."""
        log = (self.folder / f"{name}.log").open("wb")
        with log:
            command = [str(self.binaries / name), *flags]
            self._running.append(subprocess.Popen(command, stdout=log, stderr=log))

    def alive(self) -> None:
        """RuntimeError where one has ended."""
        for process in self._running:
            if process.poll() is not None:
                raise RuntimeError(f"{process.args!r} ended: see {self.folder}")


_DELEGATED = ("authentication", "authorization")
_NEED_MORE = (
    *("NamespaceLifecycle", "MutatingAdmissionWebhook", "ValidatingAdmissionWebhook"),
    *("ValidatingAdmissionPolicy", "MutatingAdmissionPolicy"),
)


def _kubeconfig(port: int, token: str) -> Document:
    server = {"server": f"https://127.0.0.1:{port}", "insecure-skip-tls-verify": True}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": server}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }


def wait(what: str, done: Any, alive: Any = lambda: None, timeout_s: float = START_S) -> float:
    """Wait until `done()`; the seconds that it took. Raises TimeoutError."""
    begin = time.monotonic()
    while not done():
        alive()
        if time.monotonic() - begin > timeout_s:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.1)
    return time.monotonic() - begin
