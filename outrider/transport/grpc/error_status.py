"""Mapping of typed errors to gRPC statuses with google.rpc details, and back."""

from __future__ import annotations

import contextlib
import math
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from outrider.errors import (
    CancelledRequestError,
    ConnectionLostError,
    InternalError,
    OutriderError,
    UnavailableError,
)
from outrider.transport.error_codec import ErrorStatus, from_status, to_status

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

DOMAIN = "outrider"
"""Domain of the google.rpc.ErrorInfo details."""
_DETAILS_KEY = "grpc-status-details-bin"
_KIND_KEY = "type"
_NANOS = 1_000_000_000


def _packed(message: ErrorInfo | RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


async def abort_call(context: Context, error: BaseException) -> NoReturn:
    """End the RPC with the gRPC status and details for `error`."""
    status = to_status(error)
    details = [
        _packed(ErrorInfo(reason=status.reason, domain=DOMAIN, metadata={_KIND_KEY: status.kind}))
    ]
    if status.retry_after_s is not None and math.isfinite(status.retry_after_s):
        nanos = max(0, round(status.retry_after_s * _NANOS))
        delay = Duration(seconds=nanos // _NANOS, nanos=nanos % _NANOS)
        details.append(_packed(RetryInfo(retry_delay=delay)))
    code = getattr(grpc.StatusCode, status.code)
    message = Status(code=code.value[0], message=status.message, details=details)
    await context.abort_with_status(rpc_status.to_status(message))
    raise AssertionError("abort_with_status always raises")


def _details(error: grpc.aio.AioRpcError) -> tuple[ErrorInfo, float | None]:
    """Return Outrider's ErrorInfo, which is empty if the error has none, and the retry delay in
    seconds, which is None if the error has none. The details come from the peer and are not
    trusted."""
    found, retry_after_s = ErrorInfo(), None
    for key, value in error.trailing_metadata() or ():
        if key != _DETAILS_KEY or not isinstance(value, bytes):
            continue
        with contextlib.suppress(DecodeError):
            for detail in Status.FromString(value).details:
                info, retry = ErrorInfo(), RetryInfo()
                if detail.Unpack(info):
                    found = info if info.domain == DOMAIN else found
                elif detail.Unpack(retry):
                    retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / _NANOS
    return found, retry_after_s


def to_typed_error(error: grpc.aio.AioRpcError, *, peer: str = "") -> OutriderError:
    """Return the typed error of a failed RPC. If gRPC itself raised the error, its message begins
    with `peer`."""
    info, retry_after_s = _details(error)
    kind, reason = info.metadata.get(_KIND_KEY, ""), info.reason
    message = error.details() or error.code().name
    return from_status(
        ErrorStatus(
            code=error.code().name,
            kind=kind,
            message=message if reason or not peer else f"{peer}: {message}",
            reason=reason or "TRANSPORT",
            retry_after_s=retry_after_s,
        )
    )


def to_lost_error(error: grpc.aio.AioRpcError, *, peer: str) -> OutriderError:
    """Return the typed error of a failed RPC, or a ConnectionLostError if gRPC itself reports that
    the peer is lost. The caller must not have cancelled the RPC.

    gRPC reports a lost peer by one of three statuses: UNAVAILABLE; CANCELLED, because a server that
    ends cancels its calls; or INTERNAL, after a write to a dead peer.
    """
    typed = to_typed_error(error, peer=peer)
    lost = isinstance(typed, CancelledRequestError | InternalError)
    lost = lost or type(typed) is UnavailableError
    if lost and typed.reason == "TRANSPORT":
        return ConnectionLostError(typed.message, reason="PEER_LOST")
    return typed
