"""Options of channels and servers: gRPC knows them, and they agree with each other."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
from grpc._cython import cygrpc

from outrider.client.rpcs import client_options
from outrider.transport.grpc.options import GrpcConfig, channel_options, server_options

CONFIGS = [GrpcConfig(), GrpcConfig(keepalive_time_s=1.0)]


@pytest.mark.parametrize("config", CONFIGS)
def test_grpc_knows_every_option(config: GrpcConfig) -> None:
    """It ignores names that it does not know without a word."""
    names = {name for name, _ in (*channel_options(config), *server_options(config))}
    names |= {name for name, _ in client_options()}
    with (
        Path(cygrpc.__file__).open("rb") as library,
        mmap.mmap(library.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        unknown = {name for name in names if content.find(name.encode() + b"\0") < 0}
    assert names and not unknown


@pytest.mark.parametrize("config", CONFIGS)
def test_no_server_takes_a_clients_keepalive_for_a_flood(config: GrpcConfig) -> None:
    client, server = dict(channel_options(config)), dict(server_options(config))
    least_ms = server["grpc.http2.min_ping_interval_without_data_ms"]
    assert least_ms < client["grpc.keepalive_time_ms"]
    assert least_ms < dict(client_options())["grpc.keepalive_time_ms"]
    # With no call under way, they would be allowed every two hours.
    assert server["grpc.keepalive_permit_without_calls"] == 1


def test_a_port_is_shared_by_servers_that_are_told_to_alone() -> None:
    shared = [dict(server_options(GrpcConfig(share_port=share))) for share in (False, True)]
    assert [options["grpc.so_reuseport"] for options in shared] == [0, 1]
