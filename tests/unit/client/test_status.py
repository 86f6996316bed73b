"""What `outrider status` says of look-ahead and of drafters that are slowed down."""

from __future__ import annotations

from dataclasses import replace

from outrider.client.status_command import describe
from outrider.ids import DrafterId, VerifierId
from outrider.spec.plan import DraftMethod
from outrider.wire.inference import DrafterSummary, ServerInfo, VerifierSummary
from outrider.wire.look_ahead import LookAheadStats

VERIFIER = VerifierSummary(
    verifier_id=VerifierId("v"),
    address="a:1",
    healthy=True,
    model="m",
    sessions=1,
    max_sessions=8,
    kv_free_blocks=1,
    kv_total_blocks=2,
)
DRAFTER = DrafterSummary(
    drafter_id=DrafterId("d"),
    address="a:2",
    healthy=True,
    methods=(DraftMethod.EAGLE3,),
    sessions=1,
)


def lines(verifier: VerifierSummary, drafter: DrafterSummary) -> list[str]:
    """What is said of the two."""
    info = ServerInfo(
        version="1",
        protocol_version=1,
        queued=0,
        queue_bound=1,
        running=1,
        verifiers=(verifier,),
        drafters=(drafter,),
    )
    return list(describe(info))[1:]


def test_look_ahead_shows_hits_and_what_stood_of_stale_and_fresh_drafts() -> None:
    did = LookAheadStats(rounds=200, hits=150, hit_accepted=345, fresh=40, fresh_accepted=100)
    shown = lines(replace(VERIFIER, look_ahead=did), DRAFTER)[0]
    assert shown.endswith("look-ahead: 75% hits, 2.30 accepted of a hit, 2.50 of a fresh draft")
    never = lines(replace(VERIFIER, look_ahead=LookAheadStats(rounds=3)), DRAFTER)[0]
    assert never.endswith("look-ahead: 0% hits")
    assert "look-ahead" not in lines(VERIFIER, DRAFTER)[0]


def test_a_drafter_that_is_slowed_down_is_never_taken_for_a_usual_one() -> None:
    slow = replace(DRAFTER, handicap="drafts 2x as slow")
    assert lines(VERIFIER, slow)[1].endswith("SLOWED DOWN: drafts 2x as slow")
    assert "SLOWED" not in lines(VERIFIER, DRAFTER)[1]
