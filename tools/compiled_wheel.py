"""Build hook: a wheel whose host side of a round is compiled by mypyc (decision 48).

    make compiled

It needs a C compiler and Python's headers. The wheel also contains the sources: Python prefers the
compiled module of a name.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGES: Final[Mapping[str, Sequence[str]]] = {
    "drafter/outrider_drafter/gpu": (
        # What `outrider bench host` puts a canned device in place of.
        "kv_writer",
    ),
    "drafter/outrider_drafter/look_ahead": (
        # Final tuples of floats, which mypyc takes for unset.
        "calibration",
    ),
    "drafter/outrider_drafter/proposers": (
        # Sources without a device.
        "eagle_forest",
        "forest",
        "ngram",
        "outcome_drafting",
        "small_model",
        "tree_growth",
        # Abstract classes of sources of both kinds.
        "interface",
    ),
    "drafter/outrider_drafter/server": (
        "build",
        "handshake",
        "service",
        "session_spans",
    ),
    "drafter/outrider_drafter/state": (
        # It and the table that its sessions are rows of name each other.
        "session",
    ),
    "outrider": (
        "build_info",
        "errors",
        "extras",
        "failure_event",
        "ids",
        "logs",
        "metrics_port",
        "process_metrics",
        "process_tuning",
        "signals",
        "spans",
        "start_times",
        "watchdog",
    ),
    "outrider/engine": (
        "acceptance",
        "attention",
        "checkpoint",
        "draft_sampling",
        "gguf",
        "invariant_segments",
        "layers",
        "linear",
        "logits_processor",
        "logprobs",
        "matmul_tuning",
        "model_loader",
        "noise",
        "residual",
        "swap",
        "swap_paths",
        "target",
        "truncation",
        # Before the first round.
        "weight_copies",
    ),
    "outrider/engine/device": (
        # Before the first round.
        "current_device",
        "trial_capture",
        "warm_up",
        # What torch captures once.
        "target_program",
    ),
    "outrider/engine/device/drafting": (
        # What torch captures once.
        "chain_levels",
        "draft_forward",
        "draft_program",
        "draft_row_state",
        "eagle_forward",
        "in_process_drafter",
        "small_model_forward",
        # Before the first round.
        "eagle_weights",
    ),
    "outrider/engine/device/graphs": (
        # A class of ctypes'; and what `outrider bench host` puts canned things in place of.
        "graph_cache",
        # Before the first round.
        "kernel_compilation",
        "shape_family",
    ),
    "outrider/engine/device/inputs": (),
    "outrider/engine/device/slots": (),
    "outrider/engine/device/transfer": (
        # A class of ctypes'; and what `outrider bench host` puts canned things in place of.
        "buffers",
        "cuda_driver",
        # Before the first round.
        "pinned_memory",
    ),
    "outrider/spec": (
        "decoding_mode",
        "plan",
        "sampling",
        "speculation_summary",
        "structured_output",
        "thinking_budget",
        "token_limits",
    ),
    "outrider/transport": (
        "error_codec",
        "in_process",
        "interface",
        "session_stream",
        "tls",
    ),
    "outrider/transport/shm": ("handshake",),
    "outrider/wire": (
        # Other messages than those of rounds and sessions.
        "control_codec",
        "inference",
        "inference_codec",
        "inference_response_codec",
        "logprobs",
        "messages",
        "pool_codec",
        "server_info",
        "stats",
    ),
    "verifier/outrider_verifier/engine": (
        # Of the event loop, a few times a session; or of CPUs and tests.
        "failure_handler",
        # The host benchmarks replace its `flush`, which does little itself.
        "outbox",
    ),
    "verifier/outrider_verifier/exchange": (
        # Of the event loop, a few times a session; or of CPUs and tests.
        "drafter_health",
        "message_checks",
    ),
    "verifier/outrider_verifier/kv": (),
    "verifier/outrider_verifier/model_runner": (
        # Of the event loop, a few times a session; or of CPUs and tests.
        "cpu_runner",
        "grammar_preparation",
    ),
    "verifier/outrider_verifier/model_runner/gpu_runner": (),
    "verifier/outrider_verifier/planner": (),
    "verifier/outrider_verifier/server": (
        # Of the event loop, a few times a session; or of CPUs and tests.
        "drafter_connections",
        # Read once, at the start.
        "engine_builder",
        "service_builder",
        # A class of prometheus_client's, which mypyc cannot extend.
        "metrics",
    ),
    "verifier/outrider_verifier/state": (
        # Of the event loop, a few times a session; or of CPUs and tests.
        "simulated_acceptance",
    ),
}
"""Folders of packages, and which of their modules stay as they are."""
MODULES: Final = ("outrider/transport/grpc/shm_frames.py",)
"""Modules beside those."""
SOURCES: Final = ("outrider", "verifier/outrider_verifier", "drafter/outrider_drafter")

_SETUP: Final = """
import sys
from setuptools import setup
from mypyc.build import mypycify

target, how, *modules = sys.argv[1:]
sys.argv[1:] = ["build_ext", "--build-lib", f"{target}/lib", "--build-temp", f"{target}/objects"]
options = ["--follow-imports=silent", "--cache-dir", f"{target}/cache"]
extensions = mypycify(
    [*options, *modules], opt_level="2", debug_level="0", multi_file=True, target_dir=f"{target}/c"
)
if how == "compile":
    setup(name="outrider-compiled", packages=[], ext_modules=extensions)
"""


_MYPY: Final = """
[mypy]
# Types of what is not installed where wheels are built are anything, also where it is.
ignore_missing_imports = True
[mypy-torch.*,triton.*,transformers.*,grpc.*,google.*,prometheus_client.*]
follow_imports = skip
"""


def modules(root: Path) -> list[str]:
    """The modules to compile, as paths below the folders that Python finds packages in."""
    found: list[str] = [*MODULES]
    for folder, left in PACKAGES.items():
        names = {path.stem for path in (root / folder).glob("*.py")}
        if unknown := set(left) - names:
            raise ValueError(f"no such modules in {folder}: {sorted(unknown)}")
        package = Path(folder)
        package = package if package.parts[0] == "outrider" else Path(*package.parts[1:])
        compiled = sorted(name for name in names - set(left) if not name.startswith("__"))
        found += [str(package / f"{name}.py") for name in compiled]
    return found


def compile_modules(root: Path, into: Path, *, translate_only: bool = False) -> Path:
    """Compile what is to be; the folder of the extensions, laid out as they are installed.
    `translate_only`: into C and no further, which is most of what can go wrong.

    Raises RuntimeError with what mypyc or the compiler said.
    """
    # A copy has no settings of the project's own, and nothing is left in the checkout.
    tree = into / "tree"
    for source in SOURCES:
        shutil.copytree(root / source, tree / Path(source).name)
    (tree / "setup.py").write_text(_SETUP)
    (tree / "mypy.ini").write_text(_MYPY)
    how = "translate" if translate_only else "compile"
    command = [sys.executable, "setup.py", str(into), how, *modules(root)]
    environment = os.environ | {"MYPYPATH": "."}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"mypyc failed:\n{done.stdout[-8000:]}\n{done.stderr[-8000:]}")
    return into / "lib"


class CompiledWheel(BuildHookInterface[Any]):
    """Adds the extensions to the wheel."""

    PLUGIN_NAME = "custom"
    _folder: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatch before the wheel is put together; an editable one is left alone."""
        if self.target_name != "wheel" or version == "editable":
            return
        self._folder = Path(tempfile.mkdtemp(prefix="outrider-compiled-"))
        library = compile_modules(Path(self.root), self._folder)
        build_data |= {"pure_python": False, "infer_tag": True}
        build_data["force_include"] |= {
            str(path): str(path.relative_to(library)) for path in library.rglob("*.so")
        }

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called when it is there."""
        if self._folder is not None:
            shutil.rmtree(self._folder)
