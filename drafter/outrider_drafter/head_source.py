"""Drafts from an EAGLE head: per session its K/V, batched over sessions."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.engine.device.health import device_works
from outrider.engine.heads import DraftHead
from outrider.errors import ResourceExhaustedError
from outrider.spec.plan import MAX_DRAFT_TOKENS, DraftMethod
from outrider.wire.messages import FeatureLayout, TensorDtype, WireTensor
from outrider_drafter.grow import Job, grow, make_job
from outrider_drafter.head_batch import HeadBatch, RealRows, write_rows
from outrider_drafter.headkv import HeadKV, HeadKVBudget
from outrider_drafter.sessions import Session, SessionKey
from outrider_drafter.source import Drafted

logger = logging.getLogger(__name__)

_MAX_ROWS_PER_WRITE = 1024
"""Bounds the temporary memory of a long prompt's catch-up."""


@dataclass(slots=True, eq=False)
class _State:
    """What the head keeps of a session: K/V, and the features from the last stable row on."""

    kv: HeadKV
    features: Tensor
    """[m, H]: of the last stable row, if there is one, then of the rows still to be written."""
    shut: bool = False
    """The session outgrew the budget or the head's context; it is not followed any more."""

    @property
    def fresh(self) -> int:
        """Features of rows that are not stable yet."""
        return self.features.shape[0] - (1 if self.kv.stable else 0)


class HeadSource:
    """The EAGLE-3 (or EAGLE-1/2) head as a draft source."""

    feature_layout = FeatureLayout.PROJECTED

    def __init__(
        self,
        head: DraftHead,
        *,
        max_rows: int,
        max_context: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """`max_rows` bounds the K/V rows of all sessions; `max_context` (0: the head's own) the
        draft positions of one."""
        config = head.config
        self.method = DraftMethod.EAGLE3 if config.kind == "eagle3" else DraftMethod.EAGLE
        self.feature_size = config.hidden_size
        self.feature_fingerprint = head.fingerprint
        self.head = head
        self._max_context = max_context or config.max_position_embeddings
        self._budget = HeadKVBudget(max_rows)
        self._dtype = dtype
        self._device = torch.device(device)
        self._states: dict[SessionKey, _State] = {}

    @property
    def used_rows(self) -> int:
        """K/V rows reserved now."""
        return self._budget.used_rows

    @property
    def usable(self) -> bool:
        """Whether the device still works; waits for all that was launched."""
        return device_works(self._device)

    def kv(self, handle: int, connection: int) -> tuple[Tensor, Tensor]:
        """Keys and values [nkv, S, hd] of a session's stable rows, for inspection."""
        return self._states[SessionKey(connection, handle)].kv.view()

    @torch.inference_mode()
    def catch_up(self, sessions: Sequence[Session]) -> None:
        """Write the K/V of all rows that the sessions' features allow."""
        for session in sessions:
            state = self._absorb(session)
            if not state.shut:
                self._write_ahead(session, state, keep=0)

    @torch.inference_mode()
    def drafts(self, sessions: Sequence[Session]) -> Iterator[Drafted]:
        """Catch up, then grow the trees of all sessions in one batch."""
        ready: list[Session] = []
        jobs: list[Job] = []
        rows: list[RealRows] = []
        for session in sessions:
            job = make_job(len(jobs), session)
            live = self._live_rows(session, job) if job else None
            if job and live:
                ready.append(session)
                jobs.append(job)
                rows.append(live)
        if not jobs:
            return
        batch = HeadBatch(self.head, rows)
        for session in ready:
            state = self._states[session.key]
            state.features = state.features[-1:]
        for slot, draft in grow(batch, jobs):
            rows[slot].kv.truncate(rows[slot].kv.stable)
            yield [(ready[slot], draft)]

    def release(self, session: Session) -> None:
        """Free the session's K/V."""
        state = self._states.pop(session.key, None)
        if state is not None:
            state.kv.release()

    def _live_rows(self, session: Session, job: Job) -> RealRows | None:
        """The rows to run for a draft, the live one last; None if the session cannot be drafted."""
        state = self._absorb(session)
        live = len(session.tokens) - 2
        if state.shut or live < 0 or session.feature_end != live + 1:
            return None
        if live + job.growth.depth > self._max_context:
            return None
        self._write_ahead(session, state, keep=1)
        if state.shut or not self._reserve(session, state, live + 1 + job.growth.max_rows):
            return None
        if state.kv.stable > live:
            state.kv.truncate(live)
        return RealRows(
            kv=state.kv,
            token_ids=self._tokens(session, state.kv.stable, live + 1),
            features=state.features[-(live + 1 - state.kv.stable) :],
        )

    def _absorb(self, session: Session) -> _State:
        state = self._states.get(session.key)
        if state is None:
            kv = HeadKV(
                self._budget,
                num_kv_heads=self.head.config.num_kv_heads,
                head_dim=self.head.config.head_dim,
                dtype=self._dtype,
                device=self._device,
            )
            empty = torch.empty((0, self.feature_size), dtype=self._dtype, device=self._device)
            state = self._states[session.key] = _State(kv, empty)
        if session.pending:
            if not state.shut:
                fresh = [self._feature_rows(wire) for wire in session.pending]
                state.features = torch.cat([state.features, *fresh])
            session.pending.clear()
        return state

    def _feature_rows(self, wire: WireTensor) -> Tensor:
        data = np.require(wire.data, requirements=("C", "W"))
        if wire.dtype is TensorDtype.BFLOAT16:
            rows = torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
        else:
            rows = torch.from_numpy(data)
        return rows.to(device=self._device, dtype=self._dtype)

    def _write_ahead(self, session: Session, state: _State, *, keep: int) -> None:
        """Write rows whose prediction nobody wants, but for the newest `keep`."""
        while True:
            start = state.kv.stable
            known = min(state.fresh, len(session.tokens) - 1 - start)
            count = known - keep
            if count <= 0 or (keep and known <= _MAX_ROWS_PER_WRITE):
                return
            count = min(count, _MAX_ROWS_PER_WRITE)
            if start + count > self._max_context:
                self._shut(session, state, "context")
                return
            if not self._reserve(session, state, start + count):
                return
            first = 1 if start else 0
            features = state.features[first : first + count]
            tokens = self._tokens(session, start, start + count)
            write_rows(self.head, [RealRows(kv=state.kv, token_ids=tokens, features=features)])
            state.features = state.features[first + count - 1 :]

    def _reserve(self, session: Session, state: _State, rows: int) -> bool:
        try:
            state.kv.reserve(rows, ceiling=session.max_len + MAX_DRAFT_TOKENS)
        except ResourceExhaustedError:
            self._shut(session, state, "budget")
            return False
        return True

    def _shut(self, session: Session, state: _State, why: str) -> None:
        logger.info("session not drafted", extra={"session": session.session_id, "why": why})
        state.shut = True
        state.kv.release()
        state.features = state.features[:0]

    def _tokens(self, session: Session, start: int, end: int) -> Tensor:
        """t_{i+1} of rows start .. end, int64."""
        ids = session.tokens.view[start + 1 : end + 1].astype(np.int64)
        return torch.from_numpy(ids).to(self._device)
