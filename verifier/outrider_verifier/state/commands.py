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
    """Unique per connection; a drafter that reconnects gets a new one."""
    drafter_id: DrafterId
    incarnation: str
    methods: tuple[DraftMethod, ...]
    feature_layout: FeatureLayout
    same_host: bool = False
    """Whether it has a shared-memory channel, which is possible on one host alone."""
    reads_shm_features: bool = False
    """Whether it reads features where a device has put them."""


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Start serving a session; `answer` is settled once it is admitted or refused."""

    ticket: int
    spec: SessionSpec
    answer: asyncio.Future[None]
    form: GrammarConstraint | None = None
    """Of its structured output, behind what was emitted; None: it has none."""


@dataclass(frozen=True, slots=True)
class CloseSession:
    """End a session and free all it holds; unknown sessions and other tickets are ignored.

    With a ticket the owner of the stream left; without one, the session is closed by its id and
    its stream ends with CANCELLED.
    """

    session_id: SessionId
    ticket: int | None = None
    answer: asyncio.Future[None] | None = None


@dataclass(frozen=True, slots=True)
class SetPlan:
    """Change a session's plan."""

    session_id: SessionId
    plan: SpeculationPlan
    answer: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class SetDrafter:
    """Give the session that was opened under a ticket to another drafter, or to none; a
    `DrafterChanged` answers, unless the session has ended."""

    session_id: SessionId
    ticket: int
    drafter_id: DrafterId | None


@dataclass(frozen=True, slots=True)
class ProposalsReceived:
    """Proposals arrived on a link. Nobody waits any longer for those that are not sound."""

    link_id: int
    proposals: Proposals
    valid: NDArray[np.bool_]
    """[S]"""


@dataclass(frozen=True, slots=True)
class MalformedMessage:
    """A message arrived on a link that could not be read."""

    link_id: int


@dataclass(frozen=True, slots=True)
class SessionsLostByDrafter:
    """The drafter on a link follows these sessions no longer."""

    link_id: int
    handles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DrafterAttached:
    """A drafter is ready to serve sessions."""

    link: ExchangeLink
    shm_channel: ShmChannel | None = None
    """What the link's messages go by; None: the connection that the event loop serves."""


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
