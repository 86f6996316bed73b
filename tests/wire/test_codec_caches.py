"""Plans and sampling parameters are looked up by their bytes, and mean what they meant before."""

from __future__ import annotations

import pytest

from outrider.errors import InvalidMessageError
from outrider.spec.plan import SpeculationPlan
from outrider.spec.sampling import SamplingParams
from outrider.wire.common_codec import plan_from_pb, sampling_from_pb
from outrider.wire.v1 import common_pb2


def test_what_is_remembered_of_others_changes_nothing_for_a_session() -> None:
    for _ in range(2):
        for seed, banned in ((7, ()), (8, ()), (8, (3,)), (7, ())):
            message = common_pb2.Sampling(temperature=0.5, seed=seed, banned_ids=banned)
            found = sampling_from_pb(message)
            expected = SamplingParams(temperature=0.5, seed=seed, banned_ids=banned)
            assert found == expected and hash(found) == hash(expected)
        with pytest.raises(InvalidMessageError, match="temperature"):
            sampling_from_pb(common_pb2.Sampling(temperature=-0.5, seed=7))
        with pytest.raises(InvalidMessageError, match="draft_key"):
            sampling_from_pb(common_pb2.Sampling(temperature=0.5, seed=7, draft_key=1))
        with pytest.raises(InvalidMessageError, match="top_k"):
            plan_from_pb(common_pb2.Plan(top_k=999))
        assert plan_from_pb(common_pb2.Plan(top_k=2)) == SpeculationPlan(top_k=2)


def test_a_message_full_of_what_nobody_knows_is_not_remembered() -> None:
    # Field 99, bytes.
    unknown = common_pb2.Plan.FromString(b"\x9a\x06\xff\x07" + bytes(1023))
    assert plan_from_pb(unknown) == SpeculationPlan()
    assert plan_from_pb(unknown) is not plan_from_pb(unknown)
    known = common_pb2.Plan(top_k=2)
    assert plan_from_pb(known) is plan_from_pb(known)
