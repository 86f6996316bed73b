"""Arguments of processes, read back."""

from __future__ import annotations

import itertools

from outrider.client.local.config import LocalFleetConfig
from outrider.client.local.process_flags import drafter_args, plan_placement, verifier_args


def flags_of(arguments: list[str]) -> dict[str, str]:
    """--name value pairs."""
    pairs = itertools.pairwise(arguments)
    return {name[2:]: value for name, value in pairs if name.startswith("--")}


def verifier_arguments(config: LocalFleetConfig, *, gpus: int = 0) -> list[str]:
    """Those of the first verifier, on a machine with so many GPUs."""
    return verifier_args(config, plan_placement(config, gpus)[0][0])


def drafter_arguments(config: LocalFleetConfig, *, gpus: int = 0) -> list[str]:
    """Those of the first drafter, likewise."""
    return drafter_args(config, plan_placement(config, gpus)[1][0])
