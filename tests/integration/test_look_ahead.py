"""Verifier and drafter together, a round ahead: the same texts as without, and hits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from outrider_drafter.config import DrafterConfig
from outrider_drafter.proposers.forest import ForestTrees, StepRows
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
from outrider_drafter.proposers.tree_growth import grow_trees, make_growth_job
from outrider_drafter.server.service import DrafterService, TargetIdentity
from outrider_drafter.state.session import FollowedSession
from torch import Tensor

from outrider.spec.digest import EMPTY_DIGEST, extend_digest
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import Rule, SamplingParams
from outrider.wire.messages import FeatureLayout, WireTensor
from tests.fakes.target import FakeTarget
from tests.fakes.unbounded_forest import UnboundedForest
from tests.unit.drafter.running_service import FAST
from tests.unit.verifier.harness import ADDRESS, DRAFTER, make_spec, verifier
from tests.waiting import until

WAITS = 30_000
"""However slow this machine is, no round gives up on its drafter."""
CHAIN = SpeculationPlan(
    method=DraftMethod.NGRAM, draft_tokens=3, look_ahead=1, fan_out=8, proposal_timeout_ms=WAITS
)
TREE = SpeculationPlan(
    method=DraftMethod.NGRAM, draft_tokens=6, top_k=3, look_ahead=1, proposal_timeout_ms=WAITS
)


class ContextForest(UnboundedForest):
    """Draft rows of a model that is a function of the whole context."""

    def __init__(self, target: FakeTarget, contexts: Sequence[list[int]]) -> None:
        super().__init__([len(context) for context in contexts])
        self._target = target
        self._contexts = list(contexts)
        self._sessions = len(contexts)

    def root_logits(self) -> Tensor:
        return torch.stack([self._guess(c) for c in self._contexts[: self._sessions]])

    def _run(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        positions: Sequence[int],
        spans: Sequence[StepRows],
    ) -> Tensor:
        contexts = [[*self._contexts[p], t] for p, t in zip(parents, tokens, strict=True)]
        assert [len(context) - 1 for context in contexts] == list(positions)
        self._contexts += contexts
        return torch.stack([self._guess(context) for context in contexts])

    def _drop(self, kept: Sequence[int]) -> None:
        del self._contexts[len(self) :]

    def _guess(self, context: list[int]) -> Tensor:
        """The target's logits, four times in five nearly so."""
        wrong = extend_digest(EMPTY_DIGEST, context) % 5 == 0
        other = self._target.logits([*context, 0])
        return torch.from_numpy(self._target.logits(context) + (2.0 if wrong else 0.1) * other)


class ContextSource:
    """An `LookAheadProposer` of such rows."""

    method = DraftMethod.NGRAM
    feature_layout = FeatureLayout.NONE
    feature_size = 0
    feature_fingerprint = ""
    is_usable = True

    def __init__(self, target: FakeTarget) -> None:
        self._target = target
        self._ahead: ScoredProposals | None = None

    def convert_features(self, wire: WireTensor) -> NDArray[np.generic]:
        return wire.data

    def catch_up(self, sessions: Sequence[FollowedSession]) -> None:
        """Nothing to do."""

    def draft_sessions(self, sessions: Sequence[FollowedSession]) -> Iterator[SessionDrafts]:
        pairs = [(session, make_growth_job(0, session)) for session in sessions]
        jobs = [job for _, job in pairs if job is not None]
        mine = [session for session, job in pairs if job is not None]
        if not jobs:
            return
        for slot, job in enumerate(jobs):
            job.slot = slot
        texts = [session.tokens.view.tolist() for session in mine]
        forest = ContextForest(self._target, [text[:-1] for text in texts])
        last = [text[-1] for text in texts]
        model = ForestTrees.below_outcomes(forest, last, range(len(texts)))
        yield SessionDrafts.of_drafts(
            [(mine[slot], draft) for slot, draft in grow_trees(model, jobs)]
        )

    def score_proposals(self, lives: Sequence[PendingProposal]) -> OutcomeScores:
        forest = ContextForest(self._target, [x.session.tokens.view.tolist() for x in lives])
        self._ahead, scored = score_proposals(forest, lives, range(len(lives)))
        return scored

    def draft_outcomes(self, outcomes: Sequence[Outcome]) -> Iterator[OutcomeDrafts]:
        assert self._ahead is not None
        yield from draft_outcomes(self._ahead, outcomes)

    def release_session(self, session: FollowedSession) -> None:
        """Nothing is held."""


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("rule", [Rule.GREEDY, Rule.COUPLED])
async def test_texts_of_a_round_ahead_are_those_of_plain_decoding(
    rule: Rule, plan: SpeculationPlan
) -> None:
    async with verifier(target=FakeTarget(num_blocks=1024)) as rig:
        rig.target.forward_s = 0.05
        service = DrafterService(
            DrafterConfig(
                drafter_id=DRAFTER,
                methods=(DraftMethod.NGRAM,),
                reconnect=FAST,
                limit_look_ahead_time=False,
            ),
            [ContextSource(rig.target)],
            rig.network.dialer(),
            identity=TargetIdentity(vocab_size=rig.target.vocab_size),
        )
        await service.attach(ADDRESS)
        await until(lambda: bool(rig.service.drafter_connections.links))
        specs = [
            make_spec(
                f"s{n}",
                prompt=(3, 1, 4, n),
                max_new_tokens=30,
                plan=plan,
                sampling=SamplingParams(
                    temperature=0.0 if rule is Rule.GREEDY else 0.8, rule=rule, seed=n
                ),
            )
            for n in range(2)
        ]
        results = await rig.run_all(specs)
        hits = service.metrics.registry.get_sample_value(
            "outrider_drafter_outcomes_total", {"result": "hit"}
        )
        await service.close()
    assert hits is not None and hits > 0
    for result, spec in zip(results, specs, strict=True):
        assert result.tokens == rig.reference(spec)
        # Of a hit the drafter says nothing more: its branch was there.
        assert result.last.stats.fallback_rounds == 0
        assert result.last.stats.accepted > 0
