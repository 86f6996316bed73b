"""Prompt chunks on a device: one forward by the general (eager) path, behind the round's launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.engine.acceptance import Acceptance, accept
from outrider.engine.heads import FeatureProjection
from outrider.engine.target import ForwardBatch, Segment, TargetModel
from outrider_verifier.packing import Packed, PrefillRow, pack


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptResult:
    """What the forward gave for one chunk; nothing is committed."""

    row: Packed
    acceptance: Acceptance | None
    """The first token; None while the prompt is incomplete."""
    features: Tensor | None
    """[m, H]: projected, of the chunk's positions."""


def run_prompts(
    target: TargetModel, projection: FeatureProjection | None, prefill: Sequence[PrefillRow]
) -> list[PromptResult]:
    """Run all chunks; features are projected where a projection is given. Waits for the device."""
    packed, logit_rows = pack(prefill, ())
    taps = projection.tap_layers if projection is not None else ()
    output = target.forward(_batch(packed, logit_rows, target.device), tap_layers=taps)
    judged = [row.accept_row for row in packed if row.accept_row is not None]
    accepted = iter(accept(output.logits, judged)) if judged else iter(())
    features = None
    if projection is not None and output.taps is not None:
        features = projection(output.taps)
    results: list[PromptResult] = []
    for row in packed:
        end = row.start + len(row.token_ids)
        acceptance = next(accepted) if row.accept_row is not None else None
        mine = None if features is None else features[row.start : end]
        results.append(PromptResult(row=row, acceptance=acceptance, features=mine))
    return results


def _batch(packed: list[Packed], logit_rows: list[int], device: torch.device) -> ForwardBatch:
    segments = [
        Segment(
            sequence=row.session.kv,
            num_rows=len(row.token_ids),
            positions=torch.from_numpy(row.positions).to(device),
        )
        for row in packed
    ]
    token_ids = np.concatenate([row.token_ids for row in packed])
    return ForwardBatch(
        token_ids=torch.from_numpy(token_ids).to(device),
        segments=segments,
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
    )
