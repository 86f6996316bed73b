"""A process that dials a verifier over gRPC, says hello and stays; it is there to be killed."""

from __future__ import annotations

import asyncio
import sys

from outrider.transport.grpc import GrpcConfig, GrpcDialer
from outrider.transport.heartbeat import HeartbeatConfig
from tests.integration.fake_endpoints import hello


async def main() -> None:
    address, interval_s, timeout_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    config = GrpcConfig(heartbeat=HeartbeatConfig(interval_s=interval_s, timeout_s=timeout_s))
    connection = await GrpcDialer(config).exchange(address)
    await connection.send(hello())
    await connection.receive()
    print("attached", flush=True)
    await connection.receive()


if __name__ == "__main__":
    asyncio.run(main())
