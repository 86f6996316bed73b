"""Serialisation of errors: every transport delivers an error with its type and details."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from outrider import errors
from outrider.errors import InternalError, OutriderError

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 2048
"""Largest number of characters of an error message. Longer messages are truncated, because gRPC
sends them in HTTP/2 headers, and peers limit the size of headers.
"""

_TYPES: dict[str, type[OutriderError]] = {
    kind.__name__: kind
    for kind in (
        errors.InvalidRequestError,
        errors.InvalidMessageError,
        errors.UnauthenticatedError,
        errors.PermissionDeniedError,
        errors.NotFoundError,
        errors.AlreadyExistsError,
        errors.ResourceExhaustedError,
        errors.FailedPreconditionError,
        errors.UnavailableError,
        errors.ConnectionLostError,
        errors.DeadlineExceededError,
        errors.CancelledRequestError,
        errors.AbortedError,
        errors.InternalError,
    )
}
_BY_CODE: dict[str, type[OutriderError]] = {
    "INVALID_ARGUMENT": errors.InvalidRequestError,
    "OUT_OF_RANGE": errors.InvalidRequestError,
    "UNAUTHENTICATED": errors.UnauthenticatedError,
    "PERMISSION_DENIED": errors.PermissionDeniedError,
    "NOT_FOUND": errors.NotFoundError,
    "ALREADY_EXISTS": errors.AlreadyExistsError,
    "RESOURCE_EXHAUSTED": errors.ResourceExhaustedError,
    "FAILED_PRECONDITION": errors.FailedPreconditionError,
    "UNIMPLEMENTED": errors.FailedPreconditionError,
    "UNAVAILABLE": errors.UnavailableError,
    "DEADLINE_EXCEEDED": errors.DeadlineExceededError,
    "CANCELLED": errors.CancelledRequestError,
    "ABORTED": errors.AbortedError,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorStatus:
    """Serializable form of an error of `outrider.errors`."""

    code: str
    """Name of the gRPC status code."""
    kind: str
    """Class name of the error. If it is "" or unknown, `code` determines the class."""
    message: str
    reason: str = "UNSPECIFIED"
    retry_after_s: float | None = None


def to_status(error: BaseException) -> ErrorStatus:
    """Return the `ErrorStatus` of an error. An error whose class is not in `outrider.errors` is a
    bug: it is logged here, and its status is that of an InternalError without details.
    """
    if isinstance(error, OutriderError):
        return ErrorStatus(
            code=error.code if error.code in _BY_CODE else "INTERNAL",
            kind=type(error).__name__,
            message=error.message[:MAX_MESSAGE_CHARS],
            reason=error.reason,
            retry_after_s=error.retry_after_s,
        )
    logger.error("unexpected %s", type(error).__name__, exc_info=error)
    return ErrorStatus(
        code="INTERNAL", kind="InternalError", message="internal error", reason="INTERNAL"
    )


def from_status(status: ErrorStatus) -> OutriderError:
    """Return the typed error that a status describes."""
    kind = _TYPES.get(status.kind) or _BY_CODE.get(status.code) or InternalError
    return kind(status.message, reason=status.reason, retry_after_s=status.retry_after_s)


def to_typed_error(error: Exception) -> OutriderError:
    """Return the error as a peer in another process would receive it."""
    return from_status(to_status(error))
