"""A scripted look-ahead proposer, and sessions that it drafts for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from outrider_drafter.proposers.interface import (
    Outcome,
    OutcomeDrafts,
    OutcomeScores,
    PendingProposal,
    ProposedDraft,
    SessionDrafts,
)
from outrider_drafter.proposers.ngram import NgramProposer
from outrider_drafter.server.draft_engine import DraftEngine
from outrider_drafter.state.session import FollowedSession

from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.tree import DraftTree
from tests.unit.drafter.helpers import Script, make_engine

NUM_CANDIDATES = 4
AHEAD = SpeculationPlan(method=DraftMethod.NGRAM, draft_tokens=2, look_ahead=1, fan_out=3)


class ScriptedProposer(NgramProposer):
    """Drafts token, token + 1 after a prefix that ends with token - 1.

    The candidates at a node are the NUM_CANDIDATES ids that follow its token.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scored: list[list[FollowedSession]] = []
        self.drafted_outcomes: list[list[Outcome]] = []
        self.batch = 64
        self.fails_in = ""
        self.works = True

    @property
    def is_usable(self) -> bool:  # type: ignore[override]
        return self.works

    def draft_sessions(self, sessions: Sequence[FollowedSession]) -> Iterator[SessionDrafts]:
        yield SessionDrafts.of_drafts([(s, _draft(int(s.tokens.view[-1]))) for s in sessions])

    def score_proposals(self, pending: Sequence[PendingProposal]) -> OutcomeScores:
        assert self.fails_in != "score"
        self.scored.append([each.session for each in pending])
        self.pending = pending
        tokens = []
        for session, tree in pending:
            ends = np.array([session.tokens.view[-1], *tree.tokens])
            tokens.append((ends[:, None] + 1 + np.arange(NUM_CANDIDATES)).astype(np.int32))
        chances = np.log(np.array([0.6, 0.2, 0.12, 0.08], dtype=np.float32))
        return OutcomeScores.of_candidates(
            pending, tokens, [np.tile(chances, (len(t), 1)) for t in tokens]
        )

    def draft_outcomes(self, outcomes: Sequence[Outcome]) -> Iterator[OutcomeDrafts]:
        assert self.fails_in != "outcomes"
        self.drafted_outcomes.append(list(outcomes))
        for first in range(0, len(outcomes), self.batch):
            part = outcomes[first : first + self.batch]
            drafts = [(self.pending[o.live].session, _draft(o.token)) for o in part]
            yield OutcomeDrafts.of_drafts(
                np.arange(first, first + len(part)), SessionDrafts.of_drafts(drafts)
            )


def _draft(token: int) -> ProposedDraft:
    return ProposedDraft(tree=DraftTree.chain(np.array([token + 1, token + 2], np.int32)))


def counting(name: str = "s") -> Script:
    """A prefix of 0, 1, 2, ..."""
    script = Script(name)
    script.tokens[:] = np.arange(len(script.tokens))
    return script


def started(
    proposer: ScriptedProposer, *scripts: Script, plan: SpeculationPlan = AHEAD, **start: Any
) -> DraftEngine:
    engine = make_engine([proposer])
    for script in scripts:
        engine.handle_message(1, script.start(plan=plan, **start))
        engine.handle_message(1, script.verdict(10, with_features=False))
    return engine
