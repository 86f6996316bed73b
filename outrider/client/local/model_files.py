"""Finds the local files of a model and its draft head, given as directory, known name or hub id."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.errors import InvalidRequestError, NotFoundError
from outrider.models import builtin_head, is_from_hub, model_dir, resolve_model

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Local files of a model and of its draft head."""

    name: str
    """Model name that clients use."""
    path: Path
    """Directory of the model."""
    head: Path | None
    """Directory of the draft head: the given one, or the one that ships for the model; None if
    there is none."""


def find_model(
    name_or_path: str,
    *,
    head: str | Path | None = None,
    revision: str | None = None,
    head_revision: str | None = None,
) -> ModelFiles:
    """Return the local files of a model and its draft head. Missing files are downloaded.

    `name_or_path` is a directory, a known model name or a hub id. `revision` and `head_revision`
    are branches, tags or commits of hub ids. Raises NotFoundError for an unknown name or directory,
    UnavailableError for a failed download, and InvalidRequestError for a revision of anything but a
    hub id.
    """
    head = None if head is None else find_head(head, head_revision)
    path = resolve_model(name_or_path, revision=revision)
    given = Path(name_or_path).expanduser()
    name = given.resolve().name if given.exists() else name_or_path
    known = not given.exists() or path.resolve() == model_dir(name).resolve()
    return ModelFiles(name=name, path=path, head=head or (builtin_head(name) if known else None))


def find_head(name_or_path: str | Path, revision: str | None = None) -> Path:
    """Return the directory of a draft head that is given as a directory or a hub id. `revision` is
    a branch, tag or commit of a hub id.

    Raises the same errors as `find_model`.
    """
    if is_from_hub(str(name_or_path)):
        return resolve_model(name_or_path, revision=revision)
    path = Path(name_or_path).expanduser()
    if not (path / "config.json").is_file():
        raise NotFoundError(f"no draft head at {path}: config.json is missing", reason="NO_HEAD")
    if revision is not None:
        raise InvalidRequestError(
            f"a revision needs a hub id (OWNER/NAME), but the head {path} is a directory",
            reason="NO_REVISION",
        )
    return path
