"""Commands from the asyncio thread to the engine thread, handled in order between two rounds."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.grammar.grammar_constraint import GrammarConstraint
from outrider.ids import DrafterId, SessionId
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.transport.shm import ShmChannel
from outrider.wire.messages import FeatureLayout, Proposals, ReplicaAnswer, SessionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeLink:
    """One exchange connection whose drafter passed the hello checks."""

    link_id: int
    """Id of the link, unique per connection; a drafter that reconnects gets a new one."""
    drafter_id: DrafterId
    incarnation: str
    methods: tuple[DraftMethod, ...]
    feature_layout: FeatureLayout
    same_host: bool = False
    """Whether the link has a shared-memory channel, for which both ends must be on one host."""
    reads_shm_features: bool = False
    """Whether the drafter reads features in the shared memory to which a device wrote them."""


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Start serving a session; `answer` completes once the session is admitted or refused."""

    ticket: int
    spec: SessionSpec
    answer: asyncio.Future[None]
    form: GrammarConstraint | None = None
    """Grammar state after the tokens emitted so far; None without structured output."""


@dataclass(frozen=True, slots=True)
class CloseSession:
    """End a session and free its resources. Unknown sessions and other tickets are ignored.

    A command with a ticket means that the owner of the stream left. A command without a ticket
    closes the session by its id, and the session's stream ends with CANCELLED.
    """

    session_id: SessionId
    ticket: int | None = None
    answer: asyncio.Future[None] | None = None


@dataclass(frozen=True, slots=True)
class SetPlan:
    """Change a session's speculation plan."""

    session_id: SessionId
    plan: SpeculationPlan
    answer: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class SetDrafter:
    """Assign the session opened under `ticket` to another drafter, or to none if `drafter_id` is
    None. A `DrafterChanged` answers, unless the session has ended."""

    session_id: SessionId
    ticket: int
    drafter_id: DrafterId | None


@dataclass(frozen=True, slots=True)
class ProposalsReceived:
    """Proposals arrived on a link. Sessions no longer wait for proposals that are invalid."""

    link_id: int
    proposals: Proposals
    valid: NDArray[np.bool_]
    """[S] whether each of the S proposals passed validation."""


@dataclass(frozen=True, slots=True)
class MalformedMessage:
    """A message that could not be decoded arrived on a link."""

    link_id: int


@dataclass(frozen=True, slots=True)
class SessionsLostByDrafter:
    """The drafter on a link no longer drafts for the sessions with these handles."""

    link_id: int
    handles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DrafterAttached:
    """A drafter is ready to serve sessions."""

    link: ExchangeLink
    shm_channel: ShmChannel | None = None
    """Channel of the link's messages; None if they use the connection of the event loop."""


@dataclass(frozen=True, slots=True)
class DrafterDetached:
    """A drafter's connection is gone."""

    link_id: int


@dataclass(frozen=True, slots=True)
class ReplicaAnswered:
    """The drafter on a link has answered the offer of an exchange between devices."""

    link_id: int
    answer: ReplicaAnswer


@dataclass(frozen=True, slots=True)
class StopEngine:
    """Fail every session and end the engine thread."""


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
