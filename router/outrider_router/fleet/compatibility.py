"""Compatibility checks between router, verifiers and drafters. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from outrider.errors import FailedPreconditionError
from outrider.wire.messages import PROTOCOL_VERSION, DrafterInfo, FeatureLayout, VerifierInfo


class PeerState(StrEnum):
    """State of a verifier or drafter as the router sees it."""

    UNKNOWN = "unknown"
    """Never reached."""
    HEALTHY = "healthy"
    REFUSED = "refused"
    """Reachable, but it does not fit (protocol, vocabulary, tokenizer)."""
    LOST = "lost"
    """Was healthy; does not answer any more."""


LOST_AFTER_FAILURES = 2
"""Refused connections in a row that mean a peer is gone (silence has its own bound)."""


def state_after_failure(
    state: PeerState, *, failures: int, silence_s: float, bound_s: float
) -> PeerState:
    """State of a peer after a look at it failed.

    `failures` counts errors in a row, `silence_s` the time since it last gave a sign of life.
    A late answer alone (a timeout is no failure) is forgiven until `bound_s`.
    """
    if state is PeerState.HEALTHY and (failures >= LOST_AFTER_FAILURES or silence_s >= bound_s):
        return PeerState.LOST
    return state


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerIdentity:
    """The router's tokenizer, for handshakes."""

    hash: str
    num_ids: int
    """One more than its largest id."""


def check_verifier_fits(info: VerifierInfo, tokenizer: TokenizerIdentity) -> None:
    """Raise FailedPreconditionError unless the router can serve clients with this verifier."""
    _check_protocol("verifier", info.verifier_id, info.protocol_version)
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


def check_drafter_fits(info: DrafterInfo, tokenizer: TokenizerIdentity) -> None:
    """Raise FailedPreconditionError unless this drafter speaks of the same ids."""
    _check_protocol("drafter", info.drafter_id, info.protocol_version)
    if info.tokenizer_hash and info.tokenizer_hash != tokenizer.hash:
        raise FailedPreconditionError(
            f"drafter {info.drafter_id} has tokenizer {info.tokenizer_hash[:12]}, "
            f"the router {tokenizer.hash[:12]}",
            reason="TOKENIZER_MISMATCH",
        )


def _check_protocol(kind: str, name: str, version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise FailedPreconditionError(
            f"{kind} {name} speaks protocol version {version}, the router {PROTOCOL_VERSION}",
            reason="PROTOCOL_MISMATCH",
        )


def can_serve(drafter: DrafterInfo, verifier: VerifierInfo) -> bool:
    """Whether a drafter may serve a verifier's sessions."""
    if drafter.vocab_size != verifier.vocab_size:
        return False
    if drafter.feature_layout is FeatureLayout.NONE:
        return True
    return drafter.feature_fingerprint == verifier.feature_fingerprint
