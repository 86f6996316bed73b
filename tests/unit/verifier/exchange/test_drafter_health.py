"""What is kept of a drafter's behaviour: answers, misses, errors, silence, floods."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from outrider_verifier.exchange.drafter_health import (
    BURST_ENTRIES,
    ENTRIES_PER_RELEASE,
    ENTRIES_PER_REQUEST,
    MAX_DRAFTERS,
    NODES_PER_ENTRY,
    REFILL_ENTRIES_PER_S,
    DrafterHealth,
    DrafterHealthRegistry,
)

from outrider.ids import DrafterId


def hear(drafter_health: DrafterHealth, now: float, entries: int = 1, **kind: int) -> bool:
    """Proposals that could be of use, unless told otherwise."""
    facts = {"nodes": 0, "useful": entries, "unsound": 0, "strays": 0} | kind
    return drafter_health.record_proposals(now, entries=entries, **facts)


def test_silence_begins_with_a_wait_during_which_nothing_was_heard() -> None:
    drafter_health = DrafterHealth()
    hear(drafter_health, 5.0)
    # Somebody was answered while this one waited.
    assert not drafter_health.record_timeout(since=4.0)
    assert not drafter_health.is_silent
    assert drafter_health.record_timeout(since=6.0)
    assert drafter_health.is_silent and drafter_health.silent_s(8.5) == 2.5
    # It is told once.
    assert not drafter_health.record_timeout(since=7.0)
    assert drafter_health.silent_s(9.0) == 3.0
    assert drafter_health.missed == 3
    assert hear(drafter_health, 9.5)
    assert not drafter_health.is_silent and drafter_health.silent_s(20.0) == 0.0
    assert not hear(drafter_health, 9.6)


def test_whoever_connects_anew_has_said_something() -> None:
    drafter_health = DrafterHealth()
    drafter_health.record_timeout(since=1.0)
    drafter_health.record_attach()
    assert not drafter_health.is_silent


def test_what_was_on_its_way_is_no_fault() -> None:
    drafter_health = DrafterHealth()
    hear(drafter_health, 1.0, 3, useful=0, strays=3)
    assert drafter_health.invalid == 3
    drafter_health.record_release()
    hear(drafter_health, 1.0, ENTRIES_PER_RELEASE + 5, useful=0, strays=ENTRIES_PER_RELEASE + 5)
    assert drafter_health.invalid == 3 + 5
    hear(drafter_health, 1.0, 2, useful=1, unsound=1)
    assert drafter_health.invalid == 9 and drafter_health.answers == 1
    drafter_health.record_malformed(1.0)
    assert drafter_health.invalid == 10


def test_a_drafter_may_send_what_it_was_asked_for_and_some_more() -> None:
    drafter_health = DrafterHealth()
    for number in range(1000):
        drafter_health.record_requests(8)
        hear(drafter_health, 0.01 * number, 8 * 65, useful=8, nodes=8 * 65 * 8)
    assert not drafter_health.is_flooding
    idle = DrafterHealth()
    for number in range(30_000):
        hear(idle, number / (REFILL_ENTRIES_PER_S / 2.0), 1, useful=0)
    assert not idle.is_flooding


def test_who_sends_more_than_anybody_asked_for_floods() -> None:
    drafter_health = DrafterHealth()
    for _ in range(round(BURST_ENTRIES)):
        drafter_health.record_malformed(0.0)
    assert not drafter_health.is_flooding
    drafter_health.record_malformed(0.0)
    assert drafter_health.is_flooding
    quitter = DrafterHealth()
    quitter.record_lost_sessions(round(BURST_ENTRIES), 0.0)
    assert quitter.is_flooding and not quitter.invalid
    # Neither a wish nor much of a moment makes up for it, and no connection does.
    large = DrafterHealth()
    hear(large, 0.0, 1, useful=0, nodes=round(2 * BURST_ENTRIES * NODES_PER_ENTRY))
    large.record_requests(1)
    large.record_attach()
    assert large.is_flooding
    hear(large, 1.0, 1)
    assert large.is_flooding


@given(
    st.lists(
        st.tuples(
            st.floats(0, 2), st.integers(0, 9), st.integers(0, 500), st.booleans(), st.booleans()
        ),
        max_size=60,
    )
)
def test_whatever_comes_what_is_allowed_is_bounded(
    steps: list[tuple[float, int, int, bool, bool]],
) -> None:
    drafter_health, now, asked, cost = DrafterHealth(), 0.0, 0, 0.0
    for pause, wishes, entries, useful, sound in steps:
        now += pause
        drafter_health.record_requests(wishes)
        asked += wishes
        before = drafter_health.invalid
        hear(
            drafter_health,
            now,
            entries,
            useful=entries * useful * sound,
            unsound=entries * (not sound),
        )
        cost += 1 + entries * (not (useful and sound))
        assert drafter_health.invalid - before == entries * (not sound)
        if cost > BURST_ENTRIES + REFILL_ENTRIES_PER_S * now + ENTRIES_PER_REQUEST * asked:
            assert drafter_health.is_flooding
        if cost <= BURST_ENTRIES:
            assert not drafter_health.is_flooding


def test_a_name_is_remembered_and_the_number_of_names_is_bounded() -> None:
    health_registry = DrafterHealthRegistry()
    first = health_registry.get_health(DrafterId("d"))
    assert health_registry.get_health(DrafterId("d")) is first
    for number in range(MAX_DRAFTERS):
        health_registry.get_health(DrafterId(f"other {number}"))
    assert len(health_registry) == MAX_DRAFTERS
    assert health_registry.get_health(DrafterId("d")) is not first
