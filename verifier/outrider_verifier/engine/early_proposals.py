"""Prefetched-proposal path: plans the next round before the last one's tokens are committed.

Taken only if each running session has a usable proposal for the prefix that the last round made, no
prompt waits and no session is about to end, so that there is nothing to weigh.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider_verifier.engine.core import EngineCore
from outrider_verifier.engine.in_flight_round import InFlightRound
from outrider_verifier.engine.schedule_policy import plan_drafted
from outrider_verifier.model_runner.batch import VerifyRow
from outrider_verifier.state.round_plan import RoundLimits, RoundPlan
from outrider_verifier.state.session import Session
from outrider_verifier.state.session_phase import ENDED


def plan_prefetched_round(
    in_flight: InFlightRound, counts: Sequence[int], core: EngineCore, limits: RoundLimits
) -> tuple[RoundPlan, list[VerifyRow]] | None:
    """The plan and the rows that verify, of every session of `in_flight`, the draft for what it has
    just emitted, `counts` tokens, which are not committed yet; taken out of the inbox. None: see to
    what the round emitted first. All had such drafts, and nobody is at its end."""
    sessions = [row.session for row in in_flight.verify]
    if len(sessions) != len(core.block_manager.running):
        return None
    handles = [session.handle for session in sessions]
    nodes = core.inbox.num_nodes(handles)
    plan = plan_drafted([session.spec.session_id for session in sessions], nodes, limits)
    if plan is None:
        return None
    for session, count, deep in zip(sessions, counts, nodes, strict=True):
        if not _ready(session, count, deep):
            return None
    for session in sessions:
        # Its drafter is well, whatever came late before.
        session.has_stalled_drafter = False
    return plan, list(map(VerifyRow, sessions, core.inbox.take_proposals(handles)))


def _ready(session: Session, count: int, nodes: int) -> bool:
    """Whether a draft of so many nodes is verified as it is, once `count` tokens are committed."""
    if session.constraint is not None or session.phase is ENDED or not session.draft_wanted:
        return False
    # One token beyond the draft is emitted; no node is deeper than there are nodes.
    left = session.remaining - count - 1
    if not 0 <= nodes <= left or nodes > session.draft_limit or not left:
        return False
    return session.length + count <= session.covered_len
