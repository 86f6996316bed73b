"""Typed errors in OpenAI's form: every class of `outrider.errors` has its status here, once."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from outrider import errors
from outrider.errors import OutriderError
from outrider.transport.status import MAX_MESSAGE_CHARS, to_status
from outrider_router.http.unsupported import UnsupportedFieldError

INVALID, SERVER = "invalid_request_error", "server_error"

STATUSES: Final[dict[type[OutriderError], tuple[int, str]]] = {
    errors.InvalidRequestError: (400, INVALID),
    errors.UnauthenticatedError: (401, "authentication_error"),
    errors.PermissionDeniedError: (403, "permission_error"),
    errors.NotFoundError: (404, "not_found_error"),
    errors.AlreadyExistsError: (409, "conflict_error"),
    errors.AbortedError: (409, "conflict_error"),
    errors.ResourceExhaustedError: (429, "rate_limit_error"),
    # What nginx says of a client that has left; here it is a request that was aborted by its id.
    errors.CancelledRequestError: (499, "cancelled_error"),
    errors.FailedPreconditionError: (500, SERVER),
    errors.InternalError: (500, SERVER),
    errors.UnavailableError: (503, "service_unavailable_error"),
    errors.DeadlineExceededError: (504, "timeout_error"),
    OutriderError: (500, SERVER),
}
"""HTTP status and OpenAI's `type`, by class; a class that is not here has its base's."""

CODES: Final = {
    "CONTEXT_EXCEEDED": "context_length_exceeded",
    "PROMPT_TOO_LONG": "context_length_exceeded",
    "NO_MODEL": "model_not_found",
    "NO_KEY": "missing_api_key",
    "WRONG_KEY": "invalid_api_key",
    "KEY_RATE_LIMITED": "rate_limit_exceeded",
    "RATE_LIMITED": "rate_limit_exceeded",
}
"""Reasons that OpenAI's clients know by another `code`; all others are in lower case."""

_TYPES: Final = {400: INVALID, 404: "not_found_error", 429: "rate_limit_error"}
_HTTP_CODES: Final = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
_MOST_QUOTED = 100
"""Characters of a header."""
_MOST_TOLD = 3
"""Mistakes of a body that one answer tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpError:
    """An error as a client hears it."""

    status: int
    type: str
    message: str
    code: str
    param: str | None = None
    retry_after_s: float | None = None
    headers_added: Mapping[str, str] = field(default_factory=dict)
    """Headers beside those that follow from the rest."""

    @property
    def body(self) -> str:
        """JSON in OpenAI's form."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": error})

    @property
    def headers(self) -> dict[str, str]:
        """`Retry-After` in whole seconds, and in milliseconds as OpenAI's clients read it; how to
        show a key, where none was shown."""
        if self.status == 401:
            return {"www-authenticate": 'Bearer realm="outrider", Basic realm="outrider"'}
        hint = self.retry_after_s
        if hint is None or not math.isfinite(hint):
            return dict(self.headers_added)
        hint = max(0.0, hint)
        return {"retry-after": str(math.ceil(hint)), "retry-after-ms": str(math.ceil(hint * 1e3))}

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        """The whole answer."""
        return Response(
            self.body,
            status_code=self.status,
            headers={**(headers or {}), **self.headers},
            media_type="application/json",
        )


def describe(error: BaseException) -> HttpError:
    """What a client is told of an error; anything outside the tree is logged and stays opaque."""
    kind = next((kind for kind in type(error).__mro__ if kind in STATUSES), OutriderError)
    status, type_ = STATUSES[kind]
    told = to_status(error)
    return HttpError(
        status=status,
        type=type_,
        message=told.message,
        code=CODES.get(told.reason, told.reason.lower()),
        param=error.param if isinstance(error, UnsupportedFieldError) else None,
        retry_after_s=told.retry_after_s,
    )


def describe_mistakes(mistakes: Sequence[Mapping[str, Any]]) -> HttpError:
    """What is wrong with a body, as pydantic tells it."""
    told = [f"{_where(mistake)}: {mistake['msg']}" for mistake in mistakes[:_MOST_TOLD]]
    if len(mistakes) > _MOST_TOLD:
        told.append(f"and {len(mistakes) - _MOST_TOLD} more")
    path = mistakes[0]["loc"][1:2] if mistakes else ()
    return HttpError(
        status=400,
        type=INVALID,
        message="; ".join(told)[:MAX_MESSAGE_CHARS],
        code="invalid_request",
        param=str(path[0]) if path else None,
    )


def _where(mistake: Mapping[str, Any]) -> str:
    return ".".join(map(str, mistake["loc"][1:])) or "body"


async def on_typed(_request: Request, error: Exception) -> Response:
    """Handler of everything that the router raises before it has begun to answer."""
    return describe(error).response()


async def on_mistakes(request: Request, error: Exception) -> Response:
    """Handler of bodies that no request can be read from."""
    assert isinstance(error, RequestValidationError)
    said = request.headers.get("content-type", "")
    if not _is_json(said):
        # The framework took the body for bytes, and found that these are no object.
        return HttpError(
            status=415,
            type=INVALID,
            message=f"Content-Type must be application/json, got {said[:_MOST_QUOTED]!r}",
            code="unsupported_media_type",
        ).response()
    return describe_mistakes(error.errors()).response()


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )


async def on_http(_request: Request, error: Exception) -> Response:
    """Handler of what the framework refuses: unknown paths, methods, too large bodies."""
    assert isinstance(error, HTTPException)
    status = error.status_code
    described = HttpError(
        status=status,
        type=_TYPES.get(status, INVALID if status < 500 else SERVER),
        message=str(error.detail),
        code=_HTTP_CODES.get(status, "invalid_request"),
    )
    return described.response(error.headers)
