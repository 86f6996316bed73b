"""What `outrider status` says of drafters that are slowed down."""

from __future__ import annotations

from outrider.client.status_command import describe
from outrider.ids import DrafterId
from outrider.spec.plan import DraftMethod
from outrider.wire.inference import DrafterSummary, ServerInfo


def line(handicap: str) -> str:
    """What is said of a drafter."""
    drafter = DrafterSummary(
        drafter_id=DrafterId("d"),
        address="a:2",
        healthy=True,
        methods=(DraftMethod.EAGLE3,),
        sessions=1,
        handicap=handicap,
    )
    info = ServerInfo(
        version="1",
        protocol_version=1,
        queued=0,
        queue_bound=1,
        running=1,
        verifiers=(),
        drafters=(drafter,),
    )
    return list(describe(info))[1]


def test_a_drafter_that_is_slowed_down_is_never_taken_for_a_usual_one() -> None:
    assert line("drafts 2x as slow").endswith("SLOWED DOWN: drafts 2x as slow")
    assert "SLOWED" not in line("")
