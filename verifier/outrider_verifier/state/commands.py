"""Commands from the asyncio thread to the engine thread, which handles them in order between
rounds."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.grammar.grammar_constraint import GrammarConstraint
from outrider.grammar.thinking_limit import TokenBytes
from outrider.ids import DrafterId, SessionId
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.transport.shm import ShmChannel
from outrider.wire.messages import FeatureLayout, Proposals, ReplicaAnswer, SessionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeLink:
    """An exchange connection whose drafter has passed the checks of the handshake."""

    link_id: int
    """Id of the connection. A drafter that reconnects gets a new id."""
    drafter_id: DrafterId
    incarnation: str
    methods: tuple[DraftMethod, ...]
    feature_layout: FeatureLayout
    same_host: bool = False
    """Whether the link has a shared-memory channel, which both processes can have only on the same
    host."""
    reads_shm_features: bool = False
    """Whether the drafter can read features in shared memory, directly where a device has written
    them."""


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Command to serve a session. `answer` completes when the session is opened or refused."""

    ticket: int
    spec: SessionSpec
    answer: asyncio.Future[None]
    form: GrammarConstraint | None = None
    """State of the grammar after the tokens that the session has emitted so far; None without
    structured output."""
    token_bytes: TokenBytes | None = None
    """Bytes of token ids, which a session with a thinking budget needs; None if the verifier has no
    tokenizer."""


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Command to end a session and free its resources. It is ignored if the session is unknown or
    has another ticket.

    With a ticket, the command means that the session's router has left the session. Without a
    ticket, it closes the session by its id, and the session's stream ends with CANCELLED.
    """

    session_id: SessionId
    ticket: int | None = None
    answer: asyncio.Future[None] | None = None


@dataclass(frozen=True, slots=True)
class SetPlan:
    """Command to change a session's speculation plan. `answer` completes when the plan has
    changed."""

    session_id: SessionId
    plan: SpeculationPlan
    answer: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class SetDrafter:
    """Command to assign a session to another drafter, or to none if `drafter_id` is None. The
    engine answers with a `DrafterChanged`, unless the session has ended."""

    session_id: SessionId
    ticket: int
    drafter_id: DrafterId | None


@dataclass(frozen=True, slots=True)
class ProposalsReceived:
    """Notice that proposals arrived on an exchange link. If a proposal is invalid, its session no
    longer waits for it."""

    link_id: int
    proposals: Proposals
    valid: NDArray[np.bool_]
    """Whether each of the S proposals in `proposals` has passed validation, bool [S]."""


@dataclass(frozen=True, slots=True)
class MalformedMessage:
    """Notice that a message arrived on an exchange link which could not be decoded."""

    link_id: int


@dataclass(frozen=True, slots=True)
class SessionsLostByDrafter:
    """Notice that the drafter on an exchange link no longer drafts for the sessions with these
    handles."""

    link_id: int
    handles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DrafterAttached:
    """Notice that a drafter has connected and can serve sessions."""

    link: ExchangeLink
    shm_channel: ShmChannel | None = None
    """Shared-memory channel for the link's messages; None if they are sent through the asyncio
    thread."""


@dataclass(frozen=True, slots=True)
class DrafterDetached:
    """Notice that the connection of a drafter has ended."""

    link_id: int


@dataclass(frozen=True, slots=True)
class ReplicaAnswered:
    """Notice that the drafter on an exchange link has answered the offer of a device exchange."""

    link_id: int
    answer: ReplicaAnswer


@dataclass(frozen=True, slots=True)
class StopEngine:
    """Command to fail every session and end the engine thread."""


Command = (
    OpenSession
    | CloseSession
    | SetPlan
    | SetDrafter
    | ProposalsReceived
    | MalformedMessage
    | SessionsLostByDrafter
    | DrafterAttached
    | DrafterDetached
    | ReplicaAnswered
    | StopEngine
)
