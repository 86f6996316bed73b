"""Preemption for no reason: wherever a session is, it may lose its K/V before the next round."""

from __future__ import annotations

from collections.abc import Collection
from itertools import count
from typing import Any

from outrider_verifier.service import VerifierService

from outrider.ids import SessionId


def preempt_often(service: VerifierService, *, every: int = 3, most: int = 4) -> None:
    """Before every so many rounds, have the session preempted that was least often, `most` times
    at most; a round in flight with it is settled first. The policy lets it in again."""
    room: Any = service._core.room
    ready, rounds = room.ready, count(1)

    def restless(now: float, *, touched: int, flying: Collection[SessionId]) -> bool:
        running = [s for s in room.running.values() if s.preemptions < most]
        due = room.pressed or next(rounds) % every == 0
        if due and running:
            victim = min(running, key=lambda session: session.preemptions)
            room.pressed = victim.session_id in flying
            if room.pressed:
                return False
            room._preempt(victim, now)
        return bool(ready(now, touched=touched, flying=flying))

    room.ready = restless


def start_together(service: VerifierService, sessions: int) -> None:
    """Begin no round before so many sessions were taken in, so that they press on each other on a
    machine that is slow to open them, too."""
    room: Any = service._core.room
    ready = room.ready

    def patient(now: float, *, touched: int, flying: Collection[SessionId]) -> bool:
        come = service._core.counters["sessions"] >= sessions
        return come and bool(ready(now, touched=touched, flying=flying))

    room.ready = patient


def preemptions(service: VerifierService) -> int:
    """So far, of all kinds."""
    counters = service._core.counters
    return counters["preemptions_swap"] + counters["preemptions_recompute"]
