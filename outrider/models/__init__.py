"""Models: the registry of known ones, pulling them into the user's cache, finding files by name.

Nothing here imports torch; the conversion (`outrider.models.convert`) runs in a process of its own.
"""

from outrider.models.pull import (
    ProgressCallback,
    PullProgress,
    is_from_hub,
    is_pulled,
    model_dir,
    pull_model,
    resolve_model,
)
from outrider.models.registry import ModelEntry, builtin_head, get_model, list_models

__all__ = [
    "ModelEntry",
    "PullProgress",
    "ProgressCallback",
    "builtin_head",
    "get_model",
    "is_from_hub",
    "is_pulled",
    "list_models",
    "model_dir",
    "pull_model",
    "resolve_model",
]
