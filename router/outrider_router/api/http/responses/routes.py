"""Routes of the Responses API: create, retrieve, delete, cancel and list input items."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from outrider.errors import InvalidRequestError
from outrider_router.api.http.dependencies import Caller
from outrider_router.api.http.event_streams import ConnectedResponse
from outrider_router.api.http.json_route import JsonRoute
from outrider_router.api.http.middleware import CLIENT_ID, OWN_ID
from outrider_router.api.http.response_models import GENERATION_ERRORS, error_responses
from outrider_router.api.http.response_writers import json_quote
from outrider_router.api.http.responses.request_models import CreateResponseRequest
from outrider_router.api.http.responses.response_models import (
    DeletedResponse,
    ItemList,
    ResponseBody,
)
from outrider_router.api.http.responses.service import RequestOrigin, ResponseService
from outrider_router.api.http.responses.store import StoredResponse
from outrider_router.api.http.unsupported_fields import UnsupportedFieldError

DEFAULT_PAGE_ITEMS = 20
MAX_PAGE_ITEMS = 100
"""Default and largest number of input items of one page."""
_JSON = "application/json"
_STORED_ERRORS = error_responses(404)
_STREAM: dict[str, Any] = {
    "description": "The response. With `stream`, its typed server-sent events.",
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])


def get_responses(request: Request) -> ResponseService:
    """Return the service that makes and stores responses."""
    responses: ResponseService = request.app.state.responses
    return responses


Responses = Annotated[ResponseService, Depends(get_responses)]


@router.post(
    "/v1/responses", responses={**GENERATION_ERRORS, 200: {"model": ResponseBody, **_STREAM}}
)
async def create_response(
    body: CreateResponseRequest, request: Request, responses: Responses, caller: Caller
) -> Response:
    """Generate the next items of a conversation."""
    origin = RequestOrigin(
        caller=caller,
        request_id=request.scope[OWN_ID],
        client_id=request.scope[CLIENT_ID],
        traceparent=request.headers.get("traceparent", ""),
    )
    pending = responses.prepare(body, origin)
    if body.background:
        return _stored(responses.start_background(pending))
    serve = responses.send_stream if body.stream else responses.send_whole
    return ConnectedResponse(partial(serve, pending))


@router.get(
    "/v1/responses/{response_id}", responses={**_STORED_ERRORS, 200: {"model": ResponseBody}}
)
async def retrieve_response(
    response_id: str, responses: Responses, caller: Caller, stream: bool | None = None
) -> Response:
    """Return a stored response, or the state of one in the background."""
    if stream:
        raise UnsupportedFieldError(
            "stream is not supported here for stored responses; retrieve the response until it has "
            "ended",
            param="stream",
        )
    return _stored(responses.get_response(caller, response_id))


@router.delete(
    "/v1/responses/{response_id}", responses={**_STORED_ERRORS, 200: {"model": DeletedResponse}}
)
async def delete_response(response_id: str, responses: Responses, caller: Caller) -> Response:
    """Delete a stored response. One in the background is cancelled."""
    await responses.delete_response(caller, response_id)
    deleted = {"id": response_id, "object": "response", "deleted": True}
    return Response(json_quote(deleted), media_type=_JSON)


@router.post(
    "/v1/responses/{response_id}/cancel",
    responses={**_STORED_ERRORS, 200: {"model": ResponseBody}},
)
async def cancel_response(response_id: str, responses: Responses, caller: Caller) -> Response:
    """Cancel a response in the background. One that has ended is returned unchanged."""
    return _stored(await responses.cancel_response(caller, response_id))


@router.get(
    "/v1/responses/{response_id}/input_items",
    responses={**_STORED_ERRORS, 200: {"model": ItemList}},
)
async def list_input_items(
    response_id: str,
    responses: Responses,
    caller: Caller,
    after: str | None = None,
    limit: Annotated[int, Ge(1), Le(MAX_PAGE_ITEMS)] = DEFAULT_PAGE_ITEMS,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """Return the items that a response answers, with those of the responses that it continues."""
    items = responses.get_response(caller, response_id).input_items
    if order == "desc":
        items = items[::-1]
    start = 0
    if after is not None:
        found = next((n for n, item in enumerate(items) if item["id"] == after), None)
        if found is None:
            raise InvalidRequestError(
                f"after must be the id of an input item, got {after[:64]!r}",
                reason="INVALID_REQUEST",
                param="after",
            )
        start = found + 1
    page = items[start : start + limit]
    body = {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(items),
    }
    return Response(json_quote(body), media_type=_JSON)


def _stored(response: StoredResponse) -> Response:
    return Response(response.body, media_type=_JSON)
