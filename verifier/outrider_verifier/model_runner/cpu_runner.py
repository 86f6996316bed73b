"""CpuModelRunner: runs the target's forward pass, acceptance and feature projection on the host.

The host runs these steps one after the other and waits for each, which suits a CPU.

Letters in shapes: R rows of the batch; L rows with logits; V vocabulary; H feature width.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.engine.acceptance import AcceptanceResult, accept_drafts
from outrider.engine.kv_cache import KVPool
from outrider.engine.logprobs import LogprobPath, PathLogprobs, path_logprobs
from outrider.engine.swap import SwapSpace
from outrider.engine.target import ForwardBatch, ForwardOutput, Segment
from outrider.wire.messages import TensorDtype
from outrider_verifier.config import VerifierConfig
from outrider_verifier.exchange.shm_features import ShmAllocator
from outrider_verifier.hooks import RoundThrottle
from outrider_verifier.model_runner.batch import PackedRow, PrefillRow, VerifyRow, pack_batch
from outrider_verifier.model_runner.interface import (
    DecodeOutput,
    DraftShapeTimes,
    RoundHandle,
    RowOutput,
    RunnerOutput,
)
from outrider_verifier.model_runner.kv_headroom import KVHeadroom
from outrider_verifier.model_runner.swapped_sessions import SwappedSessions
from outrider_verifier.state.session import Session
from outrider_verifier.state.session_phase import ENDED


class TargetForward(Protocol):
    """The part of `outrider.engine.target.TargetModel` that a round needs."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    def forward(self, batch: ForwardBatch, *, tap_layers: tuple[int, ...] = ()) -> ForwardOutput:
        """Run the forward pass of a batch. The KV that it writes is not committed."""
        ...


class FeatureProjector(Protocol):
    """The feature projection of a draft head, which is the part of the head that runs in the
    verifier (`outrider.engine.heads.FeatureProjection`)."""

    fingerprint: str
    tap_layers: tuple[int, ...]
    hidden_size: int

    def __call__(self, raw: torch.Tensor) -> torch.Tensor:
        """Project the target's hidden states at `tap_layers`, concatenated per position, to
        features. `raw` has shape [M, n_taps * Ht] and the result [M, H], where M is the number of
        positions and Ht the target's hidden size."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _FinishedRound:
    """A round that was run and is not committed."""

    outcome: RunnerOutput
    packed: list[PackedRow]
    launched_at: float


class CpuModelRunner:
    """A `ModelRunner` that runs each round within `submit_round`.

    The only session state that it holds is swapped-out KV.
    """

    can_run_ahead = False
    in_process_draft_length = 0
    chunk_tokens = 1
    max_prompt_tokens: int | None = None
    is_usable = True

    def __init__(
        self,
        target: TargetForward,
        projection: FeatureProjector | None,
        *,
        max_nodes: int,
        feature_dtype: TensorDtype = TensorDtype.FLOAT32,
        device: torch.device | str = "cpu",
        throttle: RoundThrottle | None = None,
    ) -> None:
        """Create a runner. `max_nodes` is the maximum number of nodes of a draft. `throttle` makes
        rounds last longer, for tests; None adds no delay."""
        self.slot_headroom = KVHeadroom(max_nodes)
        self._suspended = SwappedSessions()
        self._target = target
        self._projection = projection
        self._device = torch.device(device)
        self._feature_dtype = feature_dtype
        self._throttle = throttle

    @classmethod
    def build(
        cls,
        config: VerifierConfig,
        target: TargetForward,
        projection: FeatureProjector | None,
        *,
        throttle: RoundThrottle | None = None,
    ) -> CpuModelRunner:
        """Return the runner of a loaded target. `throttle` makes its rounds last longer; None adds
        no delay."""
        return cls(
            target,
            projection,
            max_nodes=config.max_tree_nodes,
            feature_dtype=config.feature_dtype,
            device=config.device,
            throttle=throttle,
        )

    @staticmethod
    def enter_thread() -> None:
        """Prepare the thread that runs the rounds. This thread calls it once."""
        # OpenMP keeps its number of threads per thread; asking makes torch pass on the process's.
        torch.get_num_threads()

    def draft_shapes(self, rows: int) -> Sequence[DraftShapeTimes]:
        """Return no shapes, because there is no in-process drafter."""
        del rows
        return ()

    def set_draft_shape(self, num_nodes: int) -> None:
        """Do nothing: no drafts are made in this process."""

    @staticmethod
    def plain_round_s(rows: int, *, own: bool, chunks: int = 0) -> float | None:
        """Return None, because the times of rounds are not measured."""
        return None

    @staticmethod
    def verify_round_s(rows: int, nodes: int) -> float | None:
        """Return None, because the times of rounds are not measured."""
        return None

    @staticmethod
    def pin_memory(memory: NDArray[np.uint8]) -> bool:
        """Return False: this runner copies features to shared memory from ordinary memory, and so
        needs no pinned memory."""
        return False

    def set_feature_allocator(self, reserve: ShmAllocator) -> None:
        """Do nothing: this runner does not write features to shared memory."""

    @staticmethod
    def make_swap_space(budget_bytes: int, pool: KVPool) -> SwapSpace:
        """Return a swap space in host memory for the target's KV, of at most `budget_bytes`
        bytes."""
        return SwapSpace(budget_bytes, [pool.storage], block_tokens=pool.block_tokens)

    def open_session(self, session: Session) -> None:
        """Do nothing: this runner holds no state of a session that is not swapped out."""

    def close_session(self, session: Session) -> None:
        """Drop the copy of the session's KV, if the session was swapped out."""
        self._suspended.drop_copy(session)

    def record_new_blocks(self, session: Session) -> None:
        """Do nothing: each forward pass reads the current block list of its sessions."""

    def upload_new_blocks(self) -> None:
        """Do nothing: each forward pass reads the current block list of its sessions."""

    def suspend_session(self, session: Session, swap: SwapSpace | None) -> bool:
        """Release a session's KV blocks. Before that, copy its committed KV to `swap` if there is
        one and it has room. Return whether the KV was copied."""
        return self._suspended.swap_out(session, swap)

    def prefetch_session(self, session: Session) -> bool:
        """Start to copy a suspended session's KV back while rounds run. Return whether
        `resume_session` could now run without delaying a round."""
        return self._suspended.prefetch(session)

    def resume_session(self, session: Session) -> bool:
        """Resume a suspended session, which has reserved the blocks that it needs next. Return
        whether its KV was copied back. Otherwise the caller prefills its prefix again."""
        return self._suspended.swap_in(session)

    @staticmethod
    def has_draft_kv(session: Session) -> bool:
        """Return False: there is no in-process drafter."""
        return False

    def submit_round(
        self, prefill: Sequence[PrefillRow], verify: Sequence[VerifyRow]
    ) -> RoundHandle:
        """Run the whole round, and return it for `collect_round`, which commits its KV."""
        return self._run(prefill, verify)

    def is_finished(self, flight: RoundHandle) -> bool:
        """Return True, because `submit_round` has already run the round."""
        return True

    def collect_round(self, flight: RoundHandle) -> RunnerOutput:
        """Commit the KV of the round and return its results."""
        assert isinstance(flight, _FinishedRound)
        with torch.inference_mode():
            for row in flight.packed:
                if row.session.phase is not ENDED:
                    row.session.kv.commit(row.committed_rows)
        return flight.outcome

    @torch.inference_mode()
    def _run(self, prefill: Sequence[PrefillRow], verify: Sequence[VerifyRow]) -> _FinishedRound:
        """Run one forward over all rows, then acceptance. On an exception nothing was committed,
        and the caller ends the sessions."""
        packed, logit_rows = pack_batch(prefill, verify)
        batch = self._batch(packed, logit_rows if prefill else None)
        tapped = self._projection is not None and any(p.session.keeps_features for p in packed)
        taps = self._projection.tap_layers if self._projection is not None and tapped else ()
        began = time.perf_counter()
        output = self._target.forward(batch, tap_layers=taps)
        if self._throttle is not None:
            self._throttle.delay_forward(len(batch.token_ids), began)
        forwarded = time.perf_counter()
        acceptances = self._accept(output.logits, packed)
        logprobs = self._logprobs(output.logits, packed, acceptances)
        accepted = time.perf_counter()
        features = self._features(output.taps, packed)
        projected = time.perf_counter()
        outcomes = [
            RowOutput((), rows)
            if acceptance is None
            else RowOutput(
                acceptance.tokens,
                rows,
                logprobs=logprobs.get(place),
                is_target_only=acceptance.used_target_only_fallback,
                invalid_output=acceptance.invalid_output,
            )
            for place, (acceptance, rows) in enumerate(zip(acceptances, features, strict=True))
        ]
        outcome = RunnerOutput(
            prefill=outcomes[: len(prefill)],
            decoded=DecodeOutput.of_rows(outcomes[len(prefill) :]),
            rows=sum(len(row.token_ids) for row in packed),
            forward_s=forwarded - began,
            accept_s=accepted - forwarded,
            project_s=projected - accepted,
        )
        return _FinishedRound(outcome, packed, launched_at=began)

    def _batch(self, packed: list[PackedRow], logit_rows: list[int] | None) -> ForwardBatch:
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

    def _accept(
        self, logits: torch.Tensor, packed: list[PackedRow]
    ) -> list[AcceptanceResult | None]:
        """Run acceptance for every row that has logits, and record which of its batch rows are
        kept."""
        judged = [row for row in packed if row.accept_row is not None]
        if not judged:
            return [None] * len(packed)
        results = accept_drafts(
            logits, [row.accept_row for row in judged if row.accept_row is not None]
        )
        by_row: dict[int, AcceptanceResult] = {}
        for row, result in zip(judged, results, strict=True):
            by_row[id(row)] = result
            if not row.committed_rows:
                row.committed_rows = [0, *(1 + node for node in result.accepted_nodes)]
        return [by_row.get(id(row)) for row in packed]

    @staticmethod
    def _logprobs(
        logits: torch.Tensor, packed: list[PackedRow], acceptances: list[AcceptanceResult | None]
    ) -> dict[int, PathLogprobs]:
        """Return the target's log-probabilities of the tokens of rows whose sessions request them,
        by row."""
        wanted: list[LogprobPath] = []
        places: list[int] = []
        for place, (row, acceptance) in enumerate(zip(packed, acceptances, strict=True)):
            asked = row.session.spec.top_logprobs
            if asked is None or acceptance is None or row.accept_row is None:
                continue
            start = row.accept_row.logits_start
            path = [start, *(start + 1 + node for node in acceptance.accepted_nodes)]
            wanted.append(LogprobPath(path, acceptance.tokens, asked))
            places.append(place)
        if not wanted:
            return {}
        return dict(zip(places, path_logprobs(logits, wanted), strict=True))

    def _features(
        self, taps: torch.Tensor | None, packed: list[PackedRow]
    ) -> list[NDArray[np.generic] | None]:
        """Project the tapped hidden states of all kept rows in one call. Return one array per
        row."""
        if taps is None or self._projection is None:
            return [None] * len(packed)
        wanted = [row for row in packed if row.session.keeps_features]
        index = [row.start + kept for row in wanted for kept in row.committed_rows]
        projected = self._projection(taps[torch.tensor(index, device=self._device)])
        array = to_wire_array(projected, self._feature_dtype)
        result: list[NDArray[np.generic] | None] = []
        begin = 0
        for row in packed:
            if not row.session.keeps_features:
                result.append(None)
                continue
            result.append(array[begin : begin + len(row.committed_rows)])
            begin += len(row.committed_rows)
        return result


def to_wire_array(features: torch.Tensor, dtype: TensorDtype) -> NDArray[np.generic]:
    """Return features on the host in the element type of the wire format. If they are on the host
    in this type already, the result is a view."""
    if dtype is TensorDtype.BFLOAT16:
        bits = features.to(torch.bfloat16).contiguous().cpu().view(torch.uint16)
        return np.asarray(bits.numpy())
    return np.asarray(features.to(torch.float32).contiguous().cpu().numpy())
