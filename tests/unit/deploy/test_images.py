"""Dockerfiles, and the programs of deploy/tools."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.unit.deploy.support import ROOT, TOOL_S, dockerfile_of, load, stages_of, tool

ROLES = ("router", "verifier", "drafter")
DOCKERFILES = sorted({dockerfile_of(role) for role in ROLES} | {dockerfile_of("ray")})


def test_hadolint_finds_nothing() -> None:
    files = [str(file) for file in DOCKERFILES]
    result = subprocess.run(
        [tool("hadolint"), *files], capture_output=True, text=True, timeout=TOOL_S
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("role", ROLES)
def test_an_image_runs_as_nobody_special_and_starts_its_process(role: str) -> None:
    built, _, run = stages_of(role).partition("\nFROM ")[2].partition("\nFROM ")
    assert "sbom.cdx.json" in built and "COPY --from=build /opt/outrider " in run
    assert re.findall(r"^USER .*$", run, re.M) == ["USER 10001:10001"]
    assert re.findall(r"^ENTRYPOINT .*$", run, re.M) == [f'ENTRYPOINT ["outrider-{role}"]']
    # Kubernetes has probes; a second opinion would only cost.
    assert "HEALTHCHECK" not in run


@pytest.mark.parametrize("role", [*ROLES, "ray"])
def test_what_an_image_downloads_is_kept_in_the_volume(role: str) -> None:
    run = stages_of(role)
    found = dict(re.findall(r"^(?:ENV | +)(OUTRIDER_HOME|HF_HOME)=(\S+)", run, re.M))
    assert found == {"OUTRIDER_HOME": "/models", "HF_HOME": "/models/huggingface"}


def test_the_image_of_ray_has_a_bill_of_materials_too() -> None:
    built, _, run = stages_of("ray").partition("\nFROM ")[2].partition("\nFROM ")
    assert "-o /opt/outrider/sbom.cdx.json" in built and "COPY --from=build /opt/outrider " in run


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_everything_is_installed_from_lock_files_with_hashes(file: Path) -> None:
    """Also what builds the wheel: with build isolation, pip would fetch it without hashes, as it
    would for a package that has no wheel."""
    text = file.read_text("utf-8")
    installs = re.findall(r"pip (?:install|wheel) ([^&]*)", text)
    checked = [line for line in installs if "--require-hashes --only-binary :all: -r " in line]
    own = [line for line in installs if "--no-deps --no-build-isolation" in line]
    fetched = [line for line in installs if "--no-deps --no-index" in line]
    assert len(checked) == 2 and len(own) == len(fetched) == 1
    assert len(installs) == 4
    for line in checked:
        name = line.split("-r ")[1].split()[0].strip('"').removesuffix(".txt")
        for extra in ("engine", "cpu"):
            assert (ROOT / f"deploy/locks/{name.replace('$EXTRA', extra)}.txt").exists()


def test_one_base_image_is_fixed_by_its_digest() -> None:
    bases = set()
    for file in DOCKERFILES:
        text = file.read_text("utf-8")
        bases |= set(re.findall(r"^ARG PYTHON_IMAGE=(.*)$", text, re.M))
        stages = set(re.findall(r"^FROM \S+ AS (\S+)$", text, re.M))
        assert set(re.findall(r"^FROM (\S+)", text, re.M)) <= {"${PYTHON_IMAGE}", *stages}
    assert len(bases) == 1
    assert re.fullmatch(r"python:3\.1[1-4]-slim-bookworm@sha256:[0-9a-f]{64}", bases.pop())


def test_the_engines_images_are_compiled_unless_that_is_declined() -> None:
    """The hook's file, as pyproject names it, has to be there when the wheel is built."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    hook = pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["path"]
    for role in ("verifier", "drafter"):
        built = stages_of(role).partition("\nFROM ")[2].partition("\nFROM ")[0]
        copied, _, installed = built.partition("HATCH_BUILD_HOOKS_ENABLE=1")
        assert f"COPY {hook} {hook}" in copied and "pip wheel --no-deps " in installed
        assert "ARG COMPILED=1" in copied and copied.count('if [ -n "$COMPILED" ]') == 2


def test_a_routers_image_gets_no_torch() -> None:
    found = load("image_locks").requirements(
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
    assert load("image_locks").requirements(pyproject, ["all"]) == ["a", "b", "c", "d>=1"]
    with pytest.raises(KeyError):
        load("image_locks").requirements(pyproject, ["z"])


def test_what_is_copied_into_an_image_is_not_ignored() -> None:
    allowed = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines()
        if line.startswith("!")
    }
    for role in (*ROLES, "ray"):
        for line in re.findall(r"^COPY (?!--from)(.*)$", stages_of(role), re.M):
            for source in line.replace("$EXTRA", "cpu").split()[:-1]:
                assert (ROOT / source).exists()
                assert any(
                    name == source or name.startswith(f"{source}/") or source.startswith(f"{name}/")
                    for name in allowed
                )


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


def test_manifests_are_said_as_an_older_kubernetes_knows_it() -> None:
    container = {
        "name": "c",
        "readinessProbe": {"grpc": {"port": 1, "service": "s"}, "periodSeconds": 5},
        "livenessProbe": {"httpGet": {"port": 2}},
        "lifecycle": {"preStop": {"sleep": {"seconds": 5}}},
    }
    documents = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "n"}},
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "d", "namespace": "n"},
            "spec": {"template": {"spec": {"containers": [container]}}},
        },
        {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "p"}},
        {"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "metadata": {"name": "k"}},
    ]
    (space, deployment, budget), left = load("downgrade_manifests_to_1_20").convert(
        documents, "other"
    )
    assert left == ["ScaledObject"] and budget["apiVersion"] == "policy/v1beta1"
    assert space["metadata"] == {"name": "other"}
    assert deployment["metadata"]["namespace"] == "other"
    assert deployment["spec"]["template"]["spec"]["containers"] == [
        {
            "name": "c",
            "readinessProbe": {"tcpSocket": {"port": 1}, "periodSeconds": 5},
            "livenessProbe": {"httpGet": {"port": 2}},
            "lifecycle": {"preStop": {"exec": {"command": ["sleep", "5"]}}},
        }
    ]
    # What was given is as it was.
    assert "grpc" in container["readinessProbe"]
