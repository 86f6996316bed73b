"""Draft heads (EAGLE-3, EAGLE-1/2). Rows whose prediction is not needed only compute their KV.

A draft step over rows N with features g, next tokens e and draft positions:

    a = head.inputs(token_ids, g)
    k, v = head.kv(a, g, positions)            # every row: KV must be written
    live = a[idx], head.residual(a, g)[idx]    # rows whose prediction is wanted
    q = head.query(live_a, live_positions)
    o = attention(q, cached k, cached v)       # the caller's
    x = head.finish(live_residual, o)          # the feature of the next draft step
    ids = head.to_target_ids(head.logits(x).argmax(-1))

`FeatureProjection` is the part that runs in the verifier; both have the same `fingerprint`.

eagle.py                   EAGLE-1/2 draft head.
eagle3.py                  EAGLE-3 draft head.
layers.py                  Building blocks of draft heads: RMSNorm, rotary embedding, the pluggable
                           linear factory.
loading.py                 Draft head loader for checkpoints in the original EAGLE or the
                           `speculators` format.
projection.py              Feature projection of a draft head, run by the verifier: target features
                           to the head's width.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from outrider.checkpoints.head_config import (
    FINAL_NORM,
    HeadConfig,
    default_tap_layers,
    load_head_config,
)
from outrider.engine.heads.loading import load_feature_projection, load_head
from outrider.engine.heads.projection import FeatureProjection

__all__ = [
    "FINAL_NORM",
    "DraftHead",
    "FeatureProjection",
    "HeadConfig",
    "default_tap_layers",
    "load_feature_projection",
    "load_head",
    "load_head_config",
]


class DraftHead(Protocol):
    """One-layer draft model over target features.

    Shapes: N rows, H hidden size, nq query heads, nkv key/value heads, hd head dimension, Vd draft
    vocabulary size.
    """

    config: HeadConfig
    fingerprint: str
    """Equal to `FeatureProjection.fingerprint` of the same checkpoint."""
    target_ids: Tensor
    """Target id of every draft id, int64 [Vd]."""

    def inputs(self, token_ids_N: Tensor, features_NH: Tensor) -> Tensor:
        """Return the attention input of the block: [N, 2H] for eagle3, [N, H] for eagle."""
        ...

    def residual(self, inputs: Tensor, features_NH: Tensor) -> Tensor:
        """Return the start [N, H] of the residual branch for `finish`, which differs by kind of
        head."""
        ...

    def kv(self, inputs: Tensor, features_NH: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, each [N, nkv, hd], with RoPE applied to the keys."""
        ...

    def query(self, inputs: Tensor, positions_N: Tensor) -> Tensor:
        """Return queries [N, nq, hd] with RoPE applied."""
        ...

    def finish(self, residual_NH: Tensor, attn_out_NQh: Tensor) -> Tensor:
        """Run output projection, residuals and MLP; return x [N, H], the feature of the next draft
        step."""
        ...

    def logits(self, x_NH: Tensor) -> Tensor:
        """Return float32 logits [N, Vd] of the feature that `finish` returned."""
        ...

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Return the target ids of draft ids of any shape, int64. Apply exactly once."""
        ...
