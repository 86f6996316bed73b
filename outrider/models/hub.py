"""Downloads models from the Hugging Face Hub by id, into the cache of `huggingface_hub`.

The library `huggingface_hub` comes with `outrider[router]` (tokenizers needs it). It reads
HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE, resumes interrupted downloads, and checks sizes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from outrider.errors import NotFoundError, UnavailableError

_HUB_ID: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_TOKENIZER_PATTERNS: Final = ["*.json", "*.jinja"]
"""The tokenizer's files, chat templates, and the configurations, which name end-of-turn ids."""
_PATTERNS: Final = ["*.safetensors", *_TOKENIZER_PATTERNS]
_LEFT_OUT: Final = ["*/*", "consolidated*"]
"""Files of other formats, which would double the download."""


def is_hub_id(name: str) -> bool:
    """Return whether a name has the form OWNER/NAME."""
    return _HUB_ID.fullmatch(name) is not None


def pull_from_hub(
    hub_id: str, revision: str | None = None, *, tokenizer_only: bool = False
) -> Path:
    """Download a model or EAGLE head from the hub into the cache if needed, and return its
    directory.

    `revision` is a branch, tag or commit; None means the hub's default branch. With
    `tokenizer_only`, the weights are left out. Raises NotFoundError (NO_HUB) if the id, revision or
    files do not exist, if the token gives no access, or if `huggingface_hub` is not installed.
    Raises UnavailableError (DOWNLOAD_FAILED) if the hub cannot be reached.
    """
    what = hub_id if revision is None else f"{hub_id} at revision {revision}"
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise NotFoundError(
            f"{hub_id!r} looks like a hub id, and huggingface_hub is not installed: "
            "pip install huggingface_hub",
            reason="NO_HUB",
        ) from error
    try:
        directory = Path(
            snapshot_download(
                hub_id,
                revision=revision,
                allow_patterns=_TOKENIZER_PATTERNS if tokenizer_only else _PATTERNS,
                ignore_patterns=_LEFT_OUT,
            )
        )
    except errors.LocalEntryNotFoundError as error:
        raise UnavailableError(
            f"{hub_id} is no directory here, and the hub cannot be reached for {what}: "
            f"{_first_line(error)}",
            reason="DOWNLOAD_FAILED",
        ) from error
    except errors.GatedRepoError as error:
        raise NotFoundError(
            f"{what} is gated: accept its terms on the hub and set HF_TOKEN", reason="NO_HUB"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise NotFoundError(
            f"the hub has {hub_id}, but no revision {revision!r} of it", reason="NO_HUB"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise NotFoundError(
            f"{hub_id} is no directory here, and the hub has no such id, or HF_TOKEN may not read "
            "it",
            reason="NO_HUB",
        ) from error
    except (OSError, ValueError) as error:
        raise NotFoundError(
            f"cannot get {what} from the hub: {_first_line(error)}", reason="NO_HUB"
        ) from error
    for pattern in ("tokenizer.json",) if tokenizer_only else ("config.json", "*.safetensors"):
        if not any(directory.glob(pattern)):
            raise NotFoundError(f"{what} of the hub has no {pattern}", reason="NO_HUB")
    return directory


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
