"""Translates HTTP request bodies into router requests, one per choice. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from outrider.errors import InvalidRequestError
from outrider.ids import RequestId
from outrider.spec.plan import DraftMethod
from outrider.spec.sampling import Rule
from outrider.spec.tools import Tool, ToolCall, ToolChoiceMode, ToolOptions
from outrider.wire.inference import (
    ChatMessage,
    ChatPrompt,
    GenerateRequest,
    Prompt,
    SamplingOptions,
    SpeculationOptions,
    StoppingOptions,
    TextPrompt,
    TokenPrompt,
)
from outrider_router.api.http.request_models import (
    DEFAULT_COMPLETION_TOKENS,
    MAX_CHOICES,
    ChatCompletionRequest,
    ChatRequestMessage,
    CompletionRequest,
    FunctionDefinition,
    GenerationOptions,
    GenerationRequest,
    NamedToolChoice,
)
from outrider_router.api.http.structured_outputs import structured_output_of
from outrider_router.api.http.unsupported_fields import (
    CHAT,
    COMPLETION,
    MESSAGE,
    UnsupportedFieldError,
    refuse_unsupported,
)

DEFAULT_TEMPERATURE = 1.0
"""OpenAI's default temperature; the default of the gRPC API is 0."""
MASK64 = 2**64 - 1


def completion_requests(
    body: CompletionRequest, request_id: RequestId | None
) -> tuple[GenerateRequest, ...]:
    """Translate a completion into router requests, one for each choice. Choices of one prompt are
    adjacent.

    Raises InvalidRequestError.
    """
    refuse_unsupported(body.model_extra, COMPLETION)
    if body.echo and body.logprobs is not None:
        raise UnsupportedFieldError(
            "echo with logprobs is not supported: prompt tokens have no log probabilities",
            param="echo",
        )
    return _choices(
        body,
        completion_prompts(body),
        max_tokens=body.max_tokens,
        default_max_tokens=DEFAULT_COMPLETION_TOKENS,
        top_logprobs=body.logprobs,
        request_id=request_id,
    )


def chat_requests(
    body: ChatCompletionRequest, request_id: RequestId | None
) -> tuple[GenerateRequest, ...]:
    """Translate a chat into router requests, one for each choice. Raises InvalidRequestError."""
    refuse_unsupported(body.model_extra, CHAT)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError(
            "top_logprobs needs logprobs: true", reason="INVALID_LOGPROBS", param="top_logprobs"
        )
    longest = body.max_completion_tokens
    return _choices(
        body,
        (_chat(body),),
        max_tokens=body.max_tokens if longest is None else longest,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        request_id=request_id,
    )


def _chat(body: ChatCompletionRequest) -> ChatPrompt:
    choice = body.tool_choice
    tools = tool_options(
        [tool.function for tool in body.tools or ()],
        mode=choice if isinstance(choice, str) else None,
        named=choice.function.name if isinstance(choice, NamedToolChoice) else None,
        parallel=body.parallel_tool_calls,
    )
    return replace(
        chat_prompt(body.messages, tools, body.chat_template_kwargs),
        reasoning_effort=body.reasoning_effort,
        thinking_token_budget=body.thinking_token_budget,
    )


def template_variables_text(variables: Mapping[str, Any] | None) -> str:
    """Return the template variables of a router request for those of a body."""
    return json.dumps(variables, ensure_ascii=False) if variables else ""


def completion_prompts(body: CompletionRequest) -> tuple[Prompt, ...]:
    """Return the prompts of a completion body."""
    match body.prompt:
        case str() as text:
            return (TextPrompt(text),)
        case [int(), *_] as ids:
            return (TokenPrompt(tuple(id_ for id_ in ids if isinstance(id_, int))),)
        case prompts:
            return tuple(map(_prompt, prompts))


def _prompt(prompt: str | int | list[int]) -> Prompt:
    match prompt:
        case str():
            return TextPrompt(prompt)
        case list():
            return TokenPrompt(tuple(prompt))
        case _:
            raise AssertionError("a list of prompts holds texts or lists")


def chat_prompt(
    messages: Sequence[ChatRequestMessage],
    options: ToolOptions,
    variables: Mapping[str, Any] | None,
) -> ChatPrompt:
    """Convert the messages of a request into the prompt of a router request, with the tools of
    `options` and the client's `variables` of the chat template. The role "developer" becomes
    "system". Raises InvalidRequestError for unsupported fields of a message.
    """
    return ChatPrompt(
        tuple(_message(message, number) for number, message in enumerate(messages)),
        tools=options,
        template_variables=template_variables_text(variables),
    )


def _message(message: ChatRequestMessage, number: int) -> ChatMessage:
    where = f"messages[{number}]"
    refuse_unsupported(message.model_extra, MESSAGE, f"{where}.")
    content, calls = message.content, message.tool_calls or ()
    if content is None and not (message.role == "assistant" and calls):
        raise InvalidRequestError(
            f"{where}.content may be null only in a message of the assistant with tool_calls",
            reason="INVALID_REQUEST",
            param=f"{where}.content",
        )
    if not isinstance(content, str):
        content = "".join(part.text for part in content or ())
    return ChatMessage(
        role="system" if message.role == "developer" else message.role,
        content=content,
        tool_calls=tuple(
            ToolCall(call_id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in calls
        ),
        tool_call_id=message.tool_call_id or "",
        name=message.name or "" if message.role == "tool" else "",
        reasoning=message.reasoning_content or message.reasoning or "",
    )


def tool_options(
    functions: Iterable[FunctionDefinition],
    *,
    mode: str | None,
    named: str | None,
    parallel: bool | None,
) -> ToolOptions:
    """Return the tools of a request, and whether they must be called.

    `mode` is none, auto or required; None means auto. `named` is the function that must be called,
    or None. `parallel` is False if an answer may have only one call.
    """
    choice = ToolChoiceMode.AUTO if mode is None else ToolChoiceMode(mode)
    return ToolOptions(
        tools=tools_of(functions),
        choice=choice if named is None else ToolChoiceMode.NAMED,
        named=named or "",
        parallel=parallel is not False,
    )


def tools_of(functions: Iterable[FunctionDefinition]) -> tuple[Tool, ...]:
    """Return the functions of a request as tools."""
    return tuple(
        Tool(
            name=function.name,
            description=function.description or "",
            parameters=""
            if function.parameters is None
            else json.dumps(function.parameters, ensure_ascii=False),
            strict=function.strict,
        )
        for function in functions
    )


def _choices(
    body: GenerationRequest,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int | None,
    default_max_tokens: int | None = None,
    top_logprobs: int | None,
    request_id: RequestId | None,
) -> tuple[GenerateRequest, ...]:
    """Return the router requests of all choices.

    If `max_tokens` is None, the output is limited to `default_max_tokens` or to the remaining
    context, whichever is smaller. If both are None, the router's default applies.
    """
    n = body.n or 1
    count = len(prompts) * n
    if count > MAX_CHOICES:
        raise InvalidRequestError(
            f"{len(prompts)} prompts times n = {n} are {count} answers; at most {MAX_CHOICES} may "
            "be asked for at once",
            reason="TOO_MANY_CHOICES",
            param="n",
        )
    stopping = stopping_options(body, max_tokens, default_max_tokens)
    structure = structured_output_of(body)
    speculation = speculation_options(body)
    return tuple(
        GenerateRequest(
            prompt=prompts[number // n],
            request_id=choice_request_id(request_id, number, count),
            model=body.model,
            sampling=sampling_options(body, number % n),
            stopping=stopping,
            speculation=speculation,
            priority=body.priority or 0,
            top_logprobs=top_logprobs,
            structured_output=structure,
            skip_special_tokens=body.skip_special_tokens,
            return_prompt_token_ids=bool(body.return_token_ids),
        )
        for number in range(count)
    )


def choice_request_id(request_id: RequestId | None, number: int, count: int) -> RequestId | None:
    """Return the request id of choice `number` of `count`, or None if the client chose no id."""
    if request_id is None or count == 1:
        return request_id
    return RequestId(f"{request_id}-{number}")


def sampling_options(body: GenerationOptions, number: int = 0) -> SamplingOptions:
    """Return the sampling options of choice `number` of a prompt. Its seed is the client's seed
    plus `number`.
    """
    temperature = DEFAULT_TEMPERATURE if body.temperature is None else body.temperature
    return SamplingOptions(
        temperature=temperature,
        top_p=body.top_p,
        top_k=None if body.top_k is None else max(0, body.top_k),
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        seed=None if body.seed is None else (body.seed + number) & MASK64,
        rule=None if body.rule is None else Rule(body.rule),
        banned_token_ids=tuple(body.banned_token_ids or ()),
        logit_bias=_bias(body),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        bad_words=tuple(body.bad_words or ()),
    )


def _bias(body: GenerationOptions) -> tuple[tuple[int, float], ...]:
    return tuple((int(id_), amount) for id_, amount in (body.logit_bias or {}).items())


def stopping_options(
    body: GenerationOptions, max_tokens: int | None, default_max_tokens: int | None = None
) -> StoppingOptions:
    """Return the stopping options of a body. `default_max_tokens` applies if `max_tokens` is
    None.
    """
    stop = body.stop or ()
    return StoppingOptions(
        max_tokens=max_tokens,
        default_max_tokens=None if max_tokens is not None else default_max_tokens,
        min_tokens=body.min_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
    )


def speculation_options(body: GenerationOptions) -> SpeculationOptions:
    """Return the speculation settings of a body."""
    return SpeculationOptions(
        enabled=body.speculate,
        method=None if body.drafter is None else DraftMethod(body.drafter),
        draft_tokens=body.draft_tokens,
        draft_top_k=body.draft_top_k,
        look_ahead=body.look_ahead,
        fan_out=body.fan_out,
    )
