"""Decides which sessions that decode plainly stop keeping features for drafters. Pure functions.

A session without its features can never again be drafted for by a method that needs them; keeping
them makes every plain round longer, by a tenth and more for a small model. Where they cost much,
sessions that decode plainly drop them (*features dropped*). Speculation is tried again with
sessions that begin after it is due, once there are enough of them.
"""

from __future__ import annotations

from typing import Final

from outrider.spec.plan import FEATURE_METHODS
from outrider.speculation.speculation_controller import SpeculationController
from outrider_verifier.planner.load_stats import LoadStats
from outrider_verifier.planner.workload_stats import WorkloadStats
from outrider_verifier.state.session import Session

MIN_FEATURE_SHARE: Final = 0.04
"""Share of a plain round that features take from which on it is worth to do without."""
COLLECT_ROUNDS: Final = 64
"""Rounds for which sessions keep features after one in which speculation was due."""
PREPARE_ROUNDS: Final = 128.0
"""Plain rounds with features before sessions that have them are enough: an answer's."""


def should_drop_at_load(loads: LoadStats) -> bool:
    """Whether to do without features is worth it at this load."""
    return loads.feature_cost_share >= MIN_FEATURE_SHARE


def preparation_s(known: WorkloadStats, loads: LoadStats) -> float:
    """Seconds that it costs to have sessions keep features until they can be drafted for."""
    needed = known.workload_class.method in FEATURE_METHODS and should_drop_at_load(loads)
    return PREPARE_ROUNDS * loads.feature_cost_share * loads.plain_round_s if needed else 0.0


def should_drop_features(
    known: WorkloadStats, controller: SpeculationController, loads: LoadStats
) -> bool:
    """Whether sessions of a kind keep no features from now on; `controller`: the speculation
    controller at this load. For good, so it takes a load at which plain decoding was seen to be
    faster, and that has lasted, unless the same was seen at the load before: sessions that come and
    go lead from one to the other and back, and one that keeps features makes the rounds of all
    longer."""
    if known.workload_class.method not in FEATURE_METHODS or not controller.is_plain_in_force:
        return False
    if not loads.is_steady:
        before = known.controllers.get(loads.before)
        if before is None or not before.is_plain_in_force:
            return False
    return should_drop_at_load(loads) and loads.rounds >= known.collect_features_until


def collect_features(known: WorkloadStats, loads: LoadStats) -> None:
    """Speculation is due: sessions gather that can be tried, at whatever load until then."""
    known.collect_features_until = loads.rounds + COLLECT_ROUNDS


def can_never_draft(session: Session) -> bool:
    """Whether it was let go, and has a plan that needs what it had."""
    return session.has_dropped_features and session.plan.method in FEATURE_METHODS
