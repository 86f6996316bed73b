"""Commands of the documentation that build, load and run images: names, order and flags."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from outrider.config.loader import parse_config
from outrider.config.process_registry import PROCESSES
from tests.unit.deploy.support import ROOT, TOOL_S, parse, stages_of, tool

KUBERNETES = (ROOT / "docs/deploy-kubernetes.md").read_text("utf-8")
RAY = (ROOT / "docs/deploy-ray.md").read_text("utf-8")
LOCAL = (ROOT / "docs/deploy-local.md").read_text("utf-8")
FIRST_STEPS = KUBERNETES.split("\n## ")[0]
TAKES_VALUE = {
    *("--name", "--network", "--restart", "--stop-timeout", "--tmpfs", "--cap-drop"),
    *("--security-opt", "--volume", "--publish", "--entrypoint"),
    *("--health-cmd", "--health-interval", "--health-timeout", "--health-start-period"),
}
SWITCHES = {"--detach", "--read-only", "--rm"}


def commands(page: str) -> list[list[str]]:
    """The words of every command of a page's indented blocks."""
    joined = re.sub(r" \\\n +", " ", page)
    return [shlex.split(line) for line in re.findall(r"^ {4}([a-z].*)$", joined, re.M)]


def docker_runs() -> list[tuple[dict[str, str], str, list[str]]]:
    """Options, image and arguments of every `docker run` of the page about one machine."""
    found = []
    for words in commands(LOCAL.split("## In containers")[1].split("\n## ")[0]):
        if words[:2] != ["docker", "run"]:
            continue
        rest, options = words[2:], dict[str, str]()
        while rest[0].startswith("--"):
            flag = rest.pop(0)
            assert flag in TAKES_VALUE | SWITCHES, flag
            options[flag] = rest.pop(0) if flag in TAKES_VALUE else ""
        found.append((options, rest[0], rest[1:]))
    return found


def images_of(overlay: Path) -> set[str]:
    """Names of the images of an overlay, as `kubectl kustomize` renders it."""
    result = subprocess.run(
        [tool("kubectl"), "kustomize", str(overlay)], capture_output=True, text=True, timeout=TOOL_S
    )
    assert result.returncode == 0, result.stderr
    return set(re.findall(r"^ *-? ?image: (\S+)$", result.stdout, re.M))


def built(page: str) -> set[str]:
    """Names that a page's `docker build` lines give."""
    return {words[words.index("-t") + 1] for words in commands(page) if "build" in words}


def test_the_first_steps_build_then_load_then_apply() -> None:
    steps = [words for words in commands(FIRST_STEPS) if words[0] in ("docker", "kind", "minikube")]
    assert [words[0] for words in steps] == ["docker"] * 3 + ["kind"] + ["minikube"] * 3
    assert FIRST_STEPS.index("minikube image load") < FIRST_STEPS.index("kubectl apply")
    loaded = [set(words[3:]) for words in steps[3:]]
    assert loaded[0] == set().union(*loaded[1:]) == built(FIRST_STEPS)


def test_manifests_and_chart_name_the_images_that_the_pages_build() -> None:
    assert images_of(ROOT / "deploy/k8s/overlays/cpu-demo") == built(FIRST_STEPS)
    assert built(KUBERNETES) == built(FIRST_STEPS)
    chart = yaml.safe_load((ROOT / "deploy/helm/outrider/Chart.yaml").read_text("utf-8"))
    roles = ("router", "verifier", "drafter")
    assert {f"outrider-{role}:{chart['appVersion']}" for role in roles} == built(FIRST_STEPS)
    for overlay in ("kuberay", "kuberay-cluster"):
        assert images_of(ROOT / "deploy/k8s/overlays" / overlay) == built(RAY)
    assert "kind load docker-image outrider-ray:0.2.0" in RAY


def test_every_build_argument_is_one_of_its_dockerfile() -> None:
    for words in commands(KUBERNETES) + commands(RAY):
        if words[:2] == ["docker", "build"]:
            text = (ROOT / words[words.index("-f") + 1]).read_text("utf-8")
            given = [words[i + 1] for i, word in enumerate(words) if word == "--build-arg"]
            assert all(re.search(rf"^ARG {arg.split('=')[0]}\b", text, re.M) for arg in given)


def test_the_overlay_for_a_registry_renames_every_image(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(resources: \[\.\./cpu-demo\]\n.*?)```", KUBERNETES, re.S)
    (overlay,) = parse(text)
    demo = ROOT / "deploy/k8s/overlays/cpu-demo"
    # kustomize refuses absolute paths: the overlay is beside a link to the manifests.
    (tmp_path / "k8s").symlink_to(ROOT / "deploy/k8s")
    (tmp_path / "own").mkdir()
    overlay["resources"] = [f"../k8s/overlays/{demo.name}"]
    (tmp_path / "own" / "kustomization.yaml").write_text(yaml.safe_dump(overlay), "utf-8")
    pushed = {f"registry.example/team/{image}" for image in built(FIRST_STEPS)}
    assert images_of(tmp_path / "own") == pushed


@pytest.mark.parametrize("role", ["verifier", "drafter", "router"])
def test_a_docker_run_line_has_flags_that_its_process_reads(role: str) -> None:
    (run,) = [run for run in docker_runs() if run[1].startswith(f"outrider-{role}:")][-1:]
    options, image, arguments = run
    assert image in built(FIRST_STEPS)
    process = PROCESSES[role]
    config = parse_config(process.config, process.parser, arguments, role).config
    # Containers reach it by the address that it listens on, and it finds its files.
    assert config.listen.startswith("0.0.0.0:")
    port = config.listen.split(":")[1]
    assert re.search(rf"^EXPOSE .*\b{port}\b", stages_of(role), re.M)
    assert port in options["--health-cmd"] or "8000" in options["--health-cmd"]
    drain_s = config.drain_timeout_s
    assert float(options["--stop-timeout"]) >= drain_s + 5
    # As in the manifests: nothing is written but /tmp, and no privilege is kept.
    assert "--read-only" in options and options["--tmpfs"] == "/tmp"
    assert options["--cap-drop"] == "ALL" and options["--security-opt"] == "no-new-privileges"
    assert options["--volume"].endswith(":/models:ro")
    if role == "router":
        assert config.http == "0.0.0.0:8000"
        names = {other[0].get("--name") for other in docker_runs()}
        assert {address.split(":")[0] for address in (*config.verifiers, *config.drafters)} <= names


def test_the_health_checks_of_docker_run_lines_are_python(tmp_path: Path) -> None:
    for options, _, _ in docker_runs():
        if "--health-cmd" in options:
            python, flag, code = shlex.split(options["--health-cmd"])
            assert (python, flag) == ("python3", "-c")
            compile(code, "health", "exec")


def test_a_new_volume_belongs_to_the_user_of_the_image() -> None:
    """Docker copies the owner of the directory in the image to a new volume."""
    for role in ("router", "verifier", "drafter", "ray"):
        assert "RUN install -d -o 10001 -g 10001 /models" in stages_of(role)
