"""One round: batch the rows, run the target, accept, commit K/V, project features.

R rows of the batch, L rows with logits, V vocabulary, H feature width.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.engine.acceptance import Acceptance, AcceptRow, accept
from outrider.engine.target import ForwardBatch, ForwardOutput, Segment
from outrider.wire.messages import Proposal, TensorDtype
from outrider_verifier.rows import Draft, tree_mask
from outrider_verifier.sessions import Session


class Target(Protocol):
    """The part of `outrider.engine.target.TargetModel` that a round needs."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    def forward(self, batch: ForwardBatch, *, tap_layers: tuple[int, ...] = ()) -> ForwardOutput:
        """Run the rows of a batch; nothing is committed."""
        ...


class Projection(Protocol):
    """The verifier's part of a draft head (`outrider.engine.heads.FeatureProjection`)."""

    fingerprint: str
    tap_layers: tuple[int, ...]
    hidden_size: int

    def __call__(self, raw: torch.Tensor) -> torch.Tensor:
        """[M, n_taps * Ht] tapped states -> [M, H] features."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefillRow:
    """The next prompt tokens of a session."""

    session: Session
    num_tokens: int

    @property
    def last(self) -> bool:
        """Whether the prompt ends in this round, so that its first token is sampled."""
        return self.num_tokens == self.session.prefill_left


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VerifyRow:
    """A session's root with the draft to verify, if any."""

    session: Session
    proposal: Proposal | None = None
    draft: Draft | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowOutcome:
    """What a round did for one row; its K/V is committed."""

    acceptance: Acceptance | None
    """None while a prompt is incomplete."""
    features: NDArray[np.generic] | None
    """[m, H] in the wire's element type, of the positions written; None if not kept."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundOutcome:
    """Outcomes in the order of the rows given, and the split of the time in seconds."""

    prefill: list[RowOutcome]
    verify: list[RowOutcome]
    rows: int
    forward_s: float
    accept_s: float
    project_s: float
    """In the draft head's `fc`, the part of its forward that runs here."""


@dataclass(slots=True, eq=False)
class _Packed:
    """One row group of the batch."""

    session: Session
    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    mask: NDArray[np.bool_] | None
    start: int
    accept_row: AcceptRow | None
    kept: list[int]
    """Rows to commit."""


class RoundEngine:
    """Runs rounds; holds no session state."""

    def __init__(
        self,
        target: Target,
        projection: Projection | None,
        *,
        feature_dtype: TensorDtype = TensorDtype.FLOAT32,
        device: torch.device | str = "cpu",
    ) -> None:
        self._target = target
        self._projection = projection
        self._device = torch.device(device)
        self._bfloat16 = feature_dtype is TensorDtype.BFLOAT16

    @staticmethod
    def enter_thread() -> None:
        """To be called once by the thread that will run the rounds."""
        # OpenMP keeps its number of threads per thread; asking makes torch pass on the process's.
        torch.get_num_threads()

    @torch.inference_mode()
    def run(self, prefill: Sequence[PrefillRow], verify: Sequence[VerifyRow]) -> RoundOutcome:
        """One forward over all rows, then acceptance and commit.

        On an exception nothing that matters was committed: the caller ends the sessions.
        """
        packed, logit_rows = _pack(prefill, verify)
        batch = self._batch(packed, logit_rows if prefill else None)
        tapped = self._projection is not None and any(p.session.keeps_features for p in packed)
        taps = self._projection.tap_layers if self._projection is not None and tapped else ()
        began = time.perf_counter()
        output = self._target.forward(batch, tap_layers=taps)
        forwarded = time.perf_counter()
        acceptances = self._accept(output.logits, packed)
        accepted = time.perf_counter()
        features = self._features(output.taps, packed)
        projected = time.perf_counter()
        for row in packed:
            row.session.kv.commit(row.kept)
        outcomes = [
            RowOutcome(acceptance=acceptance, features=rows)
            for acceptance, rows in zip(acceptances, features, strict=True)
        ]
        return RoundOutcome(
            prefill=outcomes[: len(prefill)],
            verify=outcomes[len(prefill) :],
            rows=sum(len(row.token_ids) for row in packed),
            forward_s=forwarded - began,
            accept_s=accepted - forwarded,
            project_s=projected - accepted,
        )

    def _batch(self, packed: list[_Packed], logit_rows: list[int] | None) -> ForwardBatch:
        token_ids = np.concatenate([row.token_ids for row in packed])
        segments = [
            Segment(
                sequence=row.session.kv,
                num_rows=len(row.token_ids),
                positions=self._tensor(row.positions),
                mask=None if row.mask is None else self._tensor(row.mask),
            )
            for row in packed
        ]
        return ForwardBatch(
            token_ids=self._tensor(token_ids),
            segments=segments,
            logit_rows=None if logit_rows is None else torch.tensor(logit_rows, dtype=torch.int64),
        )

    def _tensor(self, array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _accept(self, logits: torch.Tensor, packed: list[_Packed]) -> list[Acceptance | None]:
        """Judge every row that has logits and note which of its rows stay."""
        judged = [row for row in packed if row.accept_row is not None]
        if not judged:
            return [None] * len(packed)
        results = accept(logits, [row.accept_row for row in judged if row.accept_row is not None])
        by_row: dict[int, Acceptance] = {}
        for row, result in zip(judged, results, strict=True):
            by_row[id(row)] = result
            if not row.kept:
                row.kept = [0, *(1 + node for node in result.accepted_nodes)]
        return [by_row.get(id(row)) for row in packed]

    def _features(
        self, taps: torch.Tensor | None, packed: list[_Packed]
    ) -> list[NDArray[np.generic] | None]:
        """Project the tapped states of all kept rows in one call; one array a row."""
        if taps is None or self._projection is None:
            return [None] * len(packed)
        wanted = [row for row in packed if row.session.keeps_features]
        index = [row.start + kept for row in wanted for kept in row.kept]
        projected = self._projection(taps[torch.tensor(index, device=self._device)])
        array = self._wire_array(projected)
        result: list[NDArray[np.generic] | None] = []
        begin = 0
        for row in packed:
            if not row.session.keeps_features:
                result.append(None)
                continue
            result.append(array[begin : begin + len(row.kept)])
            begin += len(row.kept)
        return result

    def _wire_array(self, features: torch.Tensor) -> NDArray[np.generic]:
        if self._bfloat16:
            bits = features.to(torch.bfloat16).contiguous().cpu().view(torch.uint16)
            return np.asarray(bits.numpy())
        return np.asarray(features.to(torch.float32).contiguous().cpu().numpy())


def _pack(
    prefill: Sequence[PrefillRow], verify: Sequence[VerifyRow]
) -> tuple[list[_Packed], list[int]]:
    """Rows in batch order, and the batch rows whose logits are needed."""
    packed: list[_Packed] = []
    logit_rows: list[int] = []
    start = 0
    for chunk in prefill:
        row = _pack_prefill(chunk, start, len(logit_rows))
        packed.append(row)
        start += len(row.token_ids)
        if row.accept_row is not None:
            logit_rows.append(start - 1)
    for verified in verify:
        row = _pack_verify(verified, start, len(logit_rows))
        packed.append(row)
        logit_rows.extend(range(start, start + len(row.token_ids)))
        start += len(row.token_ids)
    return packed, logit_rows


def _pack_prefill(chunk: PrefillRow, start: int, logits_start: int) -> _Packed:
    session, begin = chunk.session, chunk.session.kv.len
    end = begin + chunk.num_tokens
    return _Packed(
        session=session,
        token_ids=session.tokens[begin:end].astype(np.int64),
        positions=np.arange(begin, end, dtype=np.int64),
        mask=None,
        start=start,
        accept_row=_accept_row(session, logits_start, None) if chunk.last else None,
        kept=list(range(chunk.num_tokens)),
    )


def _pack_verify(row: VerifyRow, start: int, logits_start: int) -> _Packed:
    session, draft = row.session, row.draft
    root_position = session.length - 1
    if draft is None:
        token_ids = np.array([session.root], dtype=np.int64)
        positions = np.array([root_position], dtype=np.int64)
        mask = None
    else:
        token_ids = np.concatenate(([session.root], draft.tree.tokens)).astype(np.int64)
        positions = np.concatenate(([0], draft.depths)).astype(np.int64) + root_position
        mask = tree_mask(draft.tree)
    return _Packed(
        session=session,
        token_ids=token_ids,
        positions=positions,
        mask=mask,
        start=start,
        accept_row=_accept_row(session, logits_start, draft),
        kept=[],
    )


def _accept_row(session: Session, logits_start: int, draft: Draft | None) -> AcceptRow:
    prompt_len = session.spec.prompt_len
    return AcceptRow(
        logits_start=logits_start,
        tree=None if draft is None else draft.tree,
        law=None if draft is None else draft.law,
        sampling=session.spec.sampling,
        position=session.length,
        prompt_ids=session.tokens[:prompt_len],
        output_ids=session.tokens[prompt_len : session.length],
        banned_now=session.banned_now,
    )
