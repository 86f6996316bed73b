"""Install hints for missing optional packages: maps each package to its pip extra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from outrider.errors import NotFoundError

EXTRAS: Final = {
    "cryptography": "tls",
    "fastapi": "router",
    "gguf": "engine",
    "jinja2": "router",
    "llguidance": "router",
    "opentelemetry": "trace",
    "prometheus_client": "router",
    "ray": "ray",
    "safetensors": "engine",
    "tokenizers": "router",
    "torch": "engine",
    "transformers": "train",
    "triton": "engine",
    "uvicorn": "router",
}
"""Optional packages that are imported somewhere, and the extra that brings each."""


@contextmanager
def explain_missing_packages(who: str) -> Iterator[None]:
    """Tell `who` runs here what is to be installed where a package of an extra is missing.

    Raises NotFoundError (NOT_INSTALLED) then; other modules that are missing are faults of ours.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        raise NotFoundError(
            f"{who} needs the package {package}: pip install 'outrider[{EXTRAS[package]}]'",
            reason="NOT_INSTALLED",
        ) from None
