"""A source that looks ahead as it is told to, and sessions that it drafts for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from outrider_drafter.proposers.interface import Branches, Drafted, Live, Outcome, Scored
from outrider_drafter.proposers.ngram import NgramSource
from outrider_drafter.proposers.tree_growth import Draft
from outrider_drafter.server.draft_engine import DraftEngine
from outrider_drafter.state.session import Session

from outrider.spec.plan import DraftMethod, Plan
from outrider.spec.tree import DraftTree
from tests.unit.drafter.helpers import Script, make_engine

C = 4
AHEAD = Plan(method=DraftMethod.NGRAM, draft_tokens=2, look_ahead=1, fan_out=3)


class Scripted(NgramSource):
    """Drafts token, token + 1 after a prefix that ends with token - 1; its candidates at a place
    are the following ids."""

    def __init__(self) -> None:
        super().__init__()
        self.scored: list[list[Session]] = []
        self.branched: list[list[Outcome]] = []
        self.batch = 64
        self.fails_in = ""
        self.works = True

    @property
    def usable(self) -> bool:  # type: ignore[override]
        return self.works

    def drafts(self, sessions: Sequence[Session]) -> Iterator[Drafted]:
        yield Drafted.of([(s, _draft(int(s.tokens.view[-1]))) for s in sessions])

    def score(self, lives: Sequence[Live]) -> Scored:
        assert self.fails_in != "score"
        self.scored.append([live.session for live in lives])
        self._lives = lives
        tokens = []
        for session, tree in lives:
            ends = np.array([session.tokens.view[-1], *tree.tokens])
            tokens.append((ends[:, None] + 1 + np.arange(C)).astype(np.int32))
        chances = np.log(np.array([0.6, 0.2, 0.12, 0.08], dtype=np.float32))
        return Scored.of(lives, tokens, [np.tile(chances, (len(t), 1)) for t in tokens])

    def branch(self, outcomes: Sequence[Outcome]) -> Iterator[Branches]:
        assert self.fails_in != "branch"
        self.branched.append(list(outcomes))
        for first in range(0, len(outcomes), self.batch):
            part = outcomes[first : first + self.batch]
            drafts = [(self._lives[o.live].session, _draft(o.token)) for o in part]
            yield Branches.of(np.arange(first, first + len(part)), Drafted.of(drafts))


def _draft(token: int) -> Draft:
    return Draft(tree=DraftTree.chain(np.array([token + 1, token + 2], np.int32)))


def counting(name: str = "s") -> Script:
    """A prefix of 0, 1, 2, ..."""
    script = Script(name)
    script.tokens[:] = np.arange(len(script.tokens))
    return script


def started(source: Scripted, *scripts: Script, plan: Plan = AHEAD, **start: Any) -> DraftEngine:
    engine = make_engine([source])
    for script in scripts:
        engine.handle(1, script.start(plan=plan, **start))
        engine.handle(1, script.verdict(10, with_features=False))
    return engine
