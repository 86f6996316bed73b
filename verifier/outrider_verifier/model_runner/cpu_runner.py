"""One round: batch the rows, run the target, accept, commit K/V, project features.

`RoundEngine` computes with the host's help at every step, which is right on a CPU.

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

from outrider.engine.acceptance import Acceptance, accept
from outrider.engine.device.brake import LargerModel
from outrider.engine.kv_cache import KVPool
from outrider.engine.logprobs import AskedPath, PathLogprobs, logprobs_of
from outrider.engine.swap import SwapSpace
from outrider.engine.target import ForwardBatch, ForwardOutput, Segment
from outrider.wire.messages import TensorDtype
from outrider_verifier.config import VerifierConfig
from outrider_verifier.exchange.shm_features import Reserve
from outrider_verifier.model_runner.batch import Packed, PrefillRow, VerifyRow, pack
from outrider_verifier.model_runner.interface import Decoded, Flight, RoundOutcome, RowOutcome
from outrider_verifier.model_runner.kv_headroom import Slack
from outrider_verifier.model_runner.swapped_sessions import Suspended
from outrider_verifier.state.session import Session


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


@dataclass(frozen=True, slots=True, eq=False)
class _HostFlight:
    """A round that has run and is not committed."""

    outcome: RoundOutcome
    packed: list[Packed]
    launched_at: float


class RoundEngine:
    """Runs each round within `submit`; of sessions it holds only what was swapped out."""

    run_ahead = False
    drafts_itself = 0
    piece_tokens = 1
    most_prompt_tokens: int | None = None
    usable = True

    def __init__(
        self,
        target: Target,
        projection: Projection | None,
        *,
        max_nodes: int,
        feature_dtype: TensorDtype = TensorDtype.FLOAT32,
        device: torch.device | str = "cpu",
        as_of: LargerModel | None = None,
    ) -> None:
        """`max_nodes`: of a draft. `as_of`: benchmarks only, whose rounds ours
        are to last as long as."""
        self.slack = Slack(max_nodes)
        self._suspended = Suspended()
        self._target = target
        self._projection = projection
        self._device = torch.device(device)
        self._feature_dtype = feature_dtype
        self._as_of = as_of

    @classmethod
    def build(
        cls, config: VerifierConfig, target: Target, projection: Projection | None
    ) -> RoundEngine:
        """The engine of a loaded target."""
        return cls(
            target,
            projection,
            max_nodes=config.max_tree_nodes,
            feature_dtype=config.feature_dtype,
            device=config.device,
            as_of=LargerModel.asked(round_ms=config.bench_round_ms, row_us=config.bench_row_us),
        )

    @staticmethod
    def enter_thread() -> None:
        """To be called once by the thread that will run the rounds."""
        # OpenMP keeps its number of threads per thread; asking makes torch pass on the process's.
        torch.get_num_threads()

    @staticmethod
    def prompt_tokens_beside(rows: int, crowded: bool = False) -> int | None:
        """No bound."""
        return None

    @staticmethod
    def round_s(rows: int, *, own: bool, pieces: int = 0, featured: bool = False) -> float | None:
        """Not measured."""
        return None

    @staticmethod
    def verify_s(rows: int, nodes: int) -> float | None:
        """Not measured."""
        return None

    @staticmethod
    def pin(memory: NDArray[np.uint8]) -> bool:
        """Features are made where a forward wants them."""
        return False

    def land_in(self, reserve: Reserve) -> None:
        """The same."""

    @staticmethod
    def swap_space(budget_bytes: int, pool: KVPool) -> SwapSpace:
        """Room for the target's K/V."""
        return SwapSpace(budget_bytes, [pool.storage], block_tokens=pool.block_tokens)

    def open(self, session: Session) -> None:
        """Nothing to do."""

    def close(self, session: Session) -> None:
        """Forget its copy, if it was swapped out."""
        self._suspended.drop(session)

    def grown(self, session: Session) -> None:
        """Nothing to do: a forward looks at the blocks."""

    def tell_grown(self) -> None:
        """The same."""

    def suspend(self, session: Session, swap: SwapSpace | None) -> bool:
        """See `RoundRunner`."""
        return self._suspended.take(session, swap)

    def fetch(self, session: Session) -> bool:
        """See `RoundRunner`."""
        return self._suspended.fetch(session)

    def resume(self, session: Session) -> bool:
        """See `RoundRunner`."""
        return self._suspended.give(session)

    @staticmethod
    def drafted(session: Session) -> bool:
        """There is no head in this process."""
        return False

    def submit(self, prefill: Sequence[PrefillRow], verify: Sequence[VerifyRow]) -> Flight:
        """Run the round."""
        return self._run(prefill, verify)

    def landed(self, flight: Flight) -> bool:
        """Always: `submit` ran it."""
        return True

    def collect(self, flight: Flight) -> RoundOutcome:
        """What the round gave; commits its K/V."""
        assert isinstance(flight, _HostFlight)
        with torch.inference_mode():
            for row in flight.packed:
                if not row.session.ended:
                    row.session.kv.commit(row.kept)
        return flight.outcome

    @torch.inference_mode()
    def _run(self, prefill: Sequence[PrefillRow], verify: Sequence[VerifyRow]) -> _HostFlight:
        """One forward over all rows, then acceptance.

        On an exception nothing was committed: the caller ends the sessions.
        """
        packed, logit_rows = pack(prefill, verify)
        batch = self._batch(packed, logit_rows if prefill else None)
        tapped = self._projection is not None and any(p.session.keeps_features for p in packed)
        taps = self._projection.tap_layers if self._projection is not None and tapped else ()
        began = time.perf_counter()
        output = self._target.forward(batch, tap_layers=taps)
        if self._as_of is not None:
            due = began + self._as_of.seconds(len(batch.token_ids))
            time.sleep(max(0.0, due - time.perf_counter()))
        forwarded = time.perf_counter()
        acceptances = self._accept(output.logits, packed)
        logprobs = self._logprobs(output.logits, packed, acceptances)
        accepted = time.perf_counter()
        features = self._features(output.taps, packed)
        projected = time.perf_counter()
        outcomes = [
            RowOutcome((), rows)
            if acceptance is None
            else RowOutcome(
                acceptance.tokens,
                rows,
                logprobs=logprobs.get(place),
                target_only=acceptance.used_target_only_fallback,
                invalid_output=acceptance.invalid_output,
            )
            for place, (acceptance, rows) in enumerate(zip(acceptances, features, strict=True))
        ]
        outcome = RoundOutcome(
            prefill=outcomes[: len(prefill)],
            decoded=Decoded.of(outcomes[len(prefill) :]),
            rows=sum(len(row.token_ids) for row in packed),
            forward_s=forwarded - began,
            accept_s=accepted - forwarded,
            project_s=projected - accepted,
        )
        return _HostFlight(outcome, packed, launched_at=began)

    def _batch(self, packed: list[Packed], logit_rows: list[int] | None) -> ForwardBatch:
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

    def _accept(self, logits: torch.Tensor, packed: list[Packed]) -> list[Acceptance | None]:
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

    @staticmethod
    def _logprobs(
        logits: torch.Tensor, packed: list[Packed], acceptances: list[Acceptance | None]
    ) -> dict[int, PathLogprobs]:
        """What the target thought of the tokens of rows whose sessions ask, by row."""
        wanted: list[AskedPath] = []
        places: list[int] = []
        for place, (row, acceptance) in enumerate(zip(packed, acceptances, strict=True)):
            asked = row.session.spec.top_logprobs
            if asked is None or acceptance is None or row.accept_row is None:
                continue
            start = row.accept_row.logits_start
            path = [start, *(start + 1 + node for node in acceptance.accepted_nodes)]
            wanted.append(AskedPath(path, acceptance.tokens, asked))
            places.append(place)
        return dict(zip(places, logprobs_of(logits, wanted), strict=True))

    def _features(
        self, taps: torch.Tensor | None, packed: list[Packed]
    ) -> list[NDArray[np.generic] | None]:
        """Project the tapped states of all kept rows in one call; one array a row."""
        if taps is None or self._projection is None:
            return [None] * len(packed)
        wanted = [row for row in packed if row.session.keeps_features]
        index = [row.start + kept for row in wanted for kept in row.kept]
        projected = self._projection(taps[torch.tensor(index, device=self._device)])
        array = wire_array(projected, self._feature_dtype)
        result: list[NDArray[np.generic] | None] = []
        begin = 0
        for row in packed:
            if not row.session.keeps_features:
                result.append(None)
                continue
            result.append(array[begin : begin + len(row.kept)])
            begin += len(row.kept)
        return result


def wire_array(features: torch.Tensor, dtype: TensorDtype) -> NDArray[np.generic]:
    """Features in the wire's element type on the host; a view where they are that already."""
    if dtype is TensorDtype.BFLOAT16:
        bits = features.to(torch.bfloat16).contiguous().cpu().view(torch.uint16)
        return np.asarray(bits.numpy())
    return np.asarray(features.to(torch.float32).contiguous().cpu().numpy())
