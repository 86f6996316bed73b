"""Clients that belong to a tenant, and wait as they are told."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from outrider_router.base.tenants import TenantLimits, TenantSource
from outrider_router.config import OverloadConfig

from outrider.client import AsyncClient, Client, RetryPolicy
from tests.fakes.router import grpc_router, running_router, sample
from tests.fakes.verifier import FakeVerifier

PATIENT = RetryPolicy(max_attempts=5, first_delay_s=0.01)
BLUE = (("x-outrider-tenant", "blue"),)


async def test_both_clients_say_whose_they_are_and_come_back_when_they_are_told(
    tmp_path: Path,
) -> None:
    settings = {
        "overload": OverloadConfig(tenant_from=TenantSource.METADATA),
        "tenants": {"blue": TenantLimits(requests_per_s=1.0, requests_burst=1.0)},
    }
    async with (
        running_router(tmp_path, {"v": FakeVerifier()}, **settings) as router,
        grpc_router(router) as address,
        AsyncClient(address, retry=PATIENT, metadata=BLUE) as client,
    ):

        def use() -> None:
            with Client(address, retry=PATIENT, metadata=BLUE) as same:
                assert same.generate("abc", max_tokens=3).text == "abc"
                assert same.stream("abc", max_tokens=3).result().text == "abc"

        began = time.monotonic()
        assert (await client.generate("abc", max_tokens=3)).text == "abc"
        assert (await client.stream("abc", max_tokens=3).result()).text == "abc"
        await asyncio.to_thread(use)
        assert time.monotonic() - began >= 3.0
        assert sample(router, "outrider_tenant_requests_total", tenant="blue") == 4
        assert sample(router, "outrider_refusals_total", reason="RATE_LIMITED") >= 3
