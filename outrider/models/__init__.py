"""Models: the registry of known ones, pulling them into the user's cache, finding files by name.

Nothing here imports torch; the conversion (`outrider.models.convert`) runs in a process of its own.

convert.py                 GGUF to a Hugging Face directory.
gguf_tokenizer.py          The tokenizer that a GGUF file describes, as `tokenizer.json` and
                           `tokenizer_config.json`.
hub.py                     Models of a hub, by their ids: downloaded into the hub library's own
                           cache.
pull.py                    Pulling a model into the user's cache, and finding a model by name, path
                           or hub id.
registry.py                Models that `outrider models pull` knows, and the draft heads that ship
                           with Outrider.
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
