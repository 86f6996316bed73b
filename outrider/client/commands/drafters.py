"""`outrider drafters`: adds drafters to a running router and removes them."""

from __future__ import annotations

import argparse
import sys

import grpc

from outrider.client.connection import RouterConnector, call_metadata
from outrider.client.flags import add_connecting_arguments, tls_of
from outrider.client.rpcs import INFO_TIMEOUT_S, to_typed_error
from outrider.transport.tls import TlsConfig
from outrider.wire.pool_codec import (
    RemovedDrafter,
    add_drafter_to_pb,
    remove_drafter_to_pb,
    removed_from_pb,
)
from outrider.wire.v1 import pool_pb2 as pb

REMOVE_TIMEOUT_S = 30.0
"""Maximum duration of a removal, in seconds. A removal waits until other drafters have taken over
the sessions."""
_SERVICE = "/outrider.wire.v1.PoolService/"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to a parser."""
    parser.add_argument(
        "action", choices=("add", "remove"), help="Whether to add or to remove the drafter."
    )
    parser.add_argument("address", metavar="HOST:PORT", help="Address of the drafter.")
    parser.add_argument(
        "--pool",
        metavar="HOST:PORT",
        required=True,
        help="Address that the router's --pool-listen names.",
    )
    add_connecting_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status. Raises OutriderError."""
    if args.action == "add":
        add_drafter(args.pool, args.address, tls_of(args))
        sys.stdout.write(
            f"The router connects to {args.address}; `outrider status` shows when it serves.\n"
        )
        return 0
    removed = remove_drafter(args.pool, args.address, tls_of(args))
    sys.stdout.write(
        f"{args.address} is removed and may be stopped: {removed.num_moved} sessions moved to "
        f"other drafters, {removed.num_remaining} decode without speculation.\n"
    )
    return 0


def add_drafter(pool: str, address: str, tls: TlsConfig | None = None) -> None:
    """Tell a router to connect to the drafter at `address`. `pool` is the address of the router's
    PoolService. Raises OutriderError."""
    request = add_drafter_to_pb(address).SerializeToString()
    _call(pool, "AddDrafter", request, INFO_TIMEOUT_S, tls)


def remove_drafter(pool: str, address: str, tls: TlsConfig | None = None) -> RemovedDrafter:
    """Remove the drafter at `address` from a router, which first moves the drafter's sessions to
    other drafters. `pool` is the address of the router's PoolService.

    Raises OutriderError.
    """
    request = remove_drafter_to_pb(address).SerializeToString()
    answer = _call(pool, "RemoveDrafter", request, REMOVE_TIMEOUT_S, tls)
    return removed_from_pb(pb.RemoveDrafterResponse.FromString(answer))


def _call(pool: str, method: str, request: bytes, timeout_s: float, tls: TlsConfig | None) -> bytes:
    metadata = call_metadata(())
    with RouterConnector(pool, tls).channel() as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_SERVICE + method)
        try:
            return call(request, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            raise to_typed_error(error, pool) from error
