"""Where a model and its head are: names are looked up (and pulled), directories taken."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.errors import NotFoundError
from outrider.models import builtin_head, model_dir, resolve

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model that is on this machine."""

    name: str
    """What clients call it."""
    path: Path
    """Its directory."""
    head: Path | None
    """The draft head that was given or that ships for it."""


def find_model(name_or_path: str, *, head: Path | None = None) -> ModelFiles:
    """Resolve a model (pulling a known one that is missing) and its head.

    Raises NotFoundError for names and folders that do not exist.
    """
    if head is not None and not (head / "config.json").is_file():
        raise NotFoundError(f"no draft head at {head}: there is no config.json", reason="NO_HEAD")
    path = resolve(name_or_path)
    given = Path(name_or_path).expanduser()
    name = given.resolve().name if given.exists() else name_or_path
    known = not given.exists() or path.resolve() == model_dir(name).resolve()
    return ModelFiles(name=name, path=path, head=head or (builtin_head(name) if known else None))
