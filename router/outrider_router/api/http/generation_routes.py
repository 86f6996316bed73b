"""Routes POST /v1/completions and POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.text.tokenizer import Tokenizer
from outrider.wire.inference import GenerateRequest, TextPrompt, TokenPrompt
from outrider_router.admission.policy import no_verifier_error
from outrider_router.api.http.choice_streams import HttpGeneration, make_response
from outrider_router.api.http.dependencies import Caller, Service
from outrider_router.api.http.errors import FIELD_NAMES
from outrider_router.api.http.json_route import JsonRoute
from outrider_router.api.http.logprobs import TokenTextTable
from outrider_router.api.http.middleware import CLIENT_ID, OWN_ID
from outrider_router.api.http.request_models import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    StreamOptions,
)
from outrider_router.api.http.request_translation import chat_requests, completion_requests
from outrider_router.api.http.response_models import (
    GENERATION_ERRORS,
    STREAM_RESPONSE,
    ChatCompletionResponse,
    CompletionResponse,
)
from outrider_router.api.http.response_writers import ChatWriter, CompletionWriter, ResponseWriter
from outrider_router.api.http.structured_outputs import structure_field
from outrider_router.requests.request import served_model_name
from outrider_router.requests.service import RouterService

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])


@router.post(
    "/v1/completions",
    responses={**GENERATION_ERRORS, 200: {"model": CompletionResponse, **STREAM_RESPONSE}},
)
async def completions(
    body: CompletionRequest, request: Request, service: Service, caller: Caller
) -> Response:
    """Complete one or several prompts, given as texts or token ids."""
    request.scope[FIELD_NAMES] = {
        "top_logprobs": "logprobs",
        "structured_outputs": structure_field(body),
    }
    requests = completion_requests(body, request.scope[CLIENT_ID])
    # In a thread, because decoding a megabyte of token ids would block the event loop.
    echoes = await asyncio.to_thread(_echoes, requests, service.tokenizer) if body.echo else ()
    return _answer(CompletionWriter, requests, body, request, service, caller, echoes)


def _echoes(requests: Sequence[GenerateRequest], tokenizer: Tokenizer) -> list[str]:
    """Return the text of each request's prompt. Requests with the same prompt object share its
    text.
    """
    texts: dict[int, str] = {}
    for request in requests:
        if id(request.prompt) not in texts:
            texts[id(request.prompt)] = _echo(request, tokenizer)
    return [texts[id(request.prompt)] for request in requests]


def _echo(request: GenerateRequest, tokenizer: Tokenizer) -> str:
    match request.prompt:
        case TextPrompt(text=text):
            return text
        case TokenPrompt(token_ids=ids):
            return tokenizer.decode(ids, with_special=request.skip_special_tokens is False)
        case _:
            raise AssertionError("a conversation is no completion's")


@router.post(
    "/v1/chat/completions",
    responses={**GENERATION_ERRORS, 200: {"model": ChatCompletionResponse, **STREAM_RESPONSE}},
)
async def chat_completions(
    body: ChatCompletionRequest, request: Request, service: Service, caller: Caller
) -> Response:
    """Generate the next message of a conversation."""
    request.scope[FIELD_NAMES] = {
        "prompt": "messages",
        "max_tokens": "max_tokens"
        if body.max_completion_tokens is None
        else "max_completion_tokens",
        "structured_outputs": structure_field(body),
    }
    requests = chat_requests(body, request.scope[CLIENT_ID])
    return _answer(
        ChatWriter,
        requests,
        body,
        request,
        service,
        caller,
        include_reasoning=body.include_reasoning is not False,
    )


def _answer(
    form: type[ResponseWriter],
    requests: Sequence[GenerateRequest],
    body: GenerationRequest,
    request: Request,
    service: RouterService,
    caller: Caller,
    echoes: Sequence[str] = (),
    *,
    include_reasoning: bool = True,
) -> Response:
    info = service.registry.any_verifier_info()
    if info is None:
        raise no_verifier_error()
    own_id = request.scope[OWN_ID]
    options = body.stream_options or StreamOptions()
    asked = HttpGeneration(
        requests=requests,
        writer=form(
            request_id=own_id,
            model=served_model_name(service.config, info),
            created=int(time.time()),
            n=body.n or 1,
            texts=TokenTextTable(
                service.tokenizer,
                special=body.skip_special_tokens is False,
                by_number=bool(body.return_tokens_as_token_ids),
            ),
            stop_token_ids=body.stop_token_ids or (),
            with_logprobs=requests[0].top_logprobs is not None,
            with_ids=requests[0].return_prompt_token_ids,
            with_usage=bool(options.include_usage),
        ),
        request_id=own_id,
        caller=caller,
        traceparent=request.headers.get("traceparent", ""),
        timeout_s=body.timeout_s,
        prompt_echoes=echoes,
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        include_reasoning=include_reasoning,
    )
    return make_response(service, asked, stream=bool(body.stream))
