"""Which sessions go on plainly for now, though drafts are in force at the load of now (pure).

A drafter has much to catch up with for sessions that were paused: a lower load than one at which
they are must last before they resume, for at the end of a wave few tokens are left. And in a burst
the first sessions, drafted for, would hold up those that follow, and soon be paused with them.
"""

from __future__ import annotations

import math
from typing import Final

from outrider.speculation.speculation_controller import Contest
from outrider_verifier.planner.load_stats import Loads
from outrider_verifier.planner.workload_stats import Known
from outrider_verifier.state.session import Session

BURST: Final = 2
"""Doublings that make many sessions that come a burst: more are likely to."""
LEAST_LEFT: Final = 32
"""Tokens that a paused session may yet emit without which it does not resume: its drafter has to
read what it missed, and the first rounds are out of step."""


def hold(known: Known, contest: Contest, loads: Loads) -> None:
    """Say of a kind whether its sessions wait until the load has lasted; `contest`: that of the
    load."""
    waits = not (loads.settled or contest.trying)
    known.held = waits and plain_within(known, loads.load, loads.peak)
    bursts = waits and loads.risen >= BURST
    known.spares = not contest.trying
    known.begins_plainly = known.held or (bursts and plain_within(known, loads.load, math.inf))


def stays(known: Known, session: Session) -> bool:
    """Whether a session that is paused stays so whatever is in force."""
    few_left = known.spares and session.remaining < LEAST_LEFT
    return session.paused and (known.held or few_left)


def plain_within(known: Known, above: int, most: float) -> bool:
    """Whether plain decoding was found to be faster at a load above one, and up to another."""
    contests = known.contests.items()
    return any(above < load <= most and contest.found_plain for load, contest in contests)
