"""Whole sessions without a process: a real drafter engine, the real acceptance, and between them
what a verifier keeps, the drafts by their digests.

A target and a draft model that are tables: logits of the next id by the newest one. V ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from outrider_drafter.metrics import Metrics
from outrider_drafter.proposers.forest import Forest, Span
from outrider_drafter.proposers.growth_driver import grow, make_job
from outrider_drafter.proposers.interface import Branches, Drafted, Live, Outcome, Scored
from outrider_drafter.proposers.outcome_drafting import Ahead, branch, score
from outrider_drafter.proposers.tree_growth import Frontier
from outrider_drafter.server.draft_engine import DraftEngine
from outrider_drafter.state.session import Limits, Session
from torch import Tensor

from outrider.engine.acceptance import AcceptRow, accept
from outrider.ids import SessionId
from outrider.spec.digest import EMPTY_DIGEST, extend_digest
from outrider.spec.draft_distribution import validate_law
from outrider.spec.plan import DraftMethod, Plan
from outrider.spec.sampling import SamplingParams
from outrider.spec.tree import validate_tree
from outrider.wire.messages import (
    FeatureLayout,
    Proposal,
    Proposals,
    SessionStart,
    Verdict,
    Verdicts,
    WireTensor,
)


def markov(seed: int, vocab: int) -> Tensor:
    """Logits [V, V] of the next id by the newest one."""
    return torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed)) * 1.5


class TableModel:
    """A draft model that is a table; a `DraftModel`."""

    target_ids: Tensor | None = None

    def __init__(self, table: Tensor, roots: Sequence[int]) -> None:
        self._table, self._roots = table, roots

    def root_logits(self) -> Tensor:
        return self._table[torch.tensor(self._roots)]

    def step(self, frontiers: Sequence[tuple[int, Frontier]]) -> Tensor:
        return self._table[torch.tensor([t for _, frontier in frontiers for t in frontier.tokens])]


class TableForest(Forest):
    """Draft rows of a table."""

    def __init__(self, table: Tensor, roots: Sequence[int]) -> None:
        super().__init__([0] * len(roots))
        self._table, self._roots = table, roots

    def root_logits(self) -> Tensor:
        return self._table[torch.tensor(self._roots)]

    def space(self, owner: int) -> int:
        return 1 << 20

    def deepest(self, owner: int) -> int:
        return 1 << 20

    def _run(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        positions: Sequence[int],
        spans: Sequence[Span],
    ) -> Tensor:
        return self._table[torch.tensor(tokens)]

    def _drop(self, kept: Sequence[int]) -> None:
        pass


class TableSource:
    """An `AheadSource` over a table."""

    method = DraftMethod.MODEL
    feature_layout = FeatureLayout.NONE
    feature_size = 0
    feature_fingerprint = ""
    usable = True

    def __init__(self, table: Tensor) -> None:
        self._table = table
        self._ahead: Ahead | None = None

    def held_features(self, wire: WireTensor) -> NDArray[np.generic]:
        return wire.data

    def catch_up(self, sessions: Sequence[Session]) -> None:
        pass

    def drafts(self, sessions: Sequence[Session]) -> Iterator[Drafted]:
        jobs = [make_job(slot, session) for slot, session in enumerate(sessions)]
        there = [job for job in jobs if job is not None]
        for slot, job in enumerate(there):
            job.slot = slot
        mine = [session for session, job in zip(sessions, jobs, strict=True) if job is not None]
        if there:
            model = TableModel(self._table, [int(session.tokens.view[-1]) for session in mine])
            yield Drafted.of([(mine[slot], draft) for slot, draft in grow(model, there)])

    def score(self, lives: Sequence[Live]) -> Scored:
        roots = [int(live.session.tokens.view[-1]) for live in lives]
        forest = TableForest(self._table, roots)
        self._ahead, scored = score(forest, lives, range(len(lives)))
        return scored

    def branch(self, outcomes: Sequence[Outcome]) -> Iterator[Branches]:
        assert self._ahead is not None
        yield from branch(self._ahead, outcomes)

    def release(self, session: Session) -> None:
        pass


def table_engine(table: Tensor, *, max_sessions: int = 64, max_context: int = 64) -> DraftEngine:
    """A drafter of a table."""
    limits = Limits(vocab_size=len(table), feature_size=0, max_context=max_context)
    return DraftEngine(
        [TableSource(table)], limits=limits, max_sessions=max_sessions, metrics=Metrics()
    )


@dataclass(eq=False)
class Row:
    """One session at its verifier."""

    handle: int
    sampling: SamplingParams
    tokens: list[int]
    max_len: int
    prompt_len: int
    told: int = 0
    inbox: dict[int, Proposal] = field(default_factory=dict)

    @property
    def digest(self) -> int:
        return extend_digest(EMPTY_DIGEST, self.tokens)

    def start(self, plan: Plan) -> SessionStart:
        return SessionStart(
            handle=self.handle,
            session_id=SessionId(f"s{self.handle}"),
            epoch=1,
            plan=plan,
            sampling=self.sampling.for_drafter(),
            max_len=self.max_len,
            prompt_len=self.prompt_len,
        )

    def verdict(self) -> Verdict:
        """What became committed since the last one."""
        told, self.told = self.told, len(self.tokens)
        return Verdict(
            handle=self.handle,
            start=told,
            tokens=np.array(self.tokens[told:], dtype=np.int32),
            prefix_digest=self.digest,
            feature_start=0,
            features=None,
            draft_wanted=True,
        )

    def receive(self, proposal: Proposal, vocab: int) -> None:
        """Keep a draft under its digest."""
        validate_tree(proposal.tree, vocab_size=vocab, max_nodes=256)
        if proposal.law is not None:
            validate_law(proposal.law, proposal.tree, vocab)
        if len(proposal.tree):
            self.inbox[proposal.prefix_digest] = proposal


class Rounds:
    """Rounds over a table that is the target."""

    def __init__(self, table: Tensor, rows: Sequence[Row]) -> None:
        self._table = table
        self.rows = list(rows)
        self._by_handle = {row.handle: row for row in rows}
        self.accepted = self.drafted = self.verified = 0

    @property
    def open(self) -> list[Row]:
        """Sessions that are not at their ends."""
        return [row for row in self.rows if len(row.tokens) < row.max_len]

    def announce(self, engine: DraftEngine, plan: Plan) -> None:
        """Tell a drafter of all sessions, and of their prefixes."""
        for row in self.rows:
            engine.handle(1, row.start(plan))
        engine.handle(1, Verdicts.of([row.verdict() for row in self.rows]))

    def receive(self, proposals: Proposals) -> None:
        """Keep drafts."""
        for proposal in proposals.entries():
            self._by_handle[proposal.handle].receive(proposal, len(self._table))

    def round(self, rows: Sequence[Row]) -> None:
        """Judge what is there for these sessions' prefixes; without a draft they decode plainly."""
        logits: list[Tensor] = []
        judged: list[AcceptRow] = []
        start = 0
        for row in rows:
            held = row.inbox.pop(row.digest, None)
            tree = None if held is None else held.tree
            nodes = [] if tree is None else tree.tokens.tolist()
            logits.append(self._table[torch.tensor([row.tokens[-1], *nodes])])
            judged.append(
                AcceptRow(
                    logits_start=start,
                    tree=tree,
                    law=None if held is None else held.law,
                    sampling=row.sampling,
                    position=len(row.tokens),
                )
            )
            start += 1 + len(nodes)
            self.verified += 1
            self.drafted += held is not None
        for row, outcome in zip(rows, accept(torch.cat(logits), judged), strict=True):
            assert not outcome.used_target_only_fallback
            room = row.max_len - len(row.tokens)
            row.tokens += outcome.tokens[:room]
            self.accepted += len(outcome.accepted_nodes)

    def tell(self, engine: DraftEngine, rows: Sequence[Row]) -> None:
        """Tell a drafter what became committed."""
        engine.handle(1, Verdicts.of([row.verdict() for row in rows]))


def fresh(engine: DraftEngine) -> list[Proposals]:
    """What the engine drafts for actual prefixes, batch by batch."""
    found: list[Proposals] = []
    while engine.wants_drafting:
        for together in engine.draft():
            found += [message for _, message in together if isinstance(message, Proposals)]
    return found


def ahead(engine: DraftEngine) -> list[Proposals]:
    """What the engine drafts for outcomes, until it is done."""
    assert not engine.wants_drafting
    found: list[Proposals] = []
    while engine.wants_look_ahead:
        for together in engine.look_ahead():
            found += [message for _, message in together if isinstance(message, Proposals)]
    return found
