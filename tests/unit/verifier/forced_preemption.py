"""Preemption for no reason: wherever a session is, it may lose its KV before the next round."""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from itertools import count
from typing import Any

from outrider_verifier.server.service import VerifierService

from outrider.ids import SessionId


def preempt_often(service: VerifierService, *, every: int = 3, most: int = 4) -> None:
    """Before every so many rounds, have the session preempted that was least often, `most` times
    at most; a round in flight with it is settled first. The policy lets it in again."""
    block_manager: Any = service.core.block_manager
    ready, rounds = block_manager.prepare_round, count(1)

    def restless(now: float, *, touched: int, in_flight: Container[SessionId]) -> bool:
        running = [s for s in block_manager.running.values() if s.preemption.count < most]
        due = block_manager.pressed or next(rounds) % every == 0
        if due and running:
            victim = min(running, key=lambda session: session.preemption.count)
            block_manager.pressed = victim.session_id in in_flight
            if block_manager.pressed:
                return False
            block_manager.preempt_session(victim, now)
        return bool(ready(now, touched=touched, in_flight=in_flight))

    block_manager.prepare_round = restless


def hold(service: VerifierService, since: Callable[[], bool]) -> Callable[[], None]:
    """Begin no round while `since()` is true, which the engine's thread asks; what is asked of the
    verifier is done, but nobody is admitted or preempted. To be called to let rounds begin again:
    however late a test's loop is, its sessions are where it wants them."""
    block_manager: Any = service.core.block_manager
    ready, over = block_manager.prepare_round, False

    def holding(now: float, *, touched: int, in_flight: Container[SessionId]) -> bool:
        if not over and since():
            time.sleep(0.001)
            return False
        return bool(ready(now, touched=touched, in_flight=in_flight))

    def release() -> None:
        nonlocal over
        over = True

    block_manager.prepare_round = holding
    return release


def start_together(service: VerifierService, sessions: int) -> None:
    """Begin no round before so many sessions were taken in, so that they press on each other on a
    machine that is slow to open them, too."""
    hold(service, lambda: service.core.counters["sessions"] < sessions)


def preemptions(service: VerifierService) -> int:
    """So far, of all kinds."""
    counters = service.core.counters
    return counters["preemptions_swap"] + counters["preemptions_recompute"]
