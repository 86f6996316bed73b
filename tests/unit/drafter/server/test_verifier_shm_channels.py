"""The drafter's end of shared-memory channels: messages that it has no use for cost nothing."""

from __future__ import annotations

from outrider_drafter.metrics import DrafterMetrics
from outrider_drafter.server.shm_channels import VerifierShmChannels

from outrider.wire.codec import encode_verifier_messages
from outrider.wire.messages import SessionEnd
from tests.fakes.shm_channels import lane_pair
from tests.wire.samples import SAMPLES

CONNECTION = 7


def test_messages_about_replicas_are_counted_and_dropped() -> None:
    metrics = DrafterMetrics()
    names = [name for name, (kind, _) in SAMPLES.items() if kind == "verifier"]
    replica = [SAMPLES[name][1] for name in names if name.startswith("replica_")]
    assert len(replica) == 5
    with lane_pair() as (ours, theirs):
        channels = VerifierShmChannels(
            metrics, max_unsent=4, on_lost=lambda connection: None, pin=lambda memory: True
        )
        channels.attach_channel(CONNECTION, theirs)
        ours.send(*encode_verifier_messages([*replica, SessionEnd(handle=3)]))
        found = channels.receive_messages(channels.readers)
    assert found == [(CONNECTION, SessionEnd(handle=3))]
    ignored = "outrider_drafter_ignored_messages_total"
    assert metrics.registry.get_sample_value(ignored, {"reason": "replica"}) == 5
