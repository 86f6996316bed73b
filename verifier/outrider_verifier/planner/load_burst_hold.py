"""Keeps sessions on plain decoding during load bursts and short dips. Pure functions.

It applies even where drafts are in force at the current load. A drafter has much to catch up with
for sessions whose speculation was off: a lower load must last before they resume, since at the end
of a wave few tokens are left. In a burst the first sessions, if drafted for, would delay those that
follow, and soon be switched off with them.
"""

from __future__ import annotations

import math
from typing import Final

from outrider.speculation.speculation_controller import SpeculationController
from outrider_verifier.planner.load_stats import LoadStats
from outrider_verifier.planner.workload_stats import WorkloadStats
from outrider_verifier.state.session import Session

BURST_DOUBLINGS: Final = 2
"""Doublings that make many sessions that come a burst: more are likely to."""
MIN_TOKENS_LEFT: Final = 32
"""Tokens that a paused session may yet emit without which it does not resume: its drafter has to
read what it missed, and the first rounds are out of step."""


def update_hold(known: WorkloadStats, controller: SpeculationController, loads: LoadStats) -> None:
    """Say of a kind whether its sessions wait until the load has lasted; `controller`: that of the
    load."""
    waits = not (loads.is_load_steady or controller.is_probing)
    known.is_held = waits and was_plain_faster(known, loads.load, loads.peak)
    bursts = waits and loads.load_jump >= BURST_DOUBLINGS
    known.excludes_finishing_sessions = not controller.is_probing
    known.begins_plainly = known.is_held or (
        bursts and was_plain_faster(known, loads.load, math.inf)
    )


def stays_off(known: WorkloadStats, session: Session) -> bool:
    """Whether a session that is paused stays so whatever is in force."""
    few_left = known.excludes_finishing_sessions and session.remaining < MIN_TOKENS_LEFT
    return session.is_speculation_off and (known.is_held or few_left)


def was_plain_faster(known: WorkloadStats, above: int, most: float) -> bool:
    """Whether plain decoding was found to be faster at a load above one, and up to another."""
    controllers = known.controllers.items()
    return any(above < load <= most and contest.is_plain_faster for load, contest in controllers)
