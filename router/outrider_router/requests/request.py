"""Request validation: tokenizes a client's request, applies defaults and checks limits.

The options of a request become sampling parameters, a speculation plan and token limits. All
functions are pure except for tokenizing. Admission and verifiers read the resulting
`ValidatedRequest`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TypeVar

from outrider.errors import InvalidRequestError, NotFoundError
from outrider.ids import DrafterId, RequestId, SessionId, TenantId
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import SamplingParams
from outrider.spec.structured_output import StructuredOutput
from outrider.spec.thinking_budget import ThinkingBudget
from outrider.spec.token_limits import TokenLimits
from outrider.spec.tools import OutputParsing
from outrider.text.chat import NEXT_ANSWER, ChatOptions
from outrider.text.output_parsers.formats import output_format_of
from outrider.text.tokenizer import LONG_INPUT, Tokenizer
from outrider.wire.inference import (
    MAX_TOP_LOGPROBS,
    ChatPrompt,
    GenerateRequest,
    Prompt,
    PromptInfo,
    SamplingOptions,
    SpeculationOptions,
    StoppingOptions,
    TextPrompt,
    TokenPrompt,
)
from outrider.wire.messages import SessionSpec, VerifierInfo
from outrider_router.base.tenants import SHARED_TENANT
from outrider_router.config import RouterConfig, SpeculationDefaults
from outrider_router.requests.chat_prompt import (
    has_rendered_tools,
    template_messages,
    template_variables,
)
from outrider_router.requests.request_output import OutputAssembler, StopChecker

_Ids = tuple[int, ...]


def make_token_limits(
    options: SamplingOptions, tokenizer: Tokenizer, vocab_size: int
) -> tuple[_Ids, TokenLimits | None]:
    """Return the banned token ids, and the other token limits: allowed ids and bad words of several
    tokens. The other limits are None if there are none.

    A bad word of one token becomes a banned id, because banned ids are cheaper to enforce. Raises
    InvalidRequestError.
    """
    allowed = tuple(dict.fromkeys(options.allowed_token_ids))
    check_ids(allowed, vocab_size, "allowed_token_ids")
    words = _written(options.bad_words, tokenizer)
    for ids in words:
        check_ids(ids, vocab_size, "bad_words")
    alone = {ids[0]: None for ids in words if len(ids) == 1}
    # A word that ends with a banned id can never be completed.
    longer = tuple(ids for ids in words if ids[-1] not in alone)
    banned = tuple(dict.fromkeys((*options.banned_token_ids, *alone)))
    if not allowed and not longer:
        return banned, None
    return banned, TokenLimits(allowed_ids=allowed, bad_words=longer)


@lru_cache(maxsize=16)
def _written(words: tuple[str, ...], tokenizer: Tokenizer) -> tuple[_Ids, ...]:
    """Return the token ids of words, without duplicates. Cached, because all completions of a call
    have the same words.
    """
    return tuple(
        dict.fromkeys(ids for word in words for ids in _token_id_variants(word, tokenizer))
    )


def _token_id_variants(word: str, tokenizer: Tokenizer) -> Iterator[_Ids]:
    """Yield the token ids of a word at the start of a text, and those after a space."""
    bare = word.lstrip(" ")
    for text in (bare, f" {bare}") if bare else (word,):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if not ids:
            raise InvalidRequestError(
                f"bad_words contains {word!r}, which has no tokens",
                reason="INVALID_SAMPLING",
                param="bad_words",
            )
        yield ids


def make_plan(options: SpeculationOptions, defaults: SpeculationDefaults) -> SpeculationPlan:
    """Return the speculation plan of a session. If more draft tokens are requested than the router
    allows, the plan has the largest allowed number.

    Raises InvalidRequestError for invalid values.
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
    """Adapt a plan to a verifier. A verifier with an in-process drafter always drafts chains of one
    fixed length.
    """
    if not needs_no_drafter(plan, info):
        return plan
    return dataclasses.replace(
        plan, draft_tokens=info.in_process_draft_length, top_k=1, depth=0, look_ahead=0, fan_out=0
    )


def needs_no_drafter(plan: SpeculationPlan, info: VerifierInfo) -> bool:
    """Return whether the verifier's in-process drafter serves sessions of this plan."""
    return (
        plan.is_speculative
        and info.in_process_draft_length > 0
        and plan.method in info.in_process_methods
    )


_LISTS = ("banned_token_ids", "logit_bias", "allowed_token_ids", "bad_words")
"""Sampling options that are lists."""


def make_sampling(
    options: SamplingOptions, *, seed: int, vocab_size: int, banned: tuple[int, ...] | None = None
) -> SamplingParams:
    """Return the sampling parameters of a request; the default is greedy decoding without
    penalties.

    `seed` is used if the request sets none. `banned` are token ids that are never emitted, by
    default those of the request. Raises InvalidRequestError.
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
    """Return the token ids that end the session: those of the request, and the model's
    end-of-sequence ids unless the request ignores them. Raises InvalidRequestError for an id
    outside the vocabulary.
    """
    check_ids(options.stop_token_ids, vocab_size, "stop_token_ids")
    own = () if options.ignore_eos else eos_ids
    return tuple(dict.fromkeys((*own, *options.stop_token_ids)))


def output_budget(
    options: StoppingOptions, *, prompt_len: int, max_context_len: int, default_max_tokens: int
) -> int:
    """Return the largest number of tokens to emit.

    Raises InvalidRequestError if max_tokens is set and does not fit into the context. If max_tokens
    is not set, the default is reduced to the remaining context. The default is that of `options`,
    or else `default_max_tokens`.
    """
    room = max_context_len - prompt_len
    if room < 1:
        raise InvalidRequestError(
            f"the prompt has {prompt_len} tokens, but the context of prompt and output "
            f"has at most {max_context_len}",
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
            f"{what} contains {bad}; token ids must be in [0, {vocab_size})",
            reason="TOKEN_OUT_OF_RANGE",
            param=what.removeprefix("the "),
        )


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


ArgumentT = TypeVar("ArgumentT")
ResultT = TypeVar("ResultT")

_THREADS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
"""Threads on which long prompts are tokenized."""
_TURN_CHARS = 16
"""Approximate number of characters that a chat template adds to a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedRequest:
    """A request after tokenizing, defaults and checks."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    plan: SpeculationPlan
    stop_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    max_new_tokens: int
    min_new_tokens: int
    kv_tokens: int
    """Largest number of KV-cache tokens that the request may need."""
    priority: int
    tenant: TenantId
    structured_output: StructuredOutput | None = None
    """Grammar of the output; None if unrestricted."""
    token_limits: TokenLimits | None = None
    """Restrictions of the token ids that the output may contain; None if there are none."""
    thinking_budget: ThinkingBudget | None = None
    """Limit of the reasoning in the output; None if it is not limited."""
    includes_stop_text: bool = False
    """Whether the text includes the stop string or stop token that ended it."""
    special_tokens: bool = False
    """Whether the text includes special tokens."""
    returns_prompt_ids: bool = False
    """Whether the response contains the token ids of the prompt."""
    is_client_named: bool
    """Whether the client chose the request id, so that the request is recognized when the client
    retries.
    """
    model: str
    top_logprobs: int | None = None
    """Number of most probable token ids to return with each token; None returns no
    log-probabilities.
    """

    parsing: OutputParsing | None = None
    """How the answer is split into reasoning, content and tool calls; None if it is not split."""

    def session_spec(
        self,
        session_id: SessionId,
        epoch: int,
        drafter_id: DrafterId | None,
        plan: SpeculationPlan,
        emitted: Sequence[int] = (),
    ) -> SessionSpec:
        """Return the session specification for a verifier.

        `plan` is the request's plan adapted to that verifier. `emitted` are the tokens of the
        request's earlier sessions, which follow the prompt.
        """
        return SessionSpec(
            session_id=session_id,
            epoch=epoch,
            token_ids=(*self.prompt_ids, *emitted),
            prompt_len=len(self.prompt_ids),
            max_new_tokens=self.max_new_tokens - len(emitted),
            stop_token_ids=self.stop_ids,
            min_new_tokens=self.min_new_tokens,
            sampling=self.sampling,
            plan=plan,
            drafter_id=drafter_id,
            priority=self.priority,
            top_logprobs=self.top_logprobs,
            structured_output=self.structured_output,
            token_limits=self.token_limits,
            thinking_budget=self.thinking_budget,
        )

    def prompt_info(self, request_id: RequestId) -> PromptInfo:
        """Return the first message of the response to the client."""
        return PromptInfo(
            request_id=request_id,
            prompt_tokens=len(self.prompt_ids),
            model=self.model,
            prompt_token_ids=self.prompt_ids if self.returns_prompt_ids else (),
            parsing=self.parsing,
        )

    def make_assembler(self, tokenizer: Tokenizer) -> OutputAssembler:
        """Return the object that turns the output's token ids into text."""
        pieces = tokenizer.special_pieces if self.special_tokens else tokenizer.pieces
        span = None
        if self.parsing is not None:
            output_format = output_format_of(
                self.parsing.tool_format, self.parsing.reasoning_format
            )
            span = output_format.make_span(is_reasoning_open=self.parsing.is_reasoning_open)
            if not self.special_tokens:
                pieces = tokenizer.bytes_with(output_format.markers)
        return OutputAssembler(
            pieces,
            self.stop_strings,
            include_stop=self.includes_stop_text,
            min_tokens=self.min_new_tokens,
            reasoning=span,
        )

    def stop_checker(self, tokenizer: Tokenizer) -> StopChecker | None:
        """Return the stop string checker, or None if the request has no stop strings."""
        return StopChecker(self.make_assembler(tokenizer)) if self.stop_strings else None


async def tokenize_prompt(
    prompt: Prompt,
    tokenizer: Tokenizer,
    *,
    add_special_tokens: bool = True,
    chat_options: ChatOptions = NEXT_ANSWER,
    parse_special_tokens: bool = False,
    max_tokens: int | None = None,
) -> tuple[int, ...]:
    """Tokenize a prompt and return its token ids.

    `add_special_tokens` adds to a text prompt the special tokens that begin a document.
    `chat_options` sets how the text of a conversation ends. `parse_special_tokens` turns strings of
    special tokens in messages into these tokens. A prompt with far more than `max_tokens` tokens is
    refused before all of it is tokenized. Raises InvalidRequestError if the prompt is empty, too
    long (PROMPT_TOO_LONG) or cannot be rendered.
    """
    match prompt:
        case TokenPrompt(token_ids=ids):
            found = tuple(ids)
        case TextPrompt(text=text):
            encode = partial(
                tokenizer.encode, add_special_tokens=add_special_tokens, max_tokens=max_tokens
            )
            found = await run_by_size(len(text), encode, text)
        case ChatPrompt():
            encode_chat = partial(
                _encode_chat,
                tokenizer=tokenizer,
                options=chat_options,
                parse_special_tokens=parse_special_tokens,
                max_tokens=max_tokens,
            )
            found = await run_by_size(chat_size(prompt), encode_chat, prompt)
    if not found:
        raise InvalidRequestError("the prompt has no tokens", reason="EMPTY_PROMPT", param="prompt")
    return found


def _encode_chat(
    prompt: ChatPrompt,
    *,
    tokenizer: Tokenizer,
    options: ChatOptions,
    parse_special_tokens: bool,
    max_tokens: int | None,
) -> tuple[int, ...]:
    traits = tokenizer.template_traits(with_tools=has_rendered_tools(prompt))
    return tokenizer.encode_chat(
        template_messages(prompt, traits),
        options=options,
        variables=template_variables(prompt, traits),
        parse_special_tokens=parse_special_tokens,
        max_tokens=max_tokens,
    )


def chat_size(prompt: ChatPrompt) -> int:
    """Return the approximate number of characters of a rendered conversation."""
    size = len(prompt.template_variables)
    for message in prompt.messages:
        size += len(message.content) + len(message.reasoning) + _TURN_CHARS
        size += sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
    return size + sum(
        len(tool.name) + len(tool.description) + len(tool.parameters) for tool in prompt.tools.tools
    )


async def run_by_size(
    size: int, function: Callable[[ArgumentT], ResultT], argument: ArgumentT
) -> ResultT:
    """Return what a function returns for an argument. If the work has a large `size`, in
    characters, the function runs in a thread, so that it does not block the event loop."""
    if size > LONG_INPUT:
        # With separate threads, long prompts delay only other long prompts.
        return await asyncio.get_running_loop().run_in_executor(_THREADS, function, argument)
    return function(argument)


def validate_request(
    request: GenerateRequest,
    prompt_ids: tuple[int, ...],
    *,
    info: VerifierInfo,
    tokenizer: Tokenizer,
    config: RouterConfig,
    seed: int,
    tenant: TenantId = SHARED_TENANT,
    parsing: OutputParsing | None = None,
    thinking_budget: ThinkingBudget | None = None,
) -> ValidatedRequest:
    """Apply defaults and check all options against the served model.

    `prompt_ids` are the tokens of the prompt, `seed` is used if the request sets none, `parsing`
    says how the answer is split, and `thinking_budget` limits its reasoning. Raises
    InvalidRequestError, and NotFoundError for a model that is not served.
    """
    name = served_model_name(config, info)
    if request.model not in (None, "", name):
        raise NotFoundError(
            f"model {request.model!r} is not served here; {name!r} is",
            reason="NO_MODEL",
            param="model",
        )
    check_ids(prompt_ids, info.vocab_size, "the prompt")
    _check_stop_strings(request.stopping.stop)
    vocab_size, options = info.vocab_size, request.sampling
    banned, token_limits = make_token_limits(options, tokenizer, vocab_size)
    budget = output_budget(
        request.stopping,
        prompt_len=len(prompt_ids),
        max_context_len=max_session_len(config, info),
        default_max_tokens=config.default_max_tokens,
    )
    return ValidatedRequest(
        prompt_ids=prompt_ids,
        sampling=make_sampling(options, seed=seed, vocab_size=vocab_size, banned=banned),
        plan=make_plan(request.speculation, config.speculation),
        stop_ids=_stop_ids(request, tokenizer, vocab_size),
        stop_strings=request.stopping.stop,
        max_new_tokens=budget,
        min_new_tokens=request.stopping.min_tokens or 0,
        kv_tokens=len(prompt_ids) + budget + config.session_slack_tokens,
        priority=request.priority,
        tenant=tenant,
        structured_output=request.structured_output,
        token_limits=token_limits,
        thinking_budget=thinking_budget,
        includes_stop_text=request.stopping.include_stop_str_in_output,
        special_tokens=request.skip_special_tokens is False,
        returns_prompt_ids=request.return_prompt_token_ids,
        is_client_named=request.request_id is not None,
        model=name,
        top_logprobs=_top_logprobs(request.top_logprobs, vocab_size),
        parsing=parsing,
    )


def served_model_name(config: RouterConfig, info: VerifierInfo) -> str:
    """Return the model name that clients send."""
    return config.model_name or info.model_name


def max_session_len(config: RouterConfig, info: VerifierInfo) -> int:
    """Return the largest number of prompt and output tokens of one session on this verifier."""
    kv_tokens = info.kv_total_blocks * info.kv_block_tokens
    return min(info.max_context_len, max(0, kv_tokens - config.session_slack_tokens))


def _top_logprobs(asked: int | None, vocab_size: int) -> int | None:
    if asked is None:
        return None
    if not 0 <= asked <= MAX_TOP_LOGPROBS:
        raise InvalidRequestError(
            f"top_logprobs must be in [0, {MAX_TOP_LOGPROBS}], got {asked}",
            reason="INVALID_LOGPROBS",
            param="top_logprobs",
        )
    return min(asked, vocab_size)


def _check_stop_strings(stops: tuple[str, ...]) -> None:
    if not all(stops):
        raise InvalidRequestError(
            "stop strings must not be empty", reason="INVALID_STOPPING", param="stop"
        )


def _stop_ids(request: GenerateRequest, tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Return the token ids that end the session. Structured output always ends at the model's
    end-of-sequence ids, even if the request ignores them.
    """
    if request.structured_output is None:
        return stop_ids(request.stopping, tokenizer.eos_ids, vocab_size)
    if not tokenizer.eos_ids:
        raise InvalidRequestError(
            "structured output needs a model with an end-of-sequence token",
            reason="INVALID_STRUCTURE",
            param="structured_outputs",
        )
    stopping = replace(request.stopping, ignore_eos=False)
    return stop_ids(stopping, tokenizer.eos_ids, vocab_size)
