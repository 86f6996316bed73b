"""Which sessions whose kind decodes plainly keep features, and which do without (pure).

Without its features a session can never be drafted for again by what feeds on them; and with them
every plain round is longer, by a tenth and more where the model is small. So where they cost much,
sessions that decode plainly are *lean*: they keep none. Speculation is tried again with sessions
that begin after it is due, once enough of them are there.
"""

from __future__ import annotations

from typing import Final

from outrider.spec.plan import FEATURE_FED
from outrider.speculation.speculation_controller import Contest
from outrider_verifier.planner.load_stats import Loads
from outrider_verifier.planner.workload_stats import Known
from outrider_verifier.state.session import Session

LEAN_SHARE: Final = 0.04
"""Share of a plain round that features take from which on it is worth to do without."""
GATHER_ROUNDS: Final = 64
"""Rounds for which sessions keep features after one in which speculation was due."""
PREPARE_ROUNDS: Final = 128.0
"""Plain rounds with features before sessions that have them are enough: an answer's."""


def pays(loads: Loads) -> bool:
    """Whether to do without features is worth it at this load."""
    return loads.features_share >= LEAN_SHARE


def ready_s(known: Known, loads: Loads) -> float:
    """Seconds that it costs to have sessions keep features until they can be drafted for."""
    needed = known.kind.method in FEATURE_FED and pays(loads)
    return PREPARE_ROUNDS * loads.features_share * loads.plain_s if needed else 0.0


def lets_go(known: Known, contest: Contest, loads: Loads) -> bool:
    """Whether sessions of a kind keep no features from now on; `contest`: that of the load. For
    good, so it takes a load at which plain decoding was seen to be faster, and that has lasted,
    unless the same was seen at the load before: sessions that come and go lead from one to the
    other and back, and one that keeps features makes the rounds of all longer."""
    if known.kind.method not in FEATURE_FED or not contest.holds_plain:
        return False
    if not loads.steady:
        before = known.contests.get(loads.before)
        if before is None or not before.holds_plain:
            return False
    return pays(loads) and loads.rounds >= known.gathers_until


def gather(known: Known, loads: Loads) -> None:
    """Speculation is due: sessions gather that can be tried, at whatever load until then."""
    known.gathers_until = loads.rounds + GATHER_ROUNDS


def never_drafts(session: Session) -> bool:
    """Whether it was let go, and has a plan that needs what it had."""
    return session.lean and session.plan.method in FEATURE_FED
