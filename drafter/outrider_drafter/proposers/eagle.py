"""EagleProposer: EAGLE head run from the host, batched over sessions, with KV per session."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.heads import DraftHead
from outrider.spec.plan import DraftMethod
from outrider.spec.tree import depths
from outrider_drafter.proposers.eagle_forest import (
    CatchUpRows,
    EagleForest,
    EagleKV,
    EagleKVBudget,
    write_catch_up_rows,
)
from outrider_drafter.proposers.forest import ForestTrees
from outrider_drafter.proposers.interface import (
    Outcome,
    OutcomeDrafts,
    OutcomeScores,
    PendingProposal,
    SessionDrafts,
    empty_scores,
)
from outrider_drafter.proposers.kv_proposer import MAX_ROWS_PER_WRITE, KVProposer, RowInputs
from outrider_drafter.proposers.outcome_drafting import (
    ScoredProposals,
    draft_outcomes,
    score_proposals,
)
from outrider_drafter.proposers.tree_growth import GrowthJob, grow_trees, make_growth_job
from outrider_drafter.state.session import FollowedSession, SessionKey


class EagleProposer(KVProposer):
    """Proposer with an EAGLE-1, EAGLE-2 or EAGLE-3 head. The host chooses the draft nodes after
    every level."""

    def __init__(
        self,
        head: DraftHead,
        *,
        max_rows: int,
        max_context: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Create a proposer without sessions. `max_rows`: maximum number of KV rows of all sessions
        together. `max_context`: maximum number of draft positions of a session; 0 uses the head's
        limit."""
        super().__init__(
            RowInputs.of_head(head),
            max_context=max_context or head.config.max_position_embeddings,
            rows_with_draft=MAX_ROWS_PER_WRITE,
            dtype=dtype,
            device=device,
        )
        self.head = head
        kind = head.config.kind
        self.method = DraftMethod.EAGLE3 if kind == "eagle3" else DraftMethod.EAGLE
        self._budget = EagleKVBudget(max_rows)
        self._kvs: dict[SessionKey, EagleKV | None] = {}
        """KV of each session; None for a session that is not followed any more."""
        self._ahead: ScoredProposals | None = None
        """The proposals that were scored last; None if something else was drafted since."""

    @property
    def used_rows(self) -> int:
        """Number of reserved KV rows."""
        return self._budget.used_rows

    def kv(self, handle: int, connection: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a session's rows, [KV heads, rows, head_dim] each, for
        inspection."""
        kv = self._kvs[SessionKey(connection, handle)]
        assert kv is not None
        return kv.as_views()

    @torch.inference_mode()
    def draft_sessions(self, sessions: Sequence[FollowedSession]) -> Iterator[SessionDrafts]:
        """Process the sessions' new tokens and features, then grow the draft trees of all sessions
        in one batch."""
        ready: list[FollowedSession] = []
        jobs: list[GrowthJob] = []
        self._ahead = None
        for session in sessions:
            job = make_growth_job(len(jobs), session)
            if job and self._ready(session, job.growth.depth, job.growth.max_rows):
                ready.append(session)
                jobs.append(job)
        if not jobs:
            return
        trees = ForestTrees.below_roots(self._forest(ready))
        for slot, draft in grow_trees(trees, jobs):
            kv = self._kv_of(ready[slot])
            kv.truncate(kv.stable)
            yield SessionDrafts.of_drafts([(ready[slot], draft)])

    @torch.inference_mode()
    def score_proposals(self, lives: Sequence[PendingProposal]) -> OutcomeScores:
        """Process the sessions' new tokens and features, run all nodes of all proposals level by
        level, and return the candidates for the next token at each root and node."""
        ready = [
            index
            for index, live in enumerate(lives)
            if self._ready(live.session, int(depths(live.tree.parents).max(initial=0)), 0)
        ]
        self._ahead = None
        if not ready:
            return empty_scores(lives)
        sessions = [lives[index].session for index in ready]
        forest = self._forest(sessions, in_own_memory=True)
        self._ahead, scored = score_proposals(forest, lives, ready)
        return scored

    @torch.inference_mode()
    def draft_outcomes(self, outcomes: Sequence[Outcome]) -> Iterator[OutcomeDrafts]:
        """Grow the drafts for all outcomes together, below the rows of the proposals that were
        scored last."""
        if self._ahead is not None:
            yield from draft_outcomes(self._ahead, outcomes)

    def release_session(self, session: FollowedSession) -> None:
        """Free the session's KV."""
        kv = self._kvs.pop(session.key, None)
        if kv is not None:
            kv.release()

    def _ready(self, session: FollowedSession, depth: int, rows: int) -> bool:
        """Prepare a session for a draft of `depth` levels with `rows` draft rows in its KV. Return
        whether the session can be drafted. Most new rows are written here; the newest ones, with
        the live row, are left for the draft to run."""
        live = self._live_row(session, depth)
        if live is None or not self._follows(session):
            return False
        self._write_ahead(session, keep=1)
        if not (self._follows(session) and self._reserve(session, live + 1 + rows)):
            return False
        self._kv_of(session).truncate(live)
        return True

    def _forest(
        self, sessions: Sequence[FollowedSession], *, in_own_memory: bool = False
    ) -> EagleForest:
        """Return a forest below these sessions' live rows, after running the real rows that are not
        written yet. `in_own_memory`: whether draft rows are stored apart from the sessions' KV."""
        rows: list[CatchUpRows] = []
        newest: list[NDArray[np.generic]] = []
        for session in sessions:
            kv, stop = self._kv_of(session), len(session.tokens) - 1
            held = session.table.features.read_rows(session.slot, kv.stable, stop)
            newest.append(held[-1])
            tokens = self._tokens(session.tokens.view[kv.stable + 1 : stop + 1])
            rows.append(CatchUpRows(kv=kv, token_ids=tokens, features=self._tensor(held)))
        forest = EagleForest(
            self.head, rows, max_context=self._max_context, in_own_memory=in_own_memory
        )
        for session, last in zip(sessions, newest, strict=True):
            session.table.features.mark_consumed(session.slot, self._stable(session), last)
        return forest

    def _kv_of(self, session: FollowedSession) -> EagleKV:
        kv = self._kvs[session.key]
        assert kv is not None, session.session_id
        return kv

    def _follows(self, session: FollowedSession) -> bool:
        if session.key not in self._kvs:
            self._kvs[session.key] = EagleKV(
                self._budget,
                num_kv_heads=self.head.config.num_kv_heads,
                head_dim=self.head.config.head_dim,
                dtype=self._dtype,
                device=self._device,
            )
        return self._kvs[session.key] is not None

    def _stable(self, session: FollowedSession) -> int:
        return self._kv_of(session).stable

    def _reserve_blocks(self, session: FollowedSession, rows: int, ceiling: int) -> None:
        self._kv_of(session).reserve(rows, ceiling=ceiling)

    def _write(
        self,
        session: FollowedSession,
        start: int,
        tokens: NDArray[np.int32],
        features: NDArray[np.generic],
    ) -> None:
        rows = CatchUpRows(
            kv=self._kv_of(session),
            token_ids=self._tokens(tokens),
            features=self._tensor(features),
        )
        write_catch_up_rows(self.head, [rows])

    def _give_up(self, session: FollowedSession) -> None:
        self._kv_of(session).release()
        self._kvs[session.key] = None

    def _tokens(self, tokens: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(tokens.astype(np.int64)).to(self._device)
