"""A verifier that says more than a request may have, or ids that there are not: its session ends,
and the request goes on elsewhere, from what was valid."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import pytest

from outrider.errors import InternalError
from outrider.wire.inference import FinishInfo, TokenLogprobs
from outrider.wire.messages import FinishReason, SessionEvent, SessionSpec, SpecStats
from tests.fakes.router import running_router, sample
from tests.fakes.verifier import FakeVerifier, echo
from tests.unit.router.helpers import assert_all_freed, collect, text_request
from tests.waiting import soon, until

ASKED = 6


class Endless(FakeVerifier):
    """Emits rows of ids for ever and never says that a session is over."""

    def __init__(self, row: tuple[int, ...]) -> None:
        super().__init__()
        self.row, self.rows = row, 0

    async def run_session(self, spec: SessionSpec) -> AsyncGenerator[SessionEvent]:
        self.specs.append(spec)
        self.live[spec.session_id] = spec
        try:
            while True:
                self.rows += 1
                yield SessionEvent(
                    session_id=spec.session_id,
                    epoch=spec.epoch,
                    round_id=self.rows,
                    tokens=self.row,
                    stats=SpecStats(rounds=self.rows, emitted=self.rows * len(self.row)),
                    drafter_attached=False,
                )
                await asyncio.sleep(0)
        finally:
            self.live.pop(spec.session_id, None)


async def test_a_stream_ends_at_its_length_whether_its_verifier_says_so_or_not(
    tmp_path: Path,
) -> None:
    verifier = Endless((97, 98))
    async with running_router(tmp_path, {"v": verifier}) as router:
        events = await soon(collect(router, text_request(max_tokens=ASKED)))
        finish = events[-1]
        assert isinstance(finish, FinishInfo) and finish.reason is FinishReason.LENGTH
        assert finish.usage.completion_tokens == ASKED
        assert sample(router, "outrider_failovers_total") == 0
        await assert_all_freed(router, verifier)
        rows = verifier.rows
        await asyncio.sleep(0.05)
        # It was told to stop.
        assert verifier.rows == rows


@pytest.mark.parametrize("row", [(97,) * (ASKED + 1), (97, 259), (2**31 - 1,)])
async def test_rows_that_no_request_may_have_are_not_passed_on(
    tmp_path: Path, row: tuple[int, ...]
) -> None:
    verifier = Endless(row)
    async with running_router(tmp_path, {"v": verifier}, max_failovers=1) as router:
        with pytest.raises(InternalError) as refused:
            await soon(router.generate(text_request(max_tokens=ASKED)))
        assert refused.value.reason == "INVALID_EVENTS"
        assert len(verifier.specs) == 2
        await until(lambda: not verifier.live)
        await assert_all_freed(router, verifier)


async def test_the_request_goes_on_with_what_was_valid(tmp_path: Path) -> None:
    verifier = FakeVerifier()

    def one_bad_id(spec: SessionSpec) -> Sequence[int]:
        ids = list(echo(spec))
        return [*ids[:3], 300, *ids[4:]] if len(verifier.specs) == 1 else ids

    verifier.script = one_bad_id
    async with running_router(tmp_path, {"v": verifier}) as router:
        result = await soon(router.generate(text_request(max_tokens=ASKED)))
        assert result.text == "abcabc"
        assert sample(router, "outrider_failovers_total") == 1
        await assert_all_freed(router, verifier)


async def test_log_probabilities_of_ids_that_there_are_not_are_refused(tmp_path: Path) -> None:
    verifier = FakeVerifier()
    verifier.logprobs = lambda spec, end, tokens: tuple(
        TokenLogprobs(-1.0, ((2**31 - 1, -1.0),)) for _ in tokens
    )
    async with running_router(tmp_path, {"v": verifier}, max_failovers=0) as router:
        with pytest.raises(InternalError):
            await soon(router.generate(text_request(top_logprobs=1)))
        await assert_all_freed(router, verifier)
