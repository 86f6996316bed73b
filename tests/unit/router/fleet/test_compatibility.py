"""Handshakes, attachments and the choice of a drafter are plain decisions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from outrider_router.fleet.compatibility import (
    PeerState,
    TokenizerIdentity,
    can_serve,
    check_drafter_fits,
    check_no_simulation,
    check_verifier_fits,
    state_after_failure,
)
from outrider_router.fleet.drafter_assignment import missing_attachments

import outrider
from outrider.errors import FailedPreconditionError
from outrider.ids import DrafterId, VerifierId
from outrider.spec.plan import DraftMethod
from outrider.wire.messages import (
    PROTOCOL_VERSION,
    AttachedDrafter,
    DrafterInfo,
    FeatureLayout,
    VerifierInfo,
)

TOKENIZER = TokenizerIdentity(hash="f00d" * 16, num_ids=100)
VERIFIER = VerifierInfo(
    protocol_version=PROTOCOL_VERSION,
    verifier_id=VerifierId("v"),
    incarnation="1",
    model_name="m",
    vocab_size=128,
    tokenizer_hash=TOKENIZER.hash,
    max_context_len=100,
    kv_block_tokens=16,
    kv_total_blocks=10,
    kv_free_blocks=10,
    sessions=0,
    max_sessions=4,
    drafters=(),
    feature_fingerprint="head-1",
)
DRAFTER = DrafterInfo(
    protocol_version=PROTOCOL_VERSION,
    drafter_id=DrafterId("d"),
    incarnation="1",
    vocab_size=128,
    tokenizer_hash=TOKENIZER.hash,
    methods=(DraftMethod.EAGLE3,),
    feature_layout=FeatureLayout.PROJECTED,
    feature_fingerprint="head-1",
    sessions=0,
    verifiers=(),
)


def attached(*drafters: DrafterInfo) -> VerifierInfo:
    return replace(
        VERIFIER,
        drafters=tuple(
            AttachedDrafter(
                drafter_id=d.drafter_id, incarnation=d.incarnation, methods=d.methods, sessions=0
            )
            for d in drafters
        ),
    )


def test_a_padded_vocabulary_and_an_unknown_hash_pass() -> None:
    check_verifier_fits(VERIFIER, TOKENIZER)
    check_verifier_fits(replace(VERIFIER, tokenizer_hash=""), TOKENIZER)
    check_drafter_fits(DRAFTER, TOKENIZER)


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        (replace(VERIFIER, protocol_version=PROTOCOL_VERSION + 1), "PROTOCOL_MISMATCH"),
        (replace(VERIFIER, vocab_size=99), "VOCAB_MISMATCH"),
        (replace(VERIFIER, tokenizer_hash="beef" * 16), "TOKENIZER_MISMATCH"),
    ],
)
def test_a_verifier_that_does_not_fit_the_tokenizer_is_refused(
    info: VerifierInfo, reason: str
) -> None:
    with pytest.raises(FailedPreconditionError) as caught:
        check_verifier_fits(info, TOKENIZER)
    assert caught.value.reason == reason


def test_a_verifier_that_accepts_by_chance_serves_no_holders_of_keys() -> None:
    check_no_simulation(VERIFIER)
    with pytest.raises(FailedPreconditionError, match="benchmarks only") as caught:
        check_no_simulation(replace(VERIFIER, simulated_acceptance="length:2.6"))
    assert caught.value.reason == "SIMULATED_ACCEPTANCE"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol_version": 0}, "PROTOCOL_MISMATCH"),
        ({"tokenizer_hash": "beef" * 16}, "TOKENIZER_MISMATCH"),
    ],
)
def test_a_drafter_of_another_tokenizer_is_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(FailedPreconditionError) as caught:
        check_drafter_fits(replace(DRAFTER, **changes), TOKENIZER)  # type: ignore[arg-type]
    assert caught.value.reason == reason


@pytest.mark.parametrize("version", ["0.1.7", ""])
def test_a_refusal_of_another_protocol_says_both_versions_and_what_to_do(version: str) -> None:
    checks = (
        lambda: check_verifier_fits(replace(VERIFIER, **other), TOKENIZER),
        lambda: check_drafter_fits(replace(DRAFTER, **other), TOKENIZER),
    )
    other: dict[str, Any] = {"protocol_version": PROTOCOL_VERSION - 1, "version": version}
    for check in checks:
        with pytest.raises(FailedPreconditionError) as caught:
            check()
        message = caught.value.message
        assert version in message and f"protocol {PROTOCOL_VERSION - 1};" in message
        assert f"version {outrider.__version__} and speaks protocol {PROTOCOL_VERSION}" in message
        assert "second fleet" in message


def test_another_version_of_the_package_with_the_same_protocol_fits() -> None:
    check_verifier_fits(replace(VERIFIER, version="9.1.0"), TOKENIZER)
    check_drafter_fits(replace(DRAFTER, version="9.1.0"), TOKENIZER)


def test_features_must_match_only_where_features_are_fed() -> None:
    assert can_serve(DRAFTER, VERIFIER)
    assert not can_serve(replace(DRAFTER, feature_fingerprint="head-2"), VERIFIER)
    assert not can_serve(replace(DRAFTER, vocab_size=64), VERIFIER)
    featureless = replace(DRAFTER, feature_layout=FeatureLayout.NONE, feature_fingerprint="")
    assert can_serve(featureless, VERIFIER)


def test_a_restarted_drafter_is_attached_again() -> None:
    assert missing_attachments(DRAFTER, {"v:1": VERIFIER}) == ["v:1"]
    assert missing_attachments(DRAFTER, {"v:1": attached(DRAFTER)}) == []
    assert missing_attachments(replace(DRAFTER, incarnation="2"), {"v:1": attached(DRAFTER)}) == [
        "v:1"
    ]
    misfit = replace(DRAFTER, vocab_size=64)
    assert missing_attachments(misfit, {"v:1": VERIFIER}) == []


@pytest.mark.parametrize(
    ("state", "failures", "silence_s", "expected"),
    [
        (PeerState.HEALTHY, 1, 0.1, PeerState.HEALTHY),
        (PeerState.HEALTHY, 2, 0.1, PeerState.LOST),
        (PeerState.HEALTHY, 0, 2.9, PeerState.HEALTHY),
        (PeerState.HEALTHY, 0, 3.0, PeerState.LOST),
        (PeerState.UNKNOWN, 9, 99.0, PeerState.UNKNOWN),
        (PeerState.REFUSED, 9, 99.0, PeerState.REFUSED),
    ],
)
def test_a_peer_is_lost_by_two_failures_or_by_silence(
    state: PeerState, failures: int, silence_s: float, expected: PeerState
) -> None:
    assert (
        state_after_failure(state, failures=failures, silence_s=silence_s, bound_s=3.0) is expected
    )
