"""Maps typed errors to OpenAI error responses: one HTTP status per class of `outrider.errors`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from outrider import errors
from outrider.errors import OutriderError
from outrider.transport.error_codec import to_status
from outrider_router.api.http.validation_errors import describe_validation_errors

INVALID, SERVER = "invalid_request_error", "server_error"

STATUSES: Final[dict[type[OutriderError], tuple[int, str]]] = {
    errors.InvalidRequestError: (400, INVALID),
    errors.UnauthenticatedError: (401, "authentication_error"),
    errors.PermissionDeniedError: (403, "permission_error"),
    errors.NotFoundError: (404, "not_found_error"),
    errors.AlreadyExistsError: (409, "conflict_error"),
    errors.AbortedError: (409, "conflict_error"),
    errors.ResourceExhaustedError: (429, "rate_limit_error"),
    # nginx's status for a disconnected client; here the request was aborted by its id.
    errors.CancelledRequestError: (499, "cancelled_error"),
    errors.FailedPreconditionError: (500, SERVER),
    errors.InternalError: (500, SERVER),
    errors.UnavailableError: (503, "service_unavailable_error"),
    errors.DeadlineExceededError: (504, "timeout_error"),
    OutriderError: (500, SERVER),
}
"""Maps an error class to the HTTP status and to OpenAI's error `type`. Classes that are not listed
use the entry of their base class.
"""

CODES: Final = {
    "CONTEXT_EXCEEDED": "context_length_exceeded",
    "PROMPT_TOO_LONG": "context_length_exceeded",
    "NO_MODEL": "model_not_found",
    "NO_KEY": "missing_api_key",
    "WRONG_KEY": "invalid_api_key",
    "KEY_RATE_LIMITED": "rate_limit_exceeded",
    "RATE_LIMITED": "rate_limit_exceeded",
}
"""Maps the reason of an error to a `code` that OpenAI's clients know. Other reasons are sent in
lower case.
"""

_TYPES: Final = {400: INVALID, 404: "not_found_error", 429: "rate_limit_error"}
_HTTP_CODES: Final = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
UNPUBLISHED_PATHS: Final = ("/openapi.json", "/", "/status.json")
"""Paths of GET routes that the OpenAPI description does not contain."""
ASKED: Final = "outrider.asked"
"""Key in a request's ASGI scope. Its value is the method and the path as the client sent them."""
MAX_QUOTED_CHARS: Final = 100
"""Largest number of characters of a path or header that an error message quotes."""
FIELD_NAMES: Final = "outrider.field_names"
"""Key in a request's ASGI scope. Its value maps the `param` of a typed error to the name of the
field in the HTTP body.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpError:
    """An error as an HTTP client receives it."""

    status: int
    type: str
    message: str
    code: str
    param: str | None = None
    retry_after_s: float | None = None
    headers_added: Mapping[str, str] = field(default_factory=dict)
    """Further response headers. They are sent only if the status is not 401 and the error has no
    retry hint.
    """

    @property
    def body(self) -> str:
        """Body in OpenAI's JSON format."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": error})

    @property
    def headers(self) -> dict[str, str]:
        """Response headers of the error. Status 401 has the authentication schemes. An error with a
        retry hint has `Retry-After` in seconds and `retry-after-ms` in milliseconds. All other
        errors have `headers_added`.
        """
        if self.status == 401:
            return {"www-authenticate": 'Bearer realm="outrider", Basic realm="outrider"'}
        hint = self.retry_after_s
        if hint is None or not math.isfinite(hint):
            return dict(self.headers_added)
        hint = max(0.0, hint)
        return {"retry-after": str(math.ceil(hint)), "retry-after-ms": str(math.ceil(hint * 1e3))}

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        """Return the complete response, with `headers` in addition to the error's headers."""
        return Response(
            self.body,
            status_code=self.status,
            headers={**(headers or {}), **self.headers},
            media_type="application/json",
        )


def describe_error(error: BaseException) -> HttpError:
    """Return the HTTP error for an exception. Exceptions outside `outrider.errors` are logged, and
    the client gets no details.
    """
    kind = next((kind for kind in type(error).__mro__ if kind in STATUSES), OutriderError)
    status, type_ = STATUSES[kind]
    told = to_status(error)
    return HttpError(
        status=status,
        type=type_,
        message=told.message,
        code=CODES.get(told.reason, told.reason.lower()),
        param=getattr(error, "param", "") or None,
        retry_after_s=told.retry_after_s,
    )


async def handle_typed_error(request: Request, error: Exception) -> Response:
    """Return the response for an error that was raised before the response has begun."""
    described = describe_error(error)
    names: Mapping[str, str] = request.scope.get(FIELD_NAMES, {})
    param = described.param and names.get(described.param, described.param)
    return replace(described, param=param).response()


async def handle_validation_error(request: Request, error: Exception) -> Response:
    """Return the response for a body that cannot be parsed into a request."""
    assert isinstance(error, RequestValidationError)
    said = request.headers.get("content-type", "")
    is_body = any(mistake["loc"][0] == "body" for mistake in error.errors())
    if is_body and not _is_json(said):
        # The framework did not parse the body, because its type is not JSON.
        return HttpError(
            status=415,
            type=INVALID,
            message=f"Content-Type must be application/json, got {said[:MAX_QUOTED_CHARS]!r}",
            code="unsupported_media_type",
        ).response()
    return describe_error(describe_validation_errors(error.errors(), error.body)).response()


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )


class BodyError(HTTPException):
    """A body that cannot be read (400). It has this base, because the framework replaces all other
    exceptions that are raised while it reads a body."""

    def __init__(self, message: str, param: str = "") -> None:
        """Create the error. `param`: field of the body that is at fault; "" if none is known."""
        super().__init__(400, message)
        self.param = param


async def handle_http_error(request: Request, error: Exception) -> Response:
    """Return the response for a request that the framework refuses because of its path, method or
    size.
    """
    assert isinstance(error, HTTPException)
    status = error.status_code
    described = HttpError(
        status=status,
        type=_TYPES.get(status, INVALID if status < 500 else SERVER),
        message=_unrouted(request, error) or str(error.detail),
        code=_HTTP_CODES.get(status, "invalid_request"),
        param=(error.param or None) if isinstance(error, BodyError) else None,
    )
    headers = dict(error.headers or {})
    if "Allow" in headers:
        headers["Allow"] = _allowed(error)
    return described.response(headers)


def _allowed(error: HTTPException) -> str:
    """Return the methods that a path supports, in alphabetical order. HEAD is supported where GET
    is.
    """
    methods = set((error.headers or {}).get("Allow", "").split(", "))
    return ", ".join(sorted(methods | {"HEAD"} if "GET" in methods else methods))


def _unrouted(request: Request, error: HTTPException) -> str:
    """Return the error message for an unknown path or method, or "" for any other error."""
    asked = request.scope[ASKED]
    if error.status_code == 405:
        return f"{asked} is not served here; the path takes {_allowed(error)}"
    if error.status_code == 404:
        return f"{asked} is not served here; these are: {', '.join(_offered(request))}"
    return ""


def _offered(request: Request) -> list[str]:
    """Return the methods and paths that are served: those of the published API, then the
    unpublished ones.
    """
    prefix: str = request.app.state.service.config.http_options.root_path
    paths: dict[str, dict[str, object]] = request.app.openapi()["paths"]
    published = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    offered = [*published, *(("GET", path) for path in UNPUBLISHED_PATHS)]
    return [f"{method} {prefix}{path}" for method, path in offered]
