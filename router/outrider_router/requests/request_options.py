"""Translates request options into sampling parameters, speculation plan and token limits.

Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import lru_cache

from outrider.errors import InvalidRequestError
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import SamplingParams
from outrider.spec.token_limits import TokenLimits
from outrider.text.tokenizer import Tokenizer
from outrider.wire.inference import SamplingOptions, SpeculationOptions, StoppingOptions
from outrider.wire.messages import VerifierInfo
from outrider_router.config import SpeculationDefaults

_Ids = tuple[int, ...]


def make_token_limits(
    options: SamplingOptions, tokenizer: Tokenizer, vocab_size: int
) -> tuple[_Ids, TokenLimits | None]:
    """Ids that are never emitted, and the limits that say more than that, if there are any.

    A bad word of one token is a banned id, which costs nothing. Raises InvalidRequestError.
    """
    allowed = tuple(dict.fromkeys(options.allowed_token_ids))
    check_ids(allowed, vocab_size, "allowed_token_ids")
    words = _written(options.bad_words, tokenizer)
    for ids in words:
        check_ids(ids, vocab_size, "bad_words")
    alone = {ids[0]: None for ids in words if len(ids) == 1}
    # One that ends with such an id is never completed.
    longer = tuple(ids for ids in words if ids[-1] not in alone)
    banned = tuple(dict.fromkeys((*options.banned_token_ids, *alone)))
    if not allowed and not longer:
        return banned, None
    return banned, TokenLimits(allowed_ids=allowed, bad_words=longer)


@lru_cache(maxsize=16)
def _written(words: tuple[str, ...], tokenizer: Tokenizer) -> tuple[_Ids, ...]:
    """The ids of words, each of them once. All answers of a call have the same words."""
    return tuple(
        dict.fromkeys(ids for word in words for ids in _token_id_variants(word, tokenizer))
    )


def _token_id_variants(word: str, tokenizer: Tokenizer) -> Iterator[_Ids]:
    """The ids of a word as it stands alone, and as it follows a space."""
    bare = word.lstrip(" ")
    for text in (bare, f" {bare}") if bare else (word,):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if not ids:
            raise InvalidRequestError(
                f"bad_words holds {word!r}, which has no tokens",
                reason="INVALID_SAMPLING",
                param="bad_words",
            )
        yield ids


def make_plan(options: SpeculationOptions, defaults: SpeculationDefaults) -> SpeculationPlan:
    """The plan of a session; wishes beyond the router's bounds are cut to them.

    Raises InvalidRequestError for values that no plan may have.
    """
    if options.enabled is False:
        return SpeculationPlan(method=DraftMethod.NONE, draft_tokens=0)
    method = defaults.method if options.method is None else options.method
    ngram = method is DraftMethod.NGRAM
    wanted = SpeculationPlan(
        method=method,
        draft_tokens=_or(options.draft_tokens, defaults.draft_tokens),
        top_k=_or(options.draft_top_k, defaults.top_k),
        look_ahead=_or(options.look_ahead, defaults.look_ahead),
        fan_out=_or(options.fan_out, defaults.fan_out),
        proposal_timeout_ms=defaults.ngram_proposal_timeout_ms
        if ngram
        else defaults.proposal_timeout_ms,
    )
    if not wanted.is_speculative:
        return SpeculationPlan(method=DraftMethod.NONE, draft_tokens=0)
    return dataclasses.replace(
        wanted, draft_tokens=min(wanted.draft_tokens, defaults.max_draft_tokens)
    )


def plan_for_verifier(plan: SpeculationPlan, info: VerifierInfo) -> SpeculationPlan:
    """The plan as this verifier carries it out.

    A verifier that drafts by itself does so in chains of one length, whatever was wished for.
    """
    if not needs_no_drafter(plan, info):
        return plan
    return dataclasses.replace(
        plan, draft_tokens=info.in_process_draft_length, top_k=1, depth=0, look_ahead=0, fan_out=0
    )


def needs_no_drafter(plan: SpeculationPlan, info: VerifierInfo) -> bool:
    """Whether the verifier needs no drafter for sessions of this plan."""
    return (
        plan.is_speculative
        and info.in_process_draft_length > 0
        and plan.method in info.in_process_methods
    )


_LISTS = ("banned_token_ids", "logit_bias", "allowed_token_ids", "bad_words")
"""Sampling options that are no numbers."""


def make_sampling(
    options: SamplingOptions, *, seed: int, vocab_size: int, banned: tuple[int, ...] | None = None
) -> SamplingParams:
    """Sampling parameters; what is not set is greedy decoding without any penalty.

    `seed` is used where the request sets none; `banned`: ids that are never emitted, by default
    those of the request. Raises InvalidRequestError.
    """
    banned = options.banned_token_ids if banned is None else banned
    given = {
        field.name: value
        for field in dataclasses.fields(options)
        if field.name not in _LISTS and (value := getattr(options, field.name)) is not None
    }
    check_ids(banned, vocab_size, "banned_token_ids")
    check_ids(tuple(id_ for id_, _ in options.logit_bias), vocab_size, "logit_bias")
    lists = {"banned_ids": banned, "logit_bias": options.logit_bias}
    return SamplingParams(**{"seed": seed, **given, **lists})


def stop_ids(
    options: StoppingOptions, eos_ids: tuple[int, ...], vocab_size: int
) -> tuple[int, ...]:
    """Ids that end the session: the model's own unless ignored, and the request's."""
    check_ids(options.stop_token_ids, vocab_size, "stop_token_ids")
    own = () if options.ignore_eos else eos_ids
    return tuple(dict.fromkeys((*own, *options.stop_token_ids)))


def output_budget(
    options: StoppingOptions, *, prompt_len: int, max_context_len: int, default_max_tokens: int
) -> int:
    """Most tokens to emit.

    An explicit max_tokens that does not fit into the context is an InvalidRequestError. The
    default, `default_max_tokens` unless the options have one of their own, is cut to what the
    context leaves.
    """
    room = max_context_len - prompt_len
    if room < 1:
        raise InvalidRequestError(
            f"the prompt has {prompt_len} tokens; the context holds {max_context_len} with the "
            "output",
            reason="PROMPT_TOO_LONG",
            param="prompt",
        )
    budget = options.max_tokens
    if budget is None:
        default = _or(options.default_max_tokens, default_max_tokens)
        budget = max(min(default, room), min(options.min_tokens or 0, room))
    if budget < 1:
        raise InvalidRequestError(
            f"max_tokens must be at least 1, got {budget}",
            reason="INVALID_STOPPING",
            param="max_tokens",
        )
    if budget > room:
        raise InvalidRequestError(
            f"max_tokens is {budget}, but after a prompt of {prompt_len} tokens the context of "
            f"{max_context_len} leaves {room}",
            reason="CONTEXT_EXCEEDED",
            param="max_tokens",
        )
    if (options.min_tokens or 0) > budget:
        raise InvalidRequestError(
            f"min_tokens ({options.min_tokens}) is greater than max_tokens ({budget})",
            reason="INVALID_STOPPING",
            param="min_tokens",
        )
    return budget


def check_ids(ids: tuple[int, ...], vocab_size: int, what: str) -> None:
    """Raise InvalidRequestError unless every id is in [0, vocab_size)."""
    bad = next((id_ for id_ in ids if not 0 <= id_ < vocab_size), None)
    if bad is not None:
        raise InvalidRequestError(
            f"{what} holds {bad}; ids must be in [0, {vocab_size})",
            reason="TOKEN_OUT_OF_RANGE",
            param=what.removeprefix("the "),
        )


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
