"""Lock files of the images: within the constraints, and with hashes of the right torch."""

from __future__ import annotations

import re

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.unit.deploy.support import ROOT, load

TOOL = load("image_locks")
LOCKS = ROOT / "deploy" / "locks"
NAMES = [*TOOL.EXTRAS, "build"]
PYPROJECT = (ROOT / "pyproject.toml").read_text("utf-8")


def entries(name: str) -> list[str]:
    """The entries of a lock file: a package in a version, and the lines of its hashes."""
    found: list[str] = TOOL.entries((LOCKS / f"{name}.txt").read_text("utf-8"))
    return found


def versions(name: str) -> dict[str, set[str]]:
    """Versions by the name of the package: more than one where they differ between Pythons."""
    found: dict[str, set[str]] = {}
    for entry in entries(name):
        requirement = Requirement(entry.split("\\")[0])
        (pin,) = requirement.specifier
        assert pin.operator == "=="
        found.setdefault(canonicalize_name(requirement.name), set()).add(pin.version)
    return found


def hashes(name: str, package: str) -> set[str]:
    """The hashes of a package in a lock file."""
    (entry,) = [entry for entry in entries(name) if entry.startswith(f"{package}==")]
    return set(re.findall(r"--hash=sha256:([0-9a-f]{64})", entry))


@pytest.mark.parametrize("name", NAMES)
def test_every_package_has_one_version_and_hashes(name: str) -> None:
    text = (LOCKS / f"{name}.txt").read_text("utf-8")
    assert "".join(entries(name)) == re.sub(r"^#.*\n", "", text, flags=re.M)
    for entry in entries(name):
        first, *lines = entry.rstrip("\n").split(" \\\n")
        assert "==" in first and lines
        assert all(re.fullmatch(r" {4}--hash=sha256:[0-9a-f]{64}", line) for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_a_lock_file_satisfies_what_it_was_made_from(name: str) -> None:
    """A change of pyproject.toml or constraints.txt needs `make locks`."""
    locked = versions(name)
    wanted = [Requirement(line) for line in TOOL.locked_requirements(name, PYPROJECT)]
    constraints = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pinned = [Requirement(line) for line in constraints if not line.startswith("#")]
    for requirement in (*wanted, *(pin for pin in pinned if pin.name in locked)):
        for version in locked[canonicalize_name(requirement.name)]:
            assert requirement.specifier.contains(version), requirement


def test_no_lock_file_is_left_over() -> None:
    assert {file.stem for file in LOCKS.iterdir()} == set(NAMES)


def test_images_have_the_torch_of_their_device() -> None:
    for gpu, cpu in (("engine", "cpu"), ("ray-engine", "ray-cpu")):
        assert {"torch", "triton", "nvidia-cublas"} <= set(versions(gpu))
        assert not [key for key in versions(cpu) if re.match("triton|nvidia-|cuda-", key)]
        # 3.11 to 3.14, for x86-64 and aarch64.
        assert len(hashes(cpu, "torch")) == 8
        assert not hashes(cpu, "torch") & hashes(gpu, "torch")
    assert hashes("cpu", "torch") == hashes("ray-cpu", "torch")
    assert hashes("engine", "torch") == hashes("ray-engine", "torch")
    assert not {"torch", "triton", "ray"} & (set(versions("router")) | set(versions("build")))


def test_hashes_of_torch_on_cpus_are_read_from_its_index() -> None:
    def link(file: str, digest: str) -> str:
        return f'<a href="/whl/cpu/{file}#sha256={digest * 64}">{file}</a><br/>\n'

    page = (
        link("torch-2.9.0%2Bcpu-cp312-cp312-manylinux_2_28_x86_64.whl", "0")
        + link("torch-2.9.1%2Bcpu-cp310-cp310-manylinux_2_28_x86_64.whl", "1")
        + link("torch-2.9.1%2Bcpu-cp312-cp312-manylinux_2_28_x86_64.whl", "b")
        + link("torch-2.9.1%2Bcpu-cp312-cp312-manylinux_2_28_aarch64.whl", "a")
        + link("torch-2.9.1%2Bcpu-cp314-cp314t-manylinux_2_28_x86_64.whl", "2")
        + link("torch-2.9.1%2Bcpu-cp312-cp312-win_amd64.whl", "3")
    )
    assert TOOL.cpu_torch(page, "2.9.1") == (
        f"torch==2.9.1 \\\n    --hash=sha256:{'a' * 64} \\\n    --hash=sha256:{'b' * 64}\n"
    )
    with pytest.raises(TOOL.LockError, match="no CPU build of torch 3"):
        TOOL.cpu_torch(page, "3.0.0")


def test_what_only_gpus_need_is_left_out_on_cpus() -> None:
    lock = "# Head.\n" + "".join(
        f"{name} \\\n    --hash=sha256:{'0' * 64}\n"
        for name in ("cuda-toolkit==13", "numpy==2", "nvidia-nccl-cu13==2", "torch==2", "uvloop==1")
    )
    kept = TOOL.entries(TOOL.on_cpus(lock, "torch==2 \\\n    --hash=sha256:1\n"))
    assert [entry.split()[0] for entry in kept] == ["numpy==2", "torch==2", "uvloop==1"]
    assert "sha256:1" in kept[1]
