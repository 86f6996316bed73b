"""A router that counts as killed tells its clients nothing, not even that a call has ended."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from outrider_chaos.killable_router import KillableRouter
from outrider_router.requests.resumption.resumable_answers import EventWriter

from outrider.errors import UnavailableError
from outrider.wire.inference import Delta

FIRST, SECOND = Delta(text="a", token_ids=(1,)), Delta(text="b", token_ids=(2,))


class Service:
    """Says two things, the second one when it is let."""

    num_sessions = 3

    def __init__(self, error: Exception | None = None) -> None:
        self.go_on = asyncio.Event()
        self._error = error

    async def serve_request(self, _request: Any, write: EventWriter) -> None:
        await write(FIRST)
        await self.go_on.wait()
        if self._error is not None:
            raise self._error
        await write(SECOND)


async def told(*, killed: bool, error: Exception | None = None) -> tuple[list[Any], bool]:
    """What a client hears, and whether its call ends."""
    service: Any = Service(error)
    front, heard = KillableRouter(service), list[Any]()
    assert front.num_sessions == 3

    async def write(event: Any) -> None:
        heard.append(event)

    call = asyncio.ensure_future(front.serve_request(None, write))
    while not heard:
        await asyncio.sleep(0)
    if killed:
        front.die()
    service.go_on.set()
    ended, _ = await asyncio.wait([call], timeout=0.05 if killed else 30.0)
    call.cancel()
    result = await asyncio.gather(call, return_exceptions=True)
    assert not killed or isinstance(result[0], asyncio.CancelledError)
    return heard, bool(ended)


@pytest.mark.parametrize("error", [None, UnavailableError("gone", reason="SHUTDOWN")])
def test_after_its_death_nothing_is_told(error: Exception | None) -> None:
    assert asyncio.run(told(killed=True, error=error)) == ([FIRST], False)


def test_before_it_everything_is() -> None:
    assert asyncio.run(told(killed=False)) == ([FIRST, SECOND], True)
