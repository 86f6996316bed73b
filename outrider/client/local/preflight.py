"""Checks of all model files before any process is started.

The processes make the same checks when they load the files (`outrider.checkpoints`). The checks
here read only configurations, weight headers and the tokenizer. They take a second or two, because
no weights are loaded.
"""

from __future__ import annotations

from pathlib import Path

from outrider.checkpoints.directory import read_model_directory
from outrider.checkpoints.head_tensors import read_head
from outrider.checkpoints.model_config import ModelConfig
from outrider.client.local.config import HEAD_METHODS, LocalFleetConfig
from outrider.errors import FailedPreconditionError, InvalidRequestError
from outrider.extras import explain_missing_packages
from outrider.spec.plan import DraftMethod


def check_files(config: LocalFleetConfig) -> tuple[str, ...]:
    """Check the target model, its context length, the draft head, the small draft model, the
    tokenizer and the chat template.

    Returns warnings, one line each, about features that will be unavailable. Raises NotFoundError,
    InvalidRequestError or FailedPreconditionError with the reason why a verifier, a drafter or the
    router would not start.
    """
    target = read_model_directory(config.model, compare_all=False).config
    _check_length(config.max_model_len, target)
    warnings = _check_tokenizer(config.model, target)
    if config.head is not None:
        for method in HEAD_METHODS & set(config.methods):
            read_head(config.head, target, kind=method)
    if config.draft_model is not None and DraftMethod.MODEL in config.methods:
        read_model_directory(config.draft_model, compare_all=False)
        _check_same_tokenizer(config.draft_model, config.model)
    return warnings


def _check_length(max_model_len: int | None, target: ModelConfig) -> None:
    """Raise InvalidRequestError if `max_model_len` exceeds the model's context length. Without this
    check the verifier would reduce it."""
    allowed = target.max_position_embeddings
    if max_model_len is not None and max_model_len > allowed:
        raise InvalidRequestError(
            f"--max-model-len must be at most {allowed}, the context length of the model, got "
            f"{max_model_len}",
            reason="INVALID_FLAG",
        )


def _check_tokenizer(model: Path, target: ModelConfig) -> tuple[str, ...]:
    """Load the tokenizer and compile its chat template as the router does. Return warnings. Raises
    FailedPreconditionError if the tokenizer does not fit the model."""
    # Imported here because the packages for tokenizers need not be installed otherwise.
    from outrider.text.tokenizer import Tokenizer

    with explain_missing_packages("outrider-router"):
        tokenizer = Tokenizer.load(model)
    if tokenizer.num_ids > target.vocab_size:
        raise FailedPreconditionError(
            f"{model}: the tokenizer has ids up to {tokenizer.num_ids - 1}, but the vocabulary of "
            f"the model has {target.vocab_size} ids",
            reason="VOCAB_MISMATCH",
        )
    if tokenizer.has_chat_template:
        return ()
    return (f"{model} has no chat template: chat requests will be refused",)


def _check_same_tokenizer(draft_model: Path, model: Path) -> None:
    from outrider.text.tokenizer import tokenizer_hash

    own = tokenizer_hash(draft_model)
    if own and own != tokenizer_hash(model):
        raise FailedPreconditionError(
            f"{draft_model} must have the tokenizer of {model}, but has another one",
            reason="TOKENIZER_MISMATCH",
        )
