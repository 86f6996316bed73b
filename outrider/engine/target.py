"""Target model: one forward over ragged rows of many sequences.

Shapes: R rows of the batch, V vocabulary size, H hidden size, L rows whose logits are needed. A
small draft model uses the same class with other weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.checkpoints.head_config import FINAL_NORM
from outrider.checkpoints.model_config import ModelConfig
from outrider.engine.attention import SegmentPlan, plan_segment
from outrider.engine.heads.layers import rms_norm, scaled_inverse_frequencies
from outrider.engine.invariant_segments import InvariantSegmentPlan, plan_invariant_segment
from outrider.engine.kv_cache import KVPool, KVSequence
from outrider.engine.layers import LayerContext, LayerWeights, rotations, run_layer
from outrider.engine.linear import Linear, PlainLinear, min_rows
from outrider.watchdog import record_step

__all__ = [
    "FINAL_NORM",
    "ForwardBatch",
    "ForwardOutput",
    "ModelWeights",
    "Segment",
    "TargetModel",
]


@dataclass(slots=True, kw_only=True)
class Segment:
    """Consecutive rows of a batch that belong to one sequence."""

    sequence: KVSequence
    num_rows: int
    positions: Tensor
    """Absolute positions of the rows for rotary embedding and sliding window, int64 [num_rows]."""
    mask: Tensor | None = None
    """Attention mask over the newest `span` slots, bool [num_rows, span], or None for causal
    attention.

    The newest slots are the last committed ones followed by this segment's rows, and span >=
    num_rows. Older slots are visible to all rows. With span == num_rows the mask is a tree's
    ancestor mask, including the diagonal.
    """


@dataclass(slots=True, kw_only=True)
class ForwardBatch:
    """Input of one forward pass: the rows of all segments, in order."""

    token_ids: Tensor
    """Token id of each row, int64 [R]."""
    segments: Sequence[Segment]
    logit_rows: Tensor | None = None
    """Rows whose logits are computed, int64 [L]; None means all R rows."""


@dataclass(slots=True, kw_only=True)
class ForwardOutput:
    """Results of one forward pass."""

    logits: Tensor
    """Logits of the requested rows, float32 [L, V]."""
    taps: Tensor | None = None
    """Hidden states after the layers in `tap_layers`, concatenated in that order, [R, taps * H].
    None if `tap_layers` is empty."""


@dataclass(slots=True, kw_only=True)
class ModelWeights:
    """All weights of a model."""

    embedding: Tensor
    """Token embedding, [V, H]."""
    layers: Sequence[LayerWeights]
    final_norm: Tensor
    """Weight of the final RMS norm, [H]."""
    lm_head: Linear
    """Output projection from H to V."""


class TargetModel:
    """A model that runs forward passes. It owns its weights and its KV pool."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        pool: KVPool,
        *,
        batch_invariant: bool = False,
    ) -> None:
        """Make a model of loaded weights and a KV pool.

        With `batch_invariant`, `forward` on a CPU gives a row the same bits whatever other rows the
        batch holds. The products of `weights` must then be batch-invariant, too (see
        `load_target`).
        """
        self.config = config
        self._plan_segment: Callable[..., SegmentPlan | InvariantSegmentPlan] = (
            plan_invariant_segment
            if batch_invariant
            else partial(plan_segment, num_heads=config.num_heads)
        )
        self.pool = pool
        self.weights = weights
        self._min_rows = min_rows(
            linear
            for layer in weights.layers
            for linear in (layer.qkv, layer.o_proj, layer.gate_up, layer.down)
        )
        self.inverse_frequencies = scaled_inverse_frequencies(
            config.head_dim,
            config.rope_theta,
            dict(config.rope_scaling) if config.rope_scaling else None,
            weights.embedding.device,
        )

    @property
    def vocab_size(self) -> int:
        """Number of token ids, and of logits per row."""
        return self.config.vocab_size

    @property
    def embedding(self) -> Tensor:
        """The token embedding [V, H], shared with draft heads in the same process."""
        return self.weights.embedding

    @property
    def has_plain_weights(self) -> bool:
        """Whether the weights of all linear layers are plain (not packed for oneDNN), so that
        device kernels can read them."""
        linears = [self.weights.lm_head]
        for layer in self.weights.layers:
            linears += [layer.qkv, layer.o_proj, layer.gate_up, layer.down]
        return all(isinstance(linear, PlainLinear) for linear in linears)

    @property
    def dtype(self) -> torch.dtype:
        """Element type of weights, activations and KV."""
        return self.weights.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Device on which forwards run and on which a batch's tensors must be."""
        return self.weights.embedding.device

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, *, tap_layers: tuple[int, ...] = ()) -> ForwardOutput:
        """Run a forward pass over all rows and write the KV of each segment to its sequence, from
        slot `len` on, without committing it.

        `tap_layers` are 0-based layer ids whose output hidden states are returned; FINAL_NORM
        stands for the hidden state after the final norm. A sequence may appear in only one segment.
        Raises ValueError for an inconsistent batch and ResourceExhaustedError if a sequence has too
        few slots.
        """
        num_rows = _check_batch(batch, self.config, tap_layers)
        shared = self._prepare(batch, num_rows)
        x = F.embedding(batch.token_ids, self.weights.embedding)
        if shared.attention_RQd.shape[0] > num_rows:
            x = F.pad(x, (0, 0, 0, shared.attention_RQd.shape[0] - num_rows))
        outputs: dict[int, Tensor] = {}
        for index, layer in enumerate(self.weights.layers):
            x = run_layer(layer, index, x, shared)
            # The watchdog must not take a long prompt chunk on a slow CPU for a hang.
            record_step()
            if index in tap_layers:
                outputs[index] = x[:num_rows]
        normed = None
        if FINAL_NORM in tap_layers:
            outputs[FINAL_NORM] = normed = self._final_norm(x[:num_rows])
        logits = self._logits(x[:num_rows], normed, batch.logit_rows)
        taps = torch.cat([outputs[t] for t in tap_layers], dim=-1) if tap_layers else None
        return ForwardOutput(logits=logits, taps=taps)

    def _prepare(self, batch: ForwardBatch, num_rows: int) -> LayerContext:
        config, plans = self.config, list[SegmentPlan | InvariantSegmentPlan]()
        start = 0
        for segment in batch.segments:
            segment.sequence.begin(segment.positions)
            plan = self._plan_segment(
                segment.sequence,
                self.pool,
                slice(start, start + segment.num_rows),
                mask=segment.mask,
                window=config.sliding_window,
                dtype=self.dtype,
            )
            plans.append(plan)
            start += segment.num_rows
        positions = torch.cat([segment.positions for segment in batch.segments])
        # Padding rows belong to no segment: they attend to nothing and are dropped.
        padding = max(0, self._min_rows - num_rows)
        if padding:
            positions = F.pad(positions, (0, padding))
        width = config.num_heads * config.head_dim
        return LayerContext(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            norm_eps=config.rms_norm_eps,
            rotations=rotations(
                positions,
                self.inverse_frequencies,
                num_rotated=config.num_heads + config.num_kv_heads,
                num_plain=config.num_kv_heads,
            ),
            segments=plans,
            attention_RQd=self.embedding.new_zeros((num_rows + padding, width)),
        )

    def _final_norm(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weights.final_norm, self.config.rms_norm_eps)

    def _logits(self, x: Tensor, normed: Tensor | None, rows: Tensor | None) -> Tensor:
        if normed is None:
            normed = self._final_norm(x if rows is None else x[rows])
        elif rows is not None:
            normed = normed[rows]
        return self.weights.lm_head(normed).float()


def _check_batch(batch: ForwardBatch, config: ModelConfig, tap_layers: tuple[int, ...]) -> int:
    """Check a batch and return its number of rows. Token ids are not checked, because that would
    wait for the device. Raises ValueError if the batch is inconsistent."""
    num_rows = batch.token_ids.shape[0]
    if not batch.segments or num_rows != sum(s.num_rows for s in batch.segments):
        raise ValueError(f"{num_rows} token ids do not match the rows of the segments")
    if len({id(s.sequence) for s in batch.segments}) != len(batch.segments):
        raise ValueError("a sequence may appear in one segment only")
    for segment in batch.segments:
        count, mask = segment.num_rows, segment.mask
        if count < 1 or segment.positions.shape != (count,):
            raise ValueError(f"positions {tuple(segment.positions.shape)} for {count} rows")
        if mask is None:
            continue
        if mask.shape[0] != count or not count <= mask.shape[1] <= segment.sequence.len + count:
            raise ValueError(f"mask {tuple(mask.shape)} for {count} rows")
    if any(not FINAL_NORM <= tap < config.num_layers for tap in tap_layers):
        raise ValueError(f"tap layers {tap_layers} of a model with {config.num_layers} layers")
    return num_rows
