"""Draft heads (EAGLE-3, EAGLE-1/2).

A row is one token position of one session. All rows need their keys and values in the KV cache;
only the rows whose prediction is wanted run the rest of the head. One draft step over N rows with
features g (hidden states of the target) and next tokens `token_ids`:

    a = head.inputs(token_ids, g)
    k, v = head.kv(a, g, positions)            # all rows
    residual = head.residual(a, g)[idx]        # idx: rows whose prediction is wanted
    q = head.query(a[idx], positions[idx])
    o = attention(q, cached k, cached v)       # computed by the caller
    x = head.finish(residual, o)               # the feature of the next draft step
    ids = head.to_target_ids(head.logits(x).argmax(-1))

`FeatureProjection` is the part of a head that runs in the verifier. It has the same `fingerprint`
as the head that was loaded from the same checkpoint.

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
    """One-layer draft model that reads hidden states (features) of the target.

    Shapes: N rows, H hidden size, nq query heads, nkv key/value heads, hd head dimension, Vd draft
    vocabulary size.
    """

    config: HeadConfig
    fingerprint: str
    """Equal to `FeatureProjection.fingerprint` of the same checkpoint."""
    target_ids: Tensor
    """Target token id of each draft token id, int64 [Vd]."""

    def inputs(self, token_ids_N: Tensor, features_NH: Tensor) -> Tensor:
        """Return the attention input of the block: [N, 2H] for eagle3, [N, H] for eagle."""
        ...

    def residual(self, inputs: Tensor, features_NH: Tensor) -> Tensor:
        """Return the residual input of `finish`, [N, H]: the tensor to which the attention output
        is added. Each kind of head computes it differently."""
        ...

    def kv(self, inputs: Tensor, features_NH: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, each [N, nkv, hd], with RoPE applied to the keys."""
        ...

    def query(self, inputs: Tensor, positions_N: Tensor) -> Tensor:
        """Return queries [N, nq, hd] with RoPE applied."""
        ...

    def finish(self, residual_NH: Tensor, attn_out_NQh: Tensor) -> Tensor:
        """Return x [N, H], the feature of the next draft step, from the attention output. This runs
        the output projection, both residual additions and the MLP."""
        ...

    def logits(self, x_NH: Tensor) -> Tensor:
        """Return float32 logits [N, Vd] of the feature that `finish` returned."""
        ...

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Map draft token ids, a tensor of any shape, to target token ids, int64. Do not apply it
        to its own result."""
        ...
