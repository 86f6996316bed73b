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
from outrider_drafter.metrics import DrafterMetrics
from outrider_drafter.proposers.forest import StepRows
from outrider_drafter.proposers.interface import (
    Outcome,
    OutcomeDrafts,
    OutcomeScores,
    PendingProposal,
    SessionDrafts,
)
from outrider_drafter.proposers.outcome_drafting import (
    ScoredProposals,
    draft_outcomes,
    score_proposals,
)
from outrider_drafter.proposers.tree_growth import StepFrontier, grow_trees, make_growth_job
from outrider_drafter.server.draft_engine import DraftEngine
from outrider_drafter.state.session import FollowedSession, VerdictLimits
from torch import Tensor

from outrider.engine.acceptance import AcceptRow, accept_drafts
from outrider.ids import SessionId
from outrider.spec.digest import EMPTY_DIGEST, extend_digest
from outrider.spec.draft_distribution import validate_distribution
from outrider.spec.plan import DraftMethod, SpeculationPlan
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
from tests.fakes.unbounded_forest import UnboundedForest


def markov(seed: int, vocab: int) -> Tensor:
    """Logits [V, V] of the next id by the newest one."""
    return torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed)) * 1.5


class TableModel:
    """A draft model that is a table; a `TreeDraftModel`."""

    target_ids: Tensor | None = None

    def __init__(self, table: Tensor, roots: Sequence[int]) -> None:
        self._table, self._roots = table, roots

    def root_logits(self) -> Tensor:
        return self._table[torch.tensor(self._roots)]

    def step(self, frontiers: Sequence[tuple[int, StepFrontier]]) -> Tensor:
        return self._table[torch.tensor([t for _, frontier in frontiers for t in frontier.tokens])]


class TableForest(UnboundedForest):
    """Draft rows of a table."""

    def __init__(self, table: Tensor, roots: Sequence[int]) -> None:
        super().__init__([0] * len(roots))
        self._table, self._roots = table, roots

    def root_logits(self) -> Tensor:
        return self._table[torch.tensor(self._roots)]

    def _run(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        positions: Sequence[int],
        spans: Sequence[StepRows],
    ) -> Tensor:
        return self._table[torch.tensor(tokens)]


class TableSource:
    """An `LookAheadProposer` over a table."""

    method = DraftMethod.MODEL
    feature_layout = FeatureLayout.NONE
    feature_size = 0
    feature_fingerprint = ""
    is_usable = True

    def __init__(self, table: Tensor) -> None:
        self._table = table
        self._ahead: ScoredProposals | None = None

    def convert_features(self, wire: WireTensor) -> NDArray[np.generic]:
        return wire.data

    def catch_up(self, sessions: Sequence[FollowedSession]) -> None:
        pass

    def draft_sessions(self, sessions: Sequence[FollowedSession]) -> Iterator[SessionDrafts]:
        jobs = [make_growth_job(slot, session) for slot, session in enumerate(sessions)]
        there = [job for job in jobs if job is not None]
        for slot, job in enumerate(there):
            job.slot = slot
        mine = [session for session, job in zip(sessions, jobs, strict=True) if job is not None]
        if there:
            model = TableModel(self._table, [int(session.tokens.view[-1]) for session in mine])
            yield SessionDrafts.of_drafts(
                [(mine[slot], draft) for slot, draft in grow_trees(model, there)]
            )

    def score_proposals(self, lives: Sequence[PendingProposal]) -> OutcomeScores:
        roots = [int(live.session.tokens.view[-1]) for live in lives]
        forest = TableForest(self._table, roots)
        self._ahead, scored = score_proposals(forest, lives, range(len(lives)))
        return scored

    def draft_outcomes(self, outcomes: Sequence[Outcome]) -> Iterator[OutcomeDrafts]:
        assert self._ahead is not None
        yield from draft_outcomes(self._ahead, outcomes)

    def release_session(self, session: FollowedSession) -> None:
        pass


def table_engine(table: Tensor, *, max_sessions: int = 64, max_context: int = 64) -> DraftEngine:
    """A drafter of a table."""
    limits = VerdictLimits(vocab_size=len(table), feature_size=0, max_context=max_context)
    return DraftEngine(
        [TableSource(table)], limits=limits, max_sessions=max_sessions, metrics=DrafterMetrics()
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

    def start(self, plan: SpeculationPlan) -> SessionStart:
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
        if proposal.distribution is not None:
            validate_distribution(proposal.distribution, proposal.tree, vocab)
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

    def announce(self, engine: DraftEngine, plan: SpeculationPlan) -> None:
        """Tell a drafter of all sessions, and of their prefixes."""
        for row in self.rows:
            engine.handle_message(1, row.start(plan))
        engine.handle_message(1, Verdicts.of_verdicts([row.verdict() for row in self.rows]))

    def receive(self, proposals: Proposals) -> None:
        """Keep drafts."""
        for proposal in proposals.iter_proposals():
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
                    distribution=None if held is None else held.distribution,
                    sampling=row.sampling,
                    position=len(row.tokens),
                )
            )
            start += 1 + len(nodes)
            self.verified += 1
            self.drafted += held is not None
        for row, outcome in zip(rows, accept_drafts(torch.cat(logits), judged), strict=True):
            assert not outcome.used_target_only_fallback
            block_manager = row.max_len - len(row.tokens)
            row.tokens += outcome.tokens[:block_manager]
            self.accepted += len(outcome.accepted_nodes)

    def tell(self, engine: DraftEngine, rows: Sequence[Row]) -> None:
        """Tell a drafter what became committed."""
        engine.handle_message(1, Verdicts.of_verdicts([row.verdict() for row in rows]))


def fresh(engine: DraftEngine) -> list[Proposals]:
    """What the engine drafts for actual prefixes, batch by batch."""
    found: list[Proposals] = []
    while engine.has_wanted_drafts:
        for together in engine.draft_wanted():
            found += [message for _, message in together if isinstance(message, Proposals)]
    return found


def ahead(engine: DraftEngine) -> list[Proposals]:
    """What the engine drafts for outcomes, until it is done."""
    assert not engine.has_wanted_drafts
    found: list[Proposals] = []
    while engine.has_look_ahead_work:
        for together in engine.run_look_ahead():
            found += [message for _, message in together if isinstance(message, Proposals)]
    return found
