"""What gRPC itself says of a stream whose peer is gone is a lost connection."""

from __future__ import annotations

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from outrider.errors import ConnectionLostError
from outrider.transport.grpc.status import lost_stream_error


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
    error = lost_stream_error(made_by_grpc(code, details), peer="10.0.0.1:5")
    assert isinstance(error, ConnectionLostError) and "10.0.0.1:5" in error.message


def test_another_code_stays_what_it_is() -> None:
    found = lost_stream_error(
        made_by_grpc(grpc.StatusCode.RESOURCE_EXHAUSTED, "too large"), peer="x:1"
    )
    assert not isinstance(found, ConnectionLostError)
