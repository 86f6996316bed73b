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
"""Maps each optional package that some module imports to the pip extra of Outrider that installs
it."""


@contextmanager
def explain_missing_packages(who: str) -> Iterator[None]:
    """Replace the import error of a missing optional package with an error that names its pip
    extra.

    `who` is the name of the program or command, for the message. Raises NotFoundError
    (NOT_INSTALLED) in place of the ModuleNotFoundError. A ModuleNotFoundError for a package that is
    not in `EXTRAS` is a bug and is not replaced.
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
