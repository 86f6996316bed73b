"""A drafter that follows the exchange to the letter and drafts what a test's function says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.errors import OutriderError
from outrider.ids import DrafterId, SessionId
from outrider.spec.digest import EMPTY_DIGEST, extend_digest
from outrider.spec.draft_distribution import DraftDistribution
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.tree import DraftTree
from outrider.transport.interface import Dialer, DrafterConnection
from outrider.wire.messages import (
    PROTOCOL_VERSION,
    FeatureLayout,
    Hello,
    PlanChange,
    Proposal,
    Proposals,
    SessionEnd,
    SessionStart,
    Verdict,
    Verdicts,
    Welcome,
)


@dataclass(slots=True)
class Followed:
    """What the drafter was told about one session."""

    start: SessionStart
    plan: SpeculationPlan
    tokens: list[int] = field(default_factory=list)
    features: list[NDArray[np.float32]] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def digest(self) -> int:
        """Prefix digest of all tokens."""
        return extend_digest(EMPTY_DIGEST, self.tokens)


Draft = DraftTree | tuple[DraftTree, DraftDistribution | None] | None
ProposeFn = Callable[[Followed], Draft]
PredictFn = Callable[[Followed], Sequence[tuple[Sequence[int], DraftTree]]]
"""Outcomes of the draft for the present prefix: the tokens that may follow it, and a draft for
when they do."""


def make_tree(tokens: Sequence[int], parents: Sequence[int] | None = None) -> DraftTree:
    """A tree with log-probs that fall with the depth; a chain if no parents are given."""
    above = list(range(-1, len(tokens) - 1)) if parents is None else list(parents)
    logprobs: list[float] = []
    for parent in above:
        logprobs.append((logprobs[parent] if parent >= 0 else 0.0) - 0.5)
    return DraftTree(
        np.array(tokens, dtype=np.int32),
        np.array(above, dtype=np.int32),
        np.array(logprobs, dtype=np.float32),
    )


class ScriptedDrafter:
    """One connection to a verifier; drafts at once whenever a draft is wanted."""

    def __init__(
        self,
        dialer: Dialer,
        address: str,
        propose: ProposeFn,
        *,
        vocab_size: int,
        drafter_id: str = "drafter-0",
        incarnation: str = "1",
        methods: tuple[DraftMethod, ...] = (DraftMethod.EAGLE3, DraftMethod.NGRAM),
        layout: FeatureLayout = FeatureLayout.PROJECTED,
        fingerprint: str = "fake-projection",
        protocol_version: int = PROTOCOL_VERSION,
        version: str = "",
        tokenizer_hash: str = "",
        predict: PredictFn | None = None,
    ) -> None:
        """`predict`: look-ahead. What it says is sent behind the drafts for actual prefixes, and
        nothing is drafted for a prefix that it foresaw."""
        self.sessions: dict[SessionId, Followed] = {}
        self.names: dict[int, SessionId] = {}
        """By handle."""
        self.starts = 0
        self.ended: list[SessionId] = []
        self.broken: Exception | None = None
        """A violation of the protocol by the verifier, if one was seen."""
        self.muted = False
        """Reads on but proposes nothing, like a drafter whose compute hangs."""
        self.foreseen = 0
        """Prefixes that were predicted and came about."""
        self.predict = predict
        self._predicted: dict[int, set[int]] = {}
        """Digests of predicted prefixes, by handle."""
        self.connection: DrafterConnection | None = None
        self._dialer, self._address, self.propose = dialer, address, propose
        self._task: asyncio.Task[None] | None = None
        self._hello = Hello(
            protocol_version=protocol_version,
            version=version,
            drafter_id=DrafterId(drafter_id),
            incarnation=incarnation,
            vocab_size=vocab_size,
            tokenizer_hash=tokenizer_hash,
            methods=methods,
            feature_layout=layout,
            feature_fingerprint=fingerprint,
        )

    async def attach(self) -> None:
        """Connect, shake hands, and follow from now on."""
        self.connection = await self._dialer.exchange(self._address)
        await self.connection.send(self._hello)
        assert isinstance(await self.connection.receive(), Welcome)
        self._task = asyncio.create_task(self._follow(self.connection))

    async def stall(self) -> None:
        """Stop reading and writing, but keep the connection, as a hung event loop would."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def detach(self) -> None:
        """Close the connection."""
        await self.stall()
        if self.connection is not None:
            await self.connection.close()

    async def send(self, proposal: Proposal) -> None:
        """Send a proposal that nobody asked for."""
        assert self.connection is not None
        await self.connection.send(Proposals.of_proposals([proposal]))

    async def _follow(self, connection: DrafterConnection) -> None:
        try:
            with contextlib.suppress(OutriderError):
                while True:
                    message = await connection.receive()
                    match message:
                        case SessionStart():
                            self.starts += 1
                            followed = Followed(message, message.plan)
                            self.sessions[message.session_id] = followed
                            self.names[message.handle] = message.session_id
                        case Verdicts():
                            await self._verdicts(connection, message)
                        case PlanChange():
                            self.sessions[self.names[message.handle]].plan = message.plan
                        case SessionEnd():
                            name = self.names.pop(message.handle)
                            self.ended.append(name)
                            del self.sessions[name]
        except Exception as violation:
            self.broken = violation

    async def _verdicts(self, connection: DrafterConnection, message: Verdicts) -> None:
        drafts = [self._take_in(verdict) for verdict in message.iter_verdicts()]
        proposals = [draft for draft in drafts if draft is not None]
        if proposals:
            await connection.send(Proposals.of_proposals(proposals))
        ahead = [
            draft
            for verdict in message.iter_verdicts()
            if verdict.draft_wanted and not self.muted
            for draft in self._look_ahead(verdict.handle)
        ]
        if ahead:
            await connection.send(Proposals.of_proposals(ahead))

    def _look_ahead(self, handle: int) -> list[Proposal]:
        """Drafts for what may come of the present draft."""
        if self.predict is None:
            return []
        followed = self.sessions[self.names[handle]]
        drafts = [
            Proposal(
                handle=handle,
                prefix_digest=extend_digest(followed.digest, suffix),
                prefix_len=len(followed.tokens) + len(suffix),
                tree=tree,
            )
            for suffix, tree in self.predict(followed)
        ]
        self._predicted[handle] = {draft.prefix_digest for draft in drafts}
        return drafts

    def _take_in(self, verdict: Verdict) -> Proposal | None:
        """The draft for what is committed now, if one is wanted and the test has one."""
        followed = self.sessions[self.names[verdict.handle]]
        assert verdict.start == len(followed.tokens)
        followed.verdicts.append(verdict)
        followed.tokens += verdict.tokens.tolist()
        assert verdict.prefix_digest == followed.digest
        if verdict.features is not None:
            assert verdict.feature_start == len(followed.features)
            followed.features += list(verdict.features.data.astype(np.float32))
            if verdict.draft_wanted:
                assert len(followed.features) == len(followed.tokens) - 1
        if not verdict.draft_wanted or self.muted:
            return None
        if verdict.prefix_digest in self._predicted.get(verdict.handle, ()):
            self.foreseen += 1
            return None
        draft = self.propose(followed)
        if draft is None:
            return None
        tree, distribution = draft if isinstance(draft, tuple) else (draft, None)
        return Proposal(
            handle=verdict.handle,
            prefix_digest=verdict.prefix_digest,
            prefix_len=len(followed.tokens),
            tree=tree,
            distribution=distribution,
        )
