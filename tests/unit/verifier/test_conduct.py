"""What is kept of a drafter's behaviour: answers, misses, errors, silence, floods."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from outrider_verifier.exchange.drafter_health import (
    BURST,
    MAX_KNOWN,
    NODES,
    PER_SESSION,
    PER_WISH,
    REFILL,
    Conduct,
    Conducts,
)

from outrider.ids import DrafterId


def hear(conduct: Conduct, now: float, entries: int = 1, **kind: int) -> bool:
    """Proposals that could be of use, unless told otherwise."""
    facts = {"nodes": 0, "useful": entries, "unsound": 0, "strays": 0} | kind
    return conduct.heard(now, entries=entries, **facts)


def test_silence_begins_with_a_wait_during_which_nothing_was_heard() -> None:
    conduct = Conduct()
    hear(conduct, 5.0)
    # Somebody was answered while this one waited.
    assert not conduct.failed(since=4.0)
    assert not conduct.silent
    assert conduct.failed(since=6.0)
    assert conduct.silent and conduct.silent_s(8.5) == 2.5
    # It is told once.
    assert not conduct.failed(since=7.0)
    assert conduct.silent_s(9.0) == 3.0
    assert conduct.missed == 3
    assert hear(conduct, 9.5)
    assert not conduct.silent and conduct.silent_s(20.0) == 0.0
    assert not hear(conduct, 9.6)


def test_whoever_connects_anew_has_said_something() -> None:
    conduct = Conduct()
    conduct.failed(since=1.0)
    conduct.attached()
    assert not conduct.silent


def test_what_was_on_its_way_is_no_fault() -> None:
    conduct = Conduct()
    hear(conduct, 1.0, 3, useful=0, strays=3)
    assert conduct.invalid == 3
    conduct.released()
    hear(conduct, 1.0, PER_SESSION + 5, useful=0, strays=PER_SESSION + 5)
    assert conduct.invalid == 3 + 5
    hear(conduct, 1.0, 2, useful=1, unsound=1)
    assert conduct.invalid == 9 and conduct.answers == 1
    conduct.babbled(1.0)
    assert conduct.invalid == 10


def test_a_drafter_may_send_what_it_was_asked_for_and_some_more() -> None:
    conduct = Conduct()
    for number in range(1000):
        conduct.asked(8)
        hear(conduct, 0.01 * number, 8 * 65, useful=8, nodes=8 * 65 * 8)
    assert not conduct.floods
    idle = Conduct()
    for number in range(30_000):
        hear(idle, number / (REFILL / 2.0), 1, useful=0)
    assert not idle.floods


def test_who_sends_more_than_anybody_asked_for_floods() -> None:
    conduct = Conduct()
    for _ in range(round(BURST)):
        conduct.babbled(0.0)
    assert not conduct.floods
    conduct.babbled(0.0)
    assert conduct.floods
    quitter = Conduct()
    quitter.gave_up(round(BURST), 0.0)
    assert quitter.floods and not quitter.invalid
    # Neither a wish nor much of a moment makes up for it, and no connection does.
    large = Conduct()
    hear(large, 0.0, 1, useful=0, nodes=round(2 * BURST * NODES))
    large.asked(1)
    large.attached()
    assert large.floods
    hear(large, 1.0, 1)
    assert large.floods


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
    conduct, now, asked, cost = Conduct(), 0.0, 0, 0.0
    for pause, wishes, entries, useful, sound in steps:
        now += pause
        conduct.asked(wishes)
        asked += wishes
        before = conduct.invalid
        hear(
            conduct,
            now,
            entries,
            useful=entries * useful * sound,
            unsound=entries * (not sound),
        )
        cost += 1 + entries * (not (useful and sound))
        assert conduct.invalid - before == entries * (not sound)
        if cost > BURST + REFILL * now + PER_WISH * asked:
            assert conduct.floods
        if cost <= BURST:
            assert not conduct.floods


def test_a_name_is_remembered_and_the_number_of_names_is_bounded() -> None:
    conducts = Conducts()
    first = conducts.of(DrafterId("d"))
    assert conducts.of(DrafterId("d")) is first
    for number in range(MAX_KNOWN):
        conducts.of(DrafterId(f"other {number}"))
    assert len(conducts._known) == MAX_KNOWN
    assert conducts.of(DrafterId("d")) is not first
