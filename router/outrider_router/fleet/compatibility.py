"""Compatibility checks between router, verifiers and drafters. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from outrider.errors import FailedPreconditionError
from outrider.wire.messages import DrafterInfo, FeatureLayout, VerifierInfo
from outrider.wire.protocol_check import check_protocol


class PeerState(StrEnum):
    """State of a verifier or drafter as the router sees it."""

    UNKNOWN = "unknown"
    """The router has never reached the peer."""
    HEALTHY = "healthy"
    REFUSED = "refused"
    """The peer is reachable, but its protocol, vocabulary or tokenizer does not match."""
    LOST = "lost"
    """The peer was healthy and no longer answers."""


LOST_AFTER_FAILURES = 2
"""Number of failed polls in a row after which a peer is lost. A peer that does not answer is lost
after a time limit instead.
"""


def state_after_failure(
    state: PeerState, *, failures: int, silence_s: float, bound_s: float
) -> PeerState:
    """Return the state of a peer after a poll failed.

    `failures` is the number of errors in a row, `silence_s` the time since the last sign of life in
    seconds. A missing answer alone is tolerated for `bound_s` seconds.
    """
    if state is PeerState.HEALTHY and (failures >= LOST_AFTER_FAILURES or silence_s >= bound_s):
        return PeerState.LOST
    return state


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerIdentity:
    """Identity of the router's tokenizer, which must match that of the peers."""

    hash: str
    num_ids: int
    """Largest token id plus one."""


def check_verifier_fits(info: VerifierInfo, tokenizer: TokenizerIdentity) -> None:
    """Raise FailedPreconditionError unless this verifier's protocol, vocabulary and tokenizer match
    those of the router.
    """
    check_protocol(
        f"verifier {info.verifier_id}",
        protocol_version=info.protocol_version,
        version=info.version,
    )
    if info.vocab_size < tokenizer.num_ids:
        raise FailedPreconditionError(
            f"verifier {info.verifier_id} has {info.vocab_size} token ids, but the router's "
            f"tokenizer produces up to {tokenizer.num_ids}",
            reason="VOCAB_MISMATCH",
        )
    if info.tokenizer_hash and info.tokenizer_hash != tokenizer.hash:
        raise FailedPreconditionError(
            f"verifier {info.verifier_id} has tokenizer {info.tokenizer_hash[:12]}, "
            f"the router {tokenizer.hash[:12]}",
            reason="TOKENIZER_MISMATCH",
        )


def check_no_simulation(info: VerifierInfo) -> None:
    """Raise FailedPreconditionError if this verifier accepts drafts by chance, so that its text is
    not the model's. Routers with API keys check this, because their clients are no benchmarks.
    """
    if info.simulated_acceptance:
        raise FailedPreconditionError(
            f"verifier {info.verifier_id} has simulated_acceptance, which is for benchmarks only: "
            "a router with api_keys does not use it",
            reason="SIMULATED_ACCEPTANCE",
        )


def check_drafter_fits(info: DrafterInfo, tokenizer: TokenizerIdentity) -> None:
    """Raise FailedPreconditionError unless this drafter's protocol and tokenizer match those of the
    router.
    """
    check_protocol(
        f"drafter {info.drafter_id}",
        protocol_version=info.protocol_version,
        version=info.version,
    )
    if info.tokenizer_hash and info.tokenizer_hash != tokenizer.hash:
        raise FailedPreconditionError(
            f"drafter {info.drafter_id} has tokenizer {info.tokenizer_hash[:12]}, "
            f"the router {tokenizer.hash[:12]}",
            reason="TOKENIZER_MISMATCH",
        )


def can_serve(drafter: DrafterInfo, verifier: VerifierInfo) -> bool:
    """Return whether the drafter's vocabulary and hidden-state features match those of the
    verifier.
    """
    if drafter.vocab_size != verifier.vocab_size:
        return False
    if drafter.feature_layout is FeatureLayout.NONE:
        return True
    return drafter.feature_fingerprint == verifier.feature_fingerprint
