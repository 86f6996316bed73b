"""Validates the messages received from drafters: first the hello message, then all others."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

import numpy as np

from outrider.errors import FailedPreconditionError, InvalidMessageError
from outrider.wire.messages import (
    DrafterMessage,
    EncodedMessage,
    FeatureLayout,
    Heartbeat,
    Hello,
    Proposals,
    ReplicaReady,
    ReplicaRefused,
    SessionsLost,
    ShmAnswer,
    Welcome,
)
from outrider.wire.protocol_check import check_protocol
from outrider.wire.rounds import valid_proposals
from outrider_verifier.state.commands import (
    Command,
    ProposalsReceived,
    ReplicaAnswered,
    SessionsLostByDrafter,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierIdentity:
    """Properties of the verifier that a drafter must match, and limits of the drafter's
    messages."""

    welcome: Welcome
    vocab_size: int
    tokenizer_hash: str
    feature_fingerprint: str
    """Fingerprint of the draft head whose feature projection this process computes; empty if there
    is none."""
    max_tree_nodes: int


def check_hello(hello: Hello, identity: VerifierIdentity) -> None:
    """Raise FailedPreconditionError if the drafter that sent this hello message does not match the
    verifier."""
    check_protocol(
        f"drafter {hello.drafter_id}",
        protocol_version=hello.protocol_version,
        version=hello.version,
    )
    _fit(
        hello.vocab_size == identity.vocab_size,
        f"drafts over {hello.vocab_size} token ids, the target has {identity.vocab_size}",
        "VOCAB_MISMATCH",
    )
    _fit(
        not hello.tokenizer_hash
        or not identity.tokenizer_hash
        or hello.tokenizer_hash == identity.tokenizer_hash,
        "the drafter's tokenizer differs from the target's",
        "TOKENIZER_MISMATCH",
    )
    _fit(
        hello.feature_layout is FeatureLayout.NONE
        or (
            bool(identity.feature_fingerprint)
            and hello.feature_fingerprint == identity.feature_fingerprint
        ),
        "the drafter's head differs from the one whose feature projection runs here"
        if identity.feature_fingerprint
        else "this verifier has no feature projection (feature_head is not set)",
        "FEATURE_MISMATCH",
    )
    _fit(bool(hello.drafter_id), "drafter_id is empty", "NO_DRAFTER_ID")


def _fit(ok: bool, message: str, reason: str) -> None:
    if not ok:
        raise FailedPreconditionError(message, reason=reason)


class DrafterMessageChecker:
    """Converts messages of drafters to commands for the engine. Each receiving thread has its own
    checker."""

    def __init__(self, identity: VerifierIdentity) -> None:
        self._identity = identity
        self.counters: Counter[str] = Counter()
        """Counters for metrics, which only increase."""

    def to_command(self, link_id: int, message: DrafterMessage) -> Command | None:
        """Return the engine command for a message, or None if the engine need not handle the
        message. Raise no exception: invalid messages are counted."""
        match message:
            case Proposals():
                sound = valid_proposals(
                    message,
                    vocab_size=self._identity.vocab_size,
                    max_nodes=self._identity.max_tree_nodes,
                )
                if wrong := int(np.count_nonzero(~sound)):
                    unsound = InvalidMessageError(f"{wrong} proposals", reason="INVALID_TREE")
                    self.count_invalid(unsound, wrong)
                return ProposalsReceived(link_id, message, sound)
            case SessionsLost(handles=handles):
                return SessionsLostByDrafter(link_id, handles)
            case Heartbeat() | EncodedMessage():
                return None
            case ReplicaReady() | ReplicaRefused():
                return ReplicaAnswered(link_id, message)
            case Hello() | ShmAnswer():
                late = f"{type(message).__name__} after the handshake"
                self.count_invalid(InvalidMessageError(late, reason="HELLO"))
                return None

    def count_invalid(self, error: InvalidMessageError, count: int = 1) -> None:
        """Count an invalid message, or `count` invalid entries of a message."""
        self.counters["messages_invalid"] += count
        logger.debug("invalid message: %s", error.message)
