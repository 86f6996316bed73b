"""Registry of known models, their download into the user's cache, and look-up of models by name.

Only `outrider.models.convert` imports torch; it runs in a separate process.

convert.py                 Converts a GGUF file to a Hugging Face directory, with weights,
                           configuration and tokenizer.
gguf_tokenizer.py          Converts a GGUF file's tokenizer to `tokenizer.json` and
                           `tokenizer_config.json`.
hub.py                     Downloads models from the Hugging Face Hub by id, into the cache of
                           `huggingface_hub`.
pull.py                    Pulls models or their tokenizers into the user's cache, and resolves a
                           model by name, path or hub id.
registry.py                Registry of the models that `outrider models pull` knows, and of the
                           built-in draft heads.
"""

from outrider.models.pull import (
    ProgressCallback,
    PullProgress,
    is_from_hub,
    is_pulled,
    model_dir,
    pull_model,
    resolve_model,
    resolve_tokenizer,
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
    "resolve_tokenizer",
]
