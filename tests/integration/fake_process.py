"""A process that serves the fake endpoints over gRPC and prints its address."""

from __future__ import annotations

import asyncio
import sys

from outrider.transport.grpc import GrpcConfig, GrpcServer, verifier_services
from outrider.transport.heartbeat import HeartbeatConfig
from tests.integration.fake_endpoints import FakeVerifier


async def main() -> None:
    interval_s, timeout_s = map(float, sys.argv[1:3])
    heartbeat = HeartbeatConfig(interval_s=interval_s, timeout_s=timeout_s)
    config = GrpcConfig(heartbeat=heartbeat, shm_channels="shm" in sys.argv)
    services = verifier_services(FakeVerifier(), config)
    server = GrpcServer("127.0.0.1:0", services, config=config)
    print(await server.start(), flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
