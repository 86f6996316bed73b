"""Routes that do not generate: models, health, version, metrics, tokenize and detokenize."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel
from starlette.responses import Response

import outrider
from outrider.errors import InvalidRequestError, NotFoundError
from outrider.spec.tools import ToolOptions
from outrider.text.chat import ChatOptions
from outrider.text.tokenizer import Tokenizer
from outrider.wire.inference import ChatPrompt, ModelInfo, TextPrompt
from outrider_router.admission.policy import no_verifier_error
from outrider_router.api.http.dependencies import Caller, Operator, Service
from outrider_router.api.http.json_route import JsonRoute
from outrider_router.api.http.request_models import (
    MAX_TOKENIZED_CHARS,
    DetokenizeRequest,
    TokenizeRequest,
)
from outrider_router.api.http.request_translation import chat_prompt, tools_of
from outrider_router.api.http.response_models import (
    DetokenizeResponse,
    HealthResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
    VersionResponse,
    error_responses,
)
from outrider_router.api.http.unsupported_fields import (
    TOKENIZED_CHAT,
    UnsupportedFieldError,
    refuse_unsupported,
)
from outrider_router.api.server_status import make_model_list
from outrider_router.requests.request import chat_size, check_ids
from outrider_router.requests.request import tokenize_prompt as tokenize_prompt
from outrider_router.requests.service import RouterService

router = APIRouter(route_class=JsonRoute)
_UNAVAILABLE: dict[int | str, dict[str, Any]] = {
    503: {"model": HealthResponse, "description": "No verifier is healthy, or it drains."}
}


@router.get("/health", responses=_UNAVAILABLE, response_model=HealthResponse, tags=["operations"])
@router.get("/ping", responses=_UNAVAILABLE, response_model=HealthResponse, tags=["operations"])
async def health(service: Service) -> Response:
    """Return whether requests can be served now."""
    told = HealthResponse(status="ok" if service.readiness.is_ready else "unavailable")
    return JSONResponse(told.model_dump(), status_code=200 if service.readiness.is_ready else 503)


@router.get("/version", tags=["operations"])
async def version() -> VersionResponse:
    """Return Outrider's version."""
    return VersionResponse(version=outrider.__version__)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}, "application/openmetrics-text": {}}}},
    tags=["operations"],
)
async def metrics(request: Request, service: Service, _operator: Operator) -> Response:
    """Return the Prometheus metrics, the same as on the metrics port."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(service.metrics.registry), headers={"content-type": content_type})


@router.get("/v1/models", responses=error_responses(), tags=["OpenAI"])
async def list_models(service: Service, request: Request, _caller: Caller) -> ModelList:
    """Return the served models. The list is empty while no verifier is healthy."""
    return ModelList(data=[_model(info, request) for info in make_model_list(service)])


@router.get("/v1/models/{model:path}", responses=error_responses(404), tags=["OpenAI"])
async def get_model(model: str, service: Service, request: Request, _caller: Caller) -> ModelCard:
    """Return one served model."""
    return _model(_served_model(service, model), request)


@router.post(
    "/tokenize",
    response_model=TokenizeResponse,
    responses=error_responses(404, 503),
    tags=["tokens"],
)
async def tokenize(body: TokenizeRequest, service: Service, caller: Caller) -> Response:
    """Return the token ids of a text, or of a conversation in the model's chat template."""
    info = _served_model(service, body.model)
    with service.access_control.limit_call(caller):
        ids = await _ids(body, service)
        return await asyncio.to_thread(
            _tokenized, ids, info, service.tokenizer if body.return_token_strs else None
        )


def _tokenized(ids: tuple[int, ...], info: ModelInfo, names: Tokenizer | None) -> Response:
    """Return the response. Runs in a thread, because serializing half a million ids takes long."""
    told = TokenizeResponse(
        count=len(ids),
        max_model_len=info.max_context_len,
        tokens=list(ids),
        token_strs=None if names is None else [names.token_name(id_) for id_ in ids],
    )
    return _json(told)


async def _ids(body: TokenizeRequest, service: RouterService) -> tuple[int, ...]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError(
            "exactly one of prompt and messages must be given",
            reason="INVALID_REQUEST",
            param="prompt",
        )
    opening = body.add_special_tokens is not False
    if body.prompt == "":
        return service.tokenizer.encode("", add_special_tokens=opening)
    if body.prompt is not None:
        prompt = TextPrompt(body.prompt)
        return await tokenize_prompt(prompt, service.tokenizer, add_special_tokens=opening)
    return await tokenize_prompt(
        _conversation(body),
        service.tokenizer,
        chat_options=_chat_options(body),
        parse_special_tokens=service.config.special_tokens_in_messages,
    )


def _chat_options(body: TokenizeRequest) -> ChatOptions:
    continued = bool(body.continue_final_message)
    wanted = body.add_generation_prompt
    if continued and wanted:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt cannot both be true",
            reason="INVALID_REQUEST",
            param="continue_final_message",
        )
    return ChatOptions(
        add_generation_prompt=not continued if wanted is None else wanted,
        continue_final_message=continued,
    )


def _conversation(body: TokenizeRequest) -> ChatPrompt:
    refuse_unsupported(body.model_extra, TOKENIZED_CHAT)
    if body.add_special_tokens:
        raise UnsupportedFieldError(
            "add_special_tokens is not supported here for messages: the chat template writes their "
            "special tokens; it may be null or False",
            param="add_special_tokens",
        )
    options = ToolOptions(tools=tools_of(tool.function for tool in body.tools or ()))
    prompt = chat_prompt(body.messages or (), options, body.chat_template_kwargs)
    size = chat_size(prompt)
    if size > MAX_TOKENIZED_CHARS:
        raise InvalidRequestError(
            f"messages and tools must have at most {MAX_TOKENIZED_CHARS} characters together, got "
            f"about {size}",
            reason="INVALID_REQUEST",
            param="messages",
        )
    return prompt


@router.post(
    "/detokenize",
    response_model=DetokenizeResponse,
    responses=error_responses(404, 503),
    tags=["tokens"],
)
async def detokenize(body: DetokenizeRequest, service: Service, caller: Caller) -> Response:
    """Return the text of token ids, including special tokens."""
    info = _served_model(service, body.model)
    with service.access_control.limit_call(caller):
        return await asyncio.to_thread(_detokenized, body.tokens, info, service.tokenizer)


def _detokenized(ids: list[int], info: ModelInfo, tokenizer: Tokenizer) -> Response:
    """Return the response. Runs in a thread."""
    check_ids(tuple(ids), info.vocab_size, "tokens")
    return _json(DetokenizeResponse(prompt=tokenizer.decode(ids, with_special=True)))


def _json(told: BaseModel) -> Response:
    return Response(told.model_dump_json(), media_type="application/json")


def _served_model(service: RouterService, name: str | None) -> ModelInfo:
    """Return the served model with this name, or with None the only one. Raises NotFoundError if it
    is not served, and UnavailableError while no verifier is healthy.
    """
    known = make_model_list(service)
    if not known:
        raise no_verifier_error()
    found = next((info for info in known if name in (None, info.name)), None)
    if found is None:
        raise NotFoundError(
            f"model {name!r} is not served here; {known[0].name!r} is",
            reason="NO_MODEL",
            param="model",
        )
    return found


def _model(info: ModelInfo, request: Request) -> ModelCard:
    return ModelCard(
        id=info.name,
        created=request.app.state.created,
        root=info.name,
        max_model_len=info.max_context_len,
    )
