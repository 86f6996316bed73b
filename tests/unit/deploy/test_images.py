"""Dockerfiles and what builds images."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.unit.deploy.support import ROOT, load, tool

ROLES = ("router", "verifier", "drafter")


def dockerfile(role: str) -> str:
    return (ROOT / role / "Dockerfile").read_text("utf-8")


def test_hadolint_finds_nothing() -> None:
    files = [str(ROOT / role / "Dockerfile") for role in ROLES]
    result = subprocess.run([tool("hadolint"), *files], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("role", ROLES)
def test_an_image_runs_as_nobody_special_and_starts_its_process(role: str) -> None:
    final = dockerfile(role).rpartition("\nFROM ")[2]
    assert "USER 10001:10001" in final
    assert f'ENTRYPOINT ["outrider-{role}"]' in final
    # Kubernetes has probes; a second opinion would only cost.
    assert "HEALTHCHECK" not in final
    assert "COPY --from=build /opt/outrider " in final and "sbom.cdx.json" in dockerfile(role)


@pytest.mark.parametrize("role", ROLES)
def test_everything_is_installed_within_the_constraints(role: str) -> None:
    installs = re.findall(r"/opt/venv/bin/pip install ([^&]*)", dockerfile(role))
    assert installs
    assert all(re.search(r"-c constraints.txt|--no-deps|\$torch", line) for line in installs)


def test_a_routers_image_gets_no_torch() -> None:
    found = load("requirements").requirements(
        (ROOT / "pyproject.toml").read_text("utf-8"), ["router", "trace"]
    )
    names = {re.split(r"[<>=;\[ ]", line)[0] for line in found}
    assert {"grpcio", "tokenizers", "prometheus-client", "fastapi"} <= names
    assert not names & {"torch", "triton", "transformers", "safetensors", "ray"}


def test_extras_of_the_project_itself_are_followed() -> None:
    pyproject = """
    [project]
    name = "p"
    dependencies = ["a"]
    [project.optional-dependencies]
    all = ["p[x,y]", "b"]
    x = ["c"]
    y = ["p[x]", "d>=1"]
    """
    assert load("requirements").requirements(pyproject, ["all"]) == ["a", "b", "c", "d>=1"]
    with pytest.raises(KeyError):
        load("requirements").requirements(pyproject, ["z"])


def test_what_is_copied_into_an_image_is_not_ignored() -> None:
    allowed = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines()
        if line.startswith("!")
    }
    for role in ROLES:
        for line in re.findall(r"^COPY (?!--from)(.*)$", dockerfile(role), re.M):
            for source in line.split()[:-1]:
                assert (ROOT / source).exists()
                assert any(name == source or name.startswith(f"{source}/") for name in allowed)


def test_helm_is_fetched_on_one_system_only_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load("fetch_helm")
    monkeypatch.setattr(module.platform, "machine", lambda: "riscv64")
    with pytest.raises(module.UnavailableError, match="x86-64"):
        module.fetch(tmp_path / "helm")


def test_manifests_are_put_into_pods_for_podman() -> None:
    template = {
        "metadata": {"labels": {"a": "b"}},
        "spec": {
            "serviceAccountName": "s",
            "containers": [
                {"image": "i:1", "args": ["--id", "$(POD_NAME)"], "livenessProbe": {}, "name": "c"}
            ],
        },
    }
    documents = [
        {"kind": "ConfigMap", "metadata": {"name": "c", "namespace": "n"}},
        {"kind": "Service", "metadata": {"name": "s"}},
        {"kind": "StatefulSet", "metadata": {"name": "v"}, "spec": {"template": template}},
    ]
    config, pod = load("for_podman").convert(documents, {"peer": "10.0.0.1"}, "localhost/")
    assert config == {"kind": "ConfigMap", "metadata": {"name": "c"}}
    assert pod["metadata"] == {"name": "v-0", "labels": {"a": "b"}}
    assert pod["spec"]["hostAliases"] == [{"ip": "10.0.0.1", "hostnames": ["peer"]}]
    assert pod["spec"]["containers"] == [
        {"image": "localhost/i:1", "args": ["--id", "v-0"], "name": "c"}
    ]
