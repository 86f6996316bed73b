"""What gRPC itself says of a call whose peer is gone is a lost connection."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from outrider.errors import ConnectionLostError
from outrider.transport.grpc.dialer import GrpcVerifier
from outrider.transport.grpc.error_status import to_lost_error
from outrider.transport.grpc.options import GrpcConfig


def made_by_grpc(code: grpc.StatusCode, details: str) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(), details=details)


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Socket closed"),
        (grpc.StatusCode.CANCELLED, "CANCELLED"),
        # A write that met a dead peer.
        (grpc.StatusCode.INTERNAL, "Internal error from Core"),
    ],
)
def test_its_own_errors_are_lost_connections(code: grpc.StatusCode, details: str) -> None:
    error = to_lost_error(made_by_grpc(code, details), peer="10.0.0.1:5")
    assert isinstance(error, ConnectionLostError) and "10.0.0.1:5" in error.message


def test_another_code_stays_what_it_is() -> None:
    found = to_lost_error(made_by_grpc(grpc.StatusCode.RESOURCE_EXHAUSTED, "too large"), peer="x:1")
    assert not isinstance(found, ConnectionLostError)


class Refusing:
    """A line on which every call ends as those at a server that stops, answered or not."""

    def unary(self, path: str, request: bytes, timeout_s: float) -> Refusing:
        return self

    def stream(self, path: str, metadata: object) -> Refusing:
        return self

    def __await__(self) -> Generator[None, None, bytes]:
        raise made_by_grpc(grpc.StatusCode.CANCELLED, "CANCELLED")
        yield

    async def initial_metadata(self) -> None:
        raise made_by_grpc(grpc.StatusCode.CANCELLED, "CANCELLED")


@pytest.mark.parametrize("call", ["sessions", "info"])
async def test_a_call_that_ends_before_it_is_answered_is_lost_and_was_not_cancelled(
    call: str,
) -> None:
    line: Any = Refusing()
    verifier = GrpcVerifier(lambda: line, "10.0.0.1:5", GrpcConfig(), lambda: None)
    with pytest.raises(ConnectionLostError, match=r"10\.0\.0\.1:5"):
        await getattr(verifier, call)()
