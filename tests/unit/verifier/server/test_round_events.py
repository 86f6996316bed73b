"""A round's events reach their own routers, whole and in order."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from outrider_verifier.server.router_streams import (
    NO_ROUTER,
    ServedSession,
    SessionRegistry,
    split_by_router,
)
from outrider_verifier.state.effects import EventBatch

from outrider.engine.logprobs import PathLogprobs
from outrider.ids import SessionId

Row = tuple[int, ...]


def told(count: int, value: int) -> PathLogprobs:
    """As many log-probabilities as tokens, which say whose they are."""
    return PathLogprobs(
        values=np.full((count, 2), -float(value), np.float32),
        top_ids=np.full((count, 1), value, np.int32),
    )


@pytest.mark.parametrize("routers", [1, 2, 5])
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("gone", [0.0, 0.4, 1.0])
def test_every_router_hears_what_its_sessions_emitted(
    routers: int, asked: bool, gone: float
) -> None:
    rng = np.random.default_rng((routers, asked, int(10 * gone)))
    for size in (0, 1, 7, 64):
        batch, owners, expected = EventBatch(), [], defaultdict(list)
        for number in range(size):
            count = int(rng.integers(0, 5))
            tokens = [10 * number + k for k in range(count)]
            fields = (7000 + number, *rng.integers(0, 99, 6).tolist())
            fields = (fields[0], fields[1], count, *fields[3:])
            heard = told(count, number) if asked and rng.random() < 0.5 else None
            cached = int(rng.integers(1, 99)) if rng.random() < 0.2 else 0
            batch.add_event(fields, tokens, heard, cached)
            owner = NO_ROUTER if rng.random() < gone else int(rng.integers(routers))
            owners.append(owner)
            widths = 0 if heard is None else 2
            row = (50 + number, fields[1], *fields[3:], *tokens, widths, cached)
            if owner >= 0:
                expected[owner].append(row)
        found: dict[int, list[Row]] = {}
        handles = np.arange(50, 50 + size, dtype=np.uint32)
        for owner, events in split_by_router(batch, np.array(owners, np.int64), handles):
            assert owner not in found
            found[owner] = []
            ends = np.cumsum(events.counts)
            width = events.logprobs.widths if events.logprobs else np.zeros(len(ends), int)
            columns = (events.handles, events.round_ids, events.finish_reasons, events.flags)
            rows = zip(*columns, events.proposed, events.accepted, strict=True)
            cached = events.cached_tokens
            assert cached is None or cached.any()
            cached = np.zeros(len(ends), np.uint32) if cached is None else cached
            for place, (end, count, wide, row) in enumerate(
                zip(ends, events.counts, width, rows, strict=True)
            ):
                tokens = events.tokens[end - count : end].tolist()
                found[owner].append((*map(int, row), *tokens, int(wide), int(cached[place])))
            if events.logprobs:
                mine = [h for h, wide in zip(events.handles, width, strict=True) if wide]
                sizes = [int(events.counts[list(events.handles).index(h)]) for h in mine]
                whose = np.repeat(np.array(mine, int) - 50, sizes)
                assert np.array_equal(events.logprobs.top_ids, whose)
        assert found == dict(expected)


def test_a_ticket_is_of_one_session_only_though_its_place_is_used_again() -> None:
    served = SessionRegistry()
    tickets = [served.add(ServedSession(n % 3, 100 + n, SessionId(f"s{n}"))) for n in range(200)]
    assert len(served) == len(set(tickets)) == 200
    for ticket in tickets[::2]:
        assert served.pop(ticket) is not None
        assert served.pop(ticket) is None
    again = [served.add(ServedSession(7, n, SessionId(f"t{n}"))) for n in range(150)]
    assert not set(again) & set(tickets)
    routers, handles = served.owners(np.array(tickets + again, np.int64))
    assert routers[:200:2].tolist() == [NO_ROUTER] * 100
    assert routers[1:200:2].tolist() == [n % 3 for n in range(1, 200, 2)]
    assert handles[1:200:2].tolist() == list(range(101, 300, 2))
    assert routers[200:].tolist() == [7] * 150 and handles[200:].tolist() == list(range(150))
    assert served[again[3]] == served.get(again[3]) == ServedSession(7, 3, SessionId("t3"))
