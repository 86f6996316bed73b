"""Checks the settings of a local fleet before any of its processes is started.

In a process, flags take precedence over environment variables, and these over the TOML file.
`outrider serve` starts the processes with flags. If such a flag overrides a variable or a value of
a file, this is reported as a warning. Values that a process would refuse are refused here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from outrider.client.local.config import LocalFleetConfig
from outrider.client.local.process_flags import (
    ProcessPlacement,
    drafter_args,
    router_args,
    verifier_args,
)
from outrider.config.loader import LoadedConfig
from outrider.config.process_registry import PROCESSES
from outrider.errors import NotFoundError
from outrider.transport.tls import CertificateRole

_SOMEWHERE: Final = "127.0.0.1:1"
"""Placeholder for addresses that are known only after processes have started."""
_RAY: Final = "ray"
_FLAGS: Final[Mapping[str, str]] = {
    "feature_head": "--head",
    "hooks": "--verifier-hook and --drafter-hook",
    "listen": "--host and --port",
    "max_context_len": "--max-model-len",
    "memory_fraction": "--gpu-memory-utilization",
    "methods": "--drafter-methods",
    "model_name": "--served-model-name",
    "speculation.fan_out": "--fan-out",
    "speculation.look_ahead": "--look-ahead",
    "tls.ca": "--tls-dir",
    "tls.cert": "--tls-dir",
    "tls.key": "--tls-dir",
}
"""Flag of `outrider serve` for each process setting whose flag has another name."""
_DECIDED: Final = frozenset(
    {
        *("drafter_id", "drafters", "health_listen", "reuse_ports", "trace_file"),
        *("verifier_id", "verifiers"),
    }
)
"""Process settings that `outrider serve` derives from others. It has no flags for them."""


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """Result of the settings check of a local fleet."""

    warnings: tuple[str, ...]
    """One line of text for each environment variable or file key that a flag overrides."""
    addresses: tuple[str, ...]
    """Addresses HOST:PORT at which the processes will listen, without those whose port is 0."""


def check_settings(
    config: LocalFleetConfig,
    verifiers: Sequence[ProcessPlacement],
    drafters: Sequence[ProcessPlacement],
) -> ProcessSettings:
    """Load the settings of each kind of process as that process will load them, including
    environment variables and files. Return warnings and the addresses to listen at.

    Raises InvalidRequestError for settings that a process would refuse, and NotFoundError for a
    process that is not installed.
    """
    warnings: list[str] = []
    addresses = [config.listen, config.http]
    commands: dict[CertificateRole, list[str]] = {
        CertificateRole.VERIFIER: verifier_args(config, verifiers[0])
    }
    if drafters:
        commands[CertificateRole.DRAFTER] = drafter_args(config, drafters[0])
    peers = [_SOMEWHERE for _ in drafters]
    commands[CertificateRole.ROUTER] = router_args(config, [_SOMEWHERE], peers)
    counts = {
        CertificateRole.VERIFIER: len(verifiers),
        CertificateRole.DRAFTER: len(drafters),
        CertificateRole.ROUTER: 1,
    }
    for role, args in commands.items():
        listen = config.listen if role is CertificateRole.ROUTER else "127.0.0.1:0"
        loaded = PROCESSES[role].load([*args, "--listen", listen])
        warnings += _warnings(role, loaded)
        host, port = loaded.config.metrics_host, loaded.config.metrics_port
        if port > 0:
            several = (
                range(config.routers) if role is CertificateRole.ROUTER else [0] * counts[role]
            )
            addresses += [f"{host}:{port + index}" for index in several]
        if role is CertificateRole.ROUTER and loaded.config.pool_listen:
            addresses.append(loaded.config.pool_listen)
    fixed = [address for address in addresses if address and not address.endswith(":0")]
    return ProcessSettings(tuple(warnings), tuple(fixed))


def ray_warnings(args: Sequence[str]) -> list[str]:
    """Return one line of text for each setting of the Ray launcher that its flags `args` override.
    Raises InvalidRequestError for settings that the launcher would refuse."""
    try:
        return _warnings(_RAY, PROCESSES[_RAY].load(args))
    except NotFoundError:
        # Only the launcher's own process finds the package in a checkout, and reports if it is
        # missing.
        return []


def _warnings(role: str, loaded: LoadedConfig[Any]) -> list[str]:
    lines: list[str] = []
    for key, source in loaded.overridden.items():
        where = source if source.isupper() else f"{key} in {source}"
        flag = "" if key in _DECIDED else _FLAGS.get(key, f"--{key.replace('_', '-')}")
        if key == "listen" and role != CertificateRole.ROUTER:
            flag = ""
        hint = f"; use {flag}" if flag else ""
        lines.append(f"warning: {where} is ignored: outrider serve sets {key} of the {role}{hint}")
    return lines
