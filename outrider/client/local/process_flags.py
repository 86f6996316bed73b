"""Builds the command lines of the processes on this machine, and assigns the processes to devices.

The module knows only the flags of the processes and imports none of their packages.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.client.local.certificates import tls_from
from outrider.client.local.config import (
    CPU,
    CUDA,
    HEAD_METHODS,
    SEPARATE,
    SHARED_MEMORY_FRACTION,
    LocalFleetConfig,
)
from outrider.errors import FailedPreconditionError, InvalidRequestError
from outrider.spec.exchange_mode import AUTO, OFF
from outrider.spec.plan import DraftMethod, default_method
from outrider.transport.tls import CertificateRole

DRIVER_FILES = tuple(map(Path, ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/dxg")))
"""Files of which one exists if a CUDA driver is installed: on servers, on Tegra and in WSL."""
HEALTH_LISTEN = "127.0.0.1:0"
"""Address of a process's health service, which its supervisor probes. Port 0 stands for a free
port."""


@dataclass(frozen=True, slots=True)
class ProcessPlacement:
    """Name and device of one verifier or drafter."""

    name: str
    """Id of the verifier or drafter, which is also the name of its process, such as
    "verifier-0"."""
    device: str = CPU
    """torch device of the process."""
    memory_fraction: float | None = None
    """Fraction of the GPU's memory that the process may use; None takes the process's default."""
    shares_gpu: bool = False
    """Whether the process's GPU is used by a verifier and by a drafter."""


def count_gpus() -> int:
    """Return the number of CUDA devices that processes started by this one will see.

    torch is not imported. If the CUDA driver does not list its devices, the result is 1.
    """
    present = _count_present()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    names = [name.strip() for name in visible.split(",")]
    # CUDA ignores all names from the first invalid one on.
    return len(list(itertools.takewhile(lambda name: name not in ("", "-1"), names)))


def _count_present() -> int:
    """Return the number of CUDA devices of this machine; 1 if the driver does not list its
    devices."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30.0, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        count = 0
    else:
        count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    # In containers a driver may lack its tools, or the tools may fail.
    return count or int(any(path.exists() for path in DRIVER_FILES))


def plan_placement(
    config: LocalFleetConfig, gpus: int
) -> tuple[list[ProcessPlacement], list[ProcessPlacement]]:
    """Return the placements of the verifiers and those of the drafters on a machine with `gpus`
    GPUs.

    GPUs are assigned round-robin, first to the verifiers. A verifier that shares its GPU with a
    drafter leaves memory for the drafter. Raises FailedPreconditionError (NO_GPU) if a GPU is
    needed and there is none. Raises InvalidRequestError (TOO_FEW_GPUS) if verifiers share a GPU and
    `kv_tokens` is not set, because each verifier would regard the memory of the others as occupied.
    """
    if config.uses_gpus and not gpus:
        flag = "--device" if config.device != CPU else "--drafter-device"
        raise FailedPreconditionError(
            f"{flag} {CUDA} needs a GPU, but CUDA finds none on this machine (check `nvidia-smi "
            f"-L` and CUDA_VISIBLE_DEVICES); use {flag} {CPU} without a GPU",
            reason="NO_GPU",
        )
    drafters = config.drafters if config.drafter_methods else 0
    cuda = [f"{CUDA}:{i % gpus}" for i in range(config.verifiers + drafters)] if gpus else []
    verifying = [CPU] * config.verifiers if config.device == CPU else cuda[: config.verifiers]
    drafting = [config.drafter_device or CPU] * drafters
    if config.device != CPU and not config.drafter_device:
        drafting = cuda[config.verifiers :]

    if config.kv_tokens is None and config.device != CPU and config.verifiers > gpus:
        raise InvalidRequestError(
            f"{config.verifiers} verifiers share {gpus} GPUs: set the KV cache size of each with "
            "--kv-tokens, or start at most as many verifiers as there are GPUs",
            reason="TOO_FEW_GPUS",
        )

    def share(device: str) -> float | None:
        if config.gpu_memory_utilization is not None and device != CPU:
            return config.gpu_memory_utilization
        return SHARED_MEMORY_FRACTION if device != CPU and device in drafting else None

    def shared(device: str) -> bool:
        return device != CPU and device in verifying and device in drafting

    return (
        [
            ProcessPlacement(f"verifier-{i}", device, share(device), shared(device))
            for i, device in enumerate(verifying)
        ],
        [
            ProcessPlacement(f"drafter-{i}", device, shares_gpu=shared(device))
            for i, device in enumerate(drafting)
        ],
    )


def verifier_args(config: LocalFleetConfig, place: ProcessPlacement) -> list[str]:
    """Return the command-line arguments of the verifier at this placement."""
    uses_head = bool(HEAD_METHODS & set(config.methods))
    flags = _flags(
        model=config.model,
        feature_head=config.head if uses_head else None,
        dtype=config.element_type,
        device=place.device,
        placement=config.placement,
        draft_length=config.draft_length,
        draft_top_k=config.draft_top_k if config.placement != SEPARATE else None,
        planner=config.planner,
        simulated_acceptance=config.simulated_acceptance or None,
        kv_tokens=config.kv_tokens,
        max_context_len=config.max_model_len,
        memory_fraction=place.memory_fraction,
        max_sessions=config.max_sessions,
        verifier_id=place.name,
        **_common_flags(config, place, CertificateRole.VERIFIER),
    )
    flags += _hook_flags(config.verifier_hooks)
    flags += [] if config.prefix_cache else ["--no-prefix-cache"]
    flags += _exchange_flags(config, place)
    flags += ["--batch-invariant"] if config.batch_invariant else []
    return flags if config.cuda_graphs else [*flags, "--no-cuda-graphs"]


def _exchange_flags(config: LocalFleetConfig, place: ProcessPlacement) -> list[str]:
    """Return the verifier's or drafter's flags for the exchange through GPU memory."""
    if config.placement != SEPARATE or DraftMethod.EAGLE3 not in config.methods:
        return []
    mode = config.device_exchange
    if mode == AUTO and place.shares_gpu:
        # A process that waits on the GPU would block the other process on the same GPU.
        mode = OFF
    return [] if mode == AUTO else ["--device-exchange", mode]


def drafter_args(config: LocalFleetConfig, place: ProcessPlacement) -> list[str]:
    """Return the command-line arguments of the drafter at this placement."""
    methods = config.drafter_methods
    flags = _flags(
        model=config.model,
        head=config.head if HEAD_METHODS & set(methods) else None,
        methods=",".join(methods),
        draft_model=config.draft_model if DraftMethod.MODEL in methods else None,
        dtype=config.element_type,
        device=place.device,
        drafter_id=place.name,
        **_common_flags(config, place, CertificateRole.DRAFTER),
    )
    flags += _hook_flags(config.drafter_hooks)
    flags += _exchange_flags(config, place)
    return flags if config.cuda_graphs else [*flags, "--no-cuda-graphs"]


def router_args(
    config: LocalFleetConfig, verifiers: Sequence[str], drafters: Sequence[str], index: int = 0
) -> list[str]:
    """Return the command-line arguments of router number `index`. `verifiers` and `drafters` are
    the addresses of its peers."""
    port = config.metrics_port
    peers = [flag for address in verifiers for flag in ("--verifier", address)]
    peers += [flag for address in drafters for flag in ("--drafter", address)]
    if config.routers > 1:
        peers.append("--reuse-ports")
    return peers + _flags(
        model=config.model,
        model_name=config.model_name or None,
        http=config.http,
        method=default_method(config.methods),
        look_ahead=config.look_ahead,
        fan_out=config.fan_out,
        queue_limit=config.queue_limit,
        drain_timeout_s=config.drain_timeout_s,
        journal=config.journal,
        slow_reader_timeout_s=config.slow_reader_timeout_s,
        log_level=config.log_level,
        health_listen=HEALTH_LISTEN,
        metrics_port=port + index if port else port,
        metrics_compat=config.metrics_compat,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
        api_keys=config.api_keys,
        **_tls_flags(config, CertificateRole.ROUTER),
    )


def _common_flags(
    config: LocalFleetConfig, place: ProcessPlacement, role: CertificateRole
) -> dict[str, object]:
    """Return those flags that verifiers and drafters have in common, by name."""
    trace = None if config.trace_dir is None else config.trace_dir / f"{place.name}.json"
    return {
        "threads": config.threads,
        "busy_polling_cores": config.busy_polling_cores,
        "trace_file": trace,
        "log_level": config.log_level,
        "health_listen": HEALTH_LISTEN,
        **_tls_flags(config, role),
    }


def _tls_flags(config: LocalFleetConfig, role: CertificateRole) -> dict[str, object]:
    if config.tls_dir is None:
        return {}
    tls = tls_from(config.tls_dir, role)
    return {"tls_cert": tls.cert, "tls_key": tls.key, "tls_ca": tls.ca}


def _hook_flags(hooks: Sequence[str]) -> list[str]:
    return [part for hook in hooks for part in ("--hook", hook)]


def _flags(**values: object) -> list[str]:
    """Return `--name value` for each value that is set; a flag whose value is None is left out."""
    flags: list[str] = []
    for name, value in values.items():
        if value is not None:
            flags += [f"--{name.replace('_', '-')}", str(value)]
    return flags
