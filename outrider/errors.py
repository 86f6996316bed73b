"""Error tree: every error that can reach a client or a peer derives from `OutriderError`.

OutriderError
+-- InvalidRequestError        invalid input; the message says what is wrong and what is allowed
|   +-- InvalidMessageError    a peer's message failed validation; only that message is dropped
+-- UnauthenticatedError       missing or unknown API key
+-- PermissionDeniedError      the caller is known but not permitted to do this
+-- NotFoundError              missing session, request, model, peer, file, package or process
+-- AlreadyExistsError         id already in use
+-- ResourceExhaustedError     queue, KV budget or rate limit reached; carries `retry_after_s`
+-- FailedPreconditionError    peers that do not fit together, or an unsuitable environment
+-- UnavailableError           peer lost or not ready; safe to retry if nothing was emitted
|   +-- ConnectionLostError    an exchange connection ended or went silent
+-- DeadlineExceededError      the deadline passed before the request ended
+-- CancelledRequestError      cancelled by its client, by an `Abort` call, or with its group
+-- AbortedError               another call has taken over the stream
+-- InternalError              a bug in Outrider, or a model whose output cannot be used
"""

from __future__ import annotations

from typing import Self

MODEL_OUTPUT_INVALID = "MODEL_OUTPUT_INVALID"
"""Reason of an InternalError: the model gave no finite logit for a token."""


class OutriderError(Exception):
    """Base of all errors. `reason` is a stable UPPER_SNAKE_CASE identifier for machines."""

    code = "UNKNOWN"
    """Name of the gRPC status code that this error maps to."""

    def __init__(
        self,
        message: str,
        *,
        reason: str = "UNSPECIFIED",
        retry_after_s: float | None = None,
        param: str = "",
    ) -> None:
        """Create an error.

        `message` is the text for people, `reason` the identifier for machines. `retry_after_s`
        suggests after how many seconds to retry. `param` names the invalid field of the request; it
        is "" if there is none.
        """
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.param = param

    def copy(self) -> Self:
        """Return a copy of this error, for a second raise: one object raised twice would collect
        both tracebacks."""
        return type(self)(
            self.message,
            reason=self.reason,
            retry_after_s=self.retry_after_s,
            param=self.param,
        )


class InvalidRequestError(OutriderError):
    """The input is invalid; the message says what is wrong and what is allowed."""

    code = "INVALID_ARGUMENT"


class InvalidMessageError(InvalidRequestError):
    """A peer's message failed validation. Only this message is dropped."""


class UnauthenticatedError(OutriderError):
    """The caller has sent no API key, or an unknown one."""

    code = "UNAUTHENTICATED"


class PermissionDeniedError(OutriderError):
    """The caller is authenticated, by certificate or API key, but not allowed to do this."""

    code = "PERMISSION_DENIED"


class NotFoundError(OutriderError):
    """A session, request, model, peer, file, package or process does not exist, or the model hub
    does not give access to a model."""

    code = "NOT_FOUND"


class AlreadyExistsError(OutriderError):
    """The id is already in use."""

    code = "ALREADY_EXISTS"


class ResourceExhaustedError(OutriderError):
    """A queue, KV budget, rate limit or other limit was reached. `retry_after_s` suggests after how
    many seconds to retry."""

    code = "RESOURCE_EXHAUSTED"


class FailedPreconditionError(OutriderError):
    """Peers do not fit together (protocol, vocabulary, tokenizer, features), or the environment is
    unsuitable (port in use, no GPU, invalid certificate, missing package)."""

    code = "FAILED_PRECONDITION"


class UnavailableError(OutriderError):
    """The peer cannot be reached or is not ready."""

    code = "UNAVAILABLE"


class ConnectionLostError(UnavailableError):
    """An exchange connection ended, or was silent for longer than its heartbeat allows."""


class DeadlineExceededError(OutriderError):
    """The deadline passed before the request ended."""

    code = "DEADLINE_EXCEEDED"


class CancelledRequestError(OutriderError):
    """The request was cancelled by its client, by an `Abort` call or with another request of its
    group, or the client of a resumable request did not come back in time."""

    code = "CANCELLED"


class AbortedError(OutriderError):
    """Another call has taken over the stream of this call and continues it."""

    code = "ABORTED"


class InternalError(OutriderError):
    """A bug in Outrider, or a model whose output cannot be used (MODEL_OUTPUT_INVALID)."""

    code = "INTERNAL"
