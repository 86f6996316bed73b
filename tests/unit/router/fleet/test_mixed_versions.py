"""Peers of other versions: refused once with a reason, or served if the protocol is the same."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from outrider_router.api.server_status import make_server_info

from outrider.wire.messages import PROTOCOL_VERSION
from tests.fakes.drafter import FakeDrafter
from tests.fakes.router import running_router
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.helpers import collect, pair, text_request
from tests.waiting import until


async def test_a_peer_of_another_protocol_is_refused_and_logged_once_and_requests_go_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = FakeVerifier(), FakeVerifier()
    second.change_info(verifier_id="v1", protocol_version=PROTOCOL_VERSION + 1, version="9.1.0")
    verifiers = {"a": first, "b": second}
    with caplog.at_level(logging.INFO):
        async with running_router(tmp_path, verifiers, wait=False) as router:
            await until(lambda: router.registry.any_verifier_info() is not None)
            await asyncio.sleep(0.3)
            assert (await collect(router, text_request()))[-1]
            assert len(first.specs) == 1 and not second.specs
            (_, refused) = make_server_info(router).verifiers
            assert not refused.healthy and "9.1.0" in refused.problem
            # The operator replaces it: the next poll finds a peer that fits.
            second.change_info(protocol_version=PROTOCOL_VERSION)
            await until(lambda: make_server_info(router).verifiers[1].healthy)
            assert make_server_info(router).verifiers[1].problem == ""
    refusals = [record for record in caplog.records if record.message == "peer refused"]
    assert len(refusals) == 1
    assert all(record.exc_info is None for record in caplog.records)


async def test_a_drafter_of_another_protocol_is_refused_with_a_reason(tmp_path: Path) -> None:
    verifiers = {"a": FakeVerifier()}
    drafter = FakeDrafter(verifiers)
    drafter.change_info(protocol_version=PROTOCOL_VERSION - 1)
    async with running_router(tmp_path, verifiers, {"d": drafter}, wait=False) as router:

        def problem() -> str:
            (summary,) = make_server_info(router).drafters
            return summary.problem

        await until(lambda: "second fleet" in problem())
        assert drafter.attached == []


async def test_a_long_reason_of_a_peer_is_cut(tmp_path: Path) -> None:
    verifier = FakeVerifier()
    verifier.change_info(protocol_version=PROTOCOL_VERSION + 1, version="9." + "é" * 2000)
    async with running_router(tmp_path, {"a": verifier}, wait=False) as router:
        await until(lambda: bool(make_server_info(router).verifiers[0].problem))
        assert len(make_server_info(router).verifiers[0].problem.encode()) <= 1024


async def test_peers_of_the_next_version_with_the_same_protocol_serve(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        both.first.change_info(version="9.1.0")
        both.second.change_info(version="")
        assert (await collect(both.router, text_request()))[-1]
        await both.freed()
