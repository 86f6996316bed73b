"""Request validation: tokenizes a client's request, applies defaults and checks limits.

Pure except for tokenizing. Admission and verifiers read the resulting `ValidatedRequest`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from outrider.errors import InvalidRequestError, NotFoundError
from outrider.ids import DrafterId, RequestId, SessionId, TenantId
from outrider.spec.plan import SpeculationPlan
from outrider.spec.sampling import SamplingParams
from outrider.spec.structured_output import StructuredOutput
from outrider.spec.token_limits import TokenLimits
from outrider.text.chat import NEXT_ANSWER, ChatOptions
from outrider.text.tokenizer import LONG_INPUT, Tokenizer
from outrider.wire.inference import (
    MAX_TOP_LOGPROBS,
    ChatPrompt,
    GenerateRequest,
    Prompt,
    PromptInfo,
    TextPrompt,
    TokenPrompt,
)
from outrider.wire.messages import SessionSpec, VerifierInfo
from outrider_router.base.tenants import SHARED_TENANT
from outrider_router.config import RouterConfig
from outrider_router.requests.output_assembler import OutputAssembler
from outrider_router.requests.request_options import (
    check_ids,
    make_plan,
    make_sampling,
    make_token_limits,
    output_budget,
    stop_ids,
)
from outrider_router.requests.stop_checker import StopChecker

ArgumentT = TypeVar("ArgumentT")

_THREADS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
"""Where long prompts are tokenized, a few at a time."""
_TURN_CHARS = 16
"""Characters that a template adds to a turn, about."""


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
    """KV tokens that it may need at most."""
    priority: int
    tenant: TenantId
    structured_output: StructuredOutput | None = None
    """The grammar of the answer; None: any."""
    token_limits: TokenLimits | None = None
    """Which ids the answer may be made of; None: all."""
    includes_stop_text: bool = False
    """Whether what ends the text is part of it."""
    special_tokens: bool = False
    """Whether special tokens are part of the text."""
    returns_prompt_ids: bool = False
    """Whether the client is told the ids of its prompt."""
    is_client_named: bool
    """Whether its client chose its id, and so is known when it comes back."""
    model: str
    top_logprobs: int | None = None
    """Most probable ids to give with each emitted token; None gives no log-probabilities."""

    def session_spec(
        self,
        session_id: SessionId,
        epoch: int,
        drafter_id: DrafterId | None,
        plan: SpeculationPlan,
        emitted: Sequence[int] = (),
    ) -> SessionSpec:
        """What a verifier is told; `plan` is the job's as that verifier carries it out, `emitted`
        what the sessions before this one emitted."""
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
        )

    def prompt_info(self, request_id: RequestId) -> PromptInfo:
        """What its client is told first."""
        return PromptInfo(
            request_id=request_id,
            prompt_tokens=len(self.prompt_ids),
            model=self.model,
            prompt_token_ids=self.prompt_ids if self.returns_prompt_ids else (),
        )

    def make_assembler(self, tokenizer: Tokenizer) -> OutputAssembler:
        """What makes its text."""
        return OutputAssembler(
            tokenizer.special_pieces if self.special_tokens else tokenizer.pieces,
            self.stop_strings,
            include_stop=self.includes_stop_text,
            min_tokens=self.min_new_tokens,
        )

    def stop_checker(self, tokenizer: Tokenizer) -> StopChecker | None:
        """The search for its stop strings; None: it has none."""
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
    """Ids of a prompt; InvalidRequestError if it is empty or cannot be rendered.

    `add_special_tokens`: of a text; whether those that open a document come first.
    `chat_options`: of a conversation; where its text ends.
    `parse_special_tokens`: of a conversation; whether the strings of special tokens in messages
    become these tokens. `max_tokens`: a prompt that has far more raises InvalidRequestError
    (PROMPT_TOO_LONG) before all of it is tokenized.
    """
    match prompt:
        case TokenPrompt(token_ids=ids):
            found = tuple(ids)
        case TextPrompt(text=text):
            encode = partial(
                tokenizer.encode, add_special_tokens=add_special_tokens, max_tokens=max_tokens
            )
            found = await _maybe_in_thread(len(text), encode, text)
        case ChatPrompt(messages=messages):
            turns = [{"role": turn.role, "content": turn.content} for turn in messages]
            size = sum(len(turn.content) + _TURN_CHARS for turn in messages)
            encode_chat = partial(
                tokenizer.encode_chat,
                options=chat_options,
                parse_special_tokens=parse_special_tokens,
                max_tokens=max_tokens,
            )
            found = await _maybe_in_thread(size, encode_chat, turns)
    if not found:
        raise InvalidRequestError("the prompt has no tokens", reason="EMPTY_PROMPT", param="prompt")
    return found


async def _maybe_in_thread(
    size: int, function: Callable[[ArgumentT], tuple[int, ...]], argument: ArgumentT
) -> tuple[int, ...]:
    if size > LONG_INPUT:
        # Threads of their own: long prompts keep nothing but each other waiting.
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
) -> ValidatedRequest:
    """Apply defaults and check everything against the served model.

    Raises InvalidRequestError; NotFoundError for a model that is not served.
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
        includes_stop_text=request.stopping.include_stop_str_in_output,
        special_tokens=request.skip_special_tokens is False,
        returns_prompt_ids=request.return_prompt_token_ids,
        is_client_named=request.request_id is not None,
        model=name,
        top_logprobs=_top_logprobs(request.top_logprobs, vocab_size),
    )


def served_model_name(config: RouterConfig, info: VerifierInfo) -> str:
    """The name that clients ask for."""
    return config.model_name or info.model_name


def max_session_len(config: RouterConfig, info: VerifierInfo) -> int:
    """Most tokens of prompt and output that this verifier can ever serve."""
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
    """What ends the session. An answer that is to have a form ends where that is complete, whatever
    was said of end-of-turn ids."""
    if request.structured_output is None:
        return stop_ids(request.stopping, tokenizer.eos_ids, vocab_size)
    if not tokenizer.eos_ids:
        raise InvalidRequestError(
            "structured output needs a model with an end-of-turn id",
            reason="INVALID_STRUCTURE",
            param="structured_outputs",
        )
    stopping = replace(request.stopping, ignore_eos=False)
    return stop_ids(stopping, tokenizer.eos_ids, vocab_size)
