"""Forward pass of the target over static tensors, recorded into a CUDA graph.

Shapes: M token rows, L logit rows, Q query heads, G key/value heads, S pool slots, d head
dimension, H hidden size, V vocabulary size, X session slots, T blocks of a block table. The rows of
a forward pass form groups: decoding rows and prefill chunks. A group has B sessions with N rows
each. All groups share the matrix products, and each group has an attention call of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.checkpoints.head_config import FINAL_NORM
from outrider.engine.device.target_kernels import (
    AttentionLimits,
    FastKernels,
    HeadWrites,
    RowGroup,
    TargetKernels,
)
from outrider.engine.kernels.attention.rotary import rotary_table
from outrider.engine.kernels.linear.fused import SKINNY_ROWS, Normed
from outrider.engine.kernels.norm import rms_norm
from outrider.engine.layers import LayerWeights
from outrider.engine.linear import plain_weights
from outrider.engine.target import TargetModel


class TargetOutput(NamedTuple):
    """Results of one forward pass."""

    logits: Tensor
    """float32 [L, V]: logits of the requested rows."""
    taps: Tensor | None
    """[M, n_taps * H]: outputs of the tapped layers, which are those whose outputs an EAGLE head
    reads; see `outrider.engine.target.ForwardOutput.taps`. None without tapped layers."""


class TargetProgram:
    """Runs the target over all token rows of a bucket and writes their KV to the cache, after the
    context of each session."""

    def __init__(
        self,
        model: TargetModel,
        tap_layers: tuple[int, ...] = (),
        *,
        hidden: Tensor | None = None,
        storage: Tensor | None = None,
        kernels: TargetKernels | None = None,
    ) -> None:
        """`tap_layers`: indices of the layers whose outputs are returned. `hidden`: memory [maximum
        M, H] to which the last layer's output is written, from which `logits` reads it; None to
        keep no output. `storage`: [2, L, G, S, d] (L layers), keys and values to use instead of the
        model's pool, with the same number of slots per block; None to use the pool. `kernels`:
        kernels of the forward; None for the fastest ones."""
        self._model = model
        self._kernels = kernels or FastKernels()
        self._hidden = hidden
        self._config = model.config
        self.tap_layers = tap_layers
        weights = model.weights
        self._layers = [_Layer(layer) for layer in weights.layers]
        self._lm_head = plain_weights(weights.lm_head)
        keys, values = model.pool.storage if storage is None else storage
        self._keys, self._values = keys.unbind(0), values.unbind(0)

    def run_forward(
        self,
        tokens: Tensor,
        groups: Sequence[RowGroup],
        tables: Tensor,
        *,
        max_len: int,
        logit_rows: Tensor | None = None,
    ) -> TargetOutput:
        """Run the token ids `tokens`, int32 [M], and return their logits and the outputs of the
        tapped layers. The lengths and roots of sessions do not change.

        Negative ids mark absent nodes. tables: int32 [X, T], see `SequenceState`. max_len: upper
        bound of the KV slots that any row attends to. logit_rows: int64 [L], rows whose logits are
        needed; None for all rows.
        """
        weights, eps = self._model.weights, self._config.rms_norm_eps
        x, normed, outputs = self._run(tokens, groups, tables, max_len)
        if FINAL_NORM in self.tap_layers:
            outputs[FINAL_NORM] = rms_norm(x, weights.final_norm, eps)
        if logit_rows is not None:
            normed = rms_norm(x[logit_rows], weights.final_norm, eps)
        logits = self._to_logits(normed)
        taps = None
        if self.tap_layers:
            taps = torch.cat([outputs[tap] for tap in self.tap_layers], dim=-1)
        return TargetOutput(logits, taps)

    def outputs(
        self, tokens: Tensor, groups: Sequence[RowGroup], tables: Tensor, *, max_len: int
    ) -> Tensor:
        """Run as `run_forward`, but return only the last layer's outputs [M, H]. `logits_of`
        computes logits from them."""
        return self._run(tokens, groups, tables, max_len)[0]

    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits, float32 [L, V], of some token rows of the last forward pass. rows:
        int64 [L], indices of the token rows. Needs the `hidden` buffer."""
        assert self._hidden is not None
        return self.logits_of(self._hidden.index_select(0, rows))

    def logits_of(self, outputs: Tensor) -> Tensor:
        """Return the logits, float32 [L, V], that belong to outputs [L, H] of the last layer."""
        weights = self._model.weights
        return self._to_logits(rms_norm(outputs, weights.final_norm, self._config.rms_norm_eps))

    def _run(
        self, tokens: Tensor, groups: Sequence[RowGroup], tables: Tensor, max_len: int
    ) -> tuple[Tensor, Normed, dict[int, Tensor]]:
        """Run all layers; return the last layer's output, its norm, and the outputs of the tapped
        layers."""
        weights, eps = self._model.weights, self._config.rms_norm_eps
        norms = [layer.weights.input_norm for layer in self._layers] + [weights.final_norm]
        # With many rows the layers work in place, so the last layer may write to the `hidden`
        # buffer.
        last = None if self._hidden is None else self._hidden[: tokens.shape[0]]
        x, normed = self._kernels.embed(tokens, weights.embedding, norms[0], eps, out=last)
        place = self._write_kv(groups, tables, max_len)
        outputs: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            out = last if index == len(self._layers) - 1 else None
            x, normed = self._layer(index, layer, x, normed, norms[index + 1], place, out)
            if index in self.tap_layers:
                # With many rows the next layer adds to x in place.
                outputs[index] = x if x.shape[0] <= SKINNY_ROWS else x.clone()
        return x, normed, outputs

    def _to_logits(self, normed: Normed) -> Tensor:
        return self._kernels.multiply(normed, self._lm_head, gated=False, out_dtype=torch.float32)

    def _write_kv(self, groups: Sequence[RowGroup], tables: Tensor, max_len: int) -> _LayerContext:
        positions = [group.round_layout.positions for group in groups]
        write_slots = [group.round_layout.write_slots for group in groups]
        alone = len(groups) == 1
        return _LayerContext(
            table=rotary_table(
                positions[0] if alone else torch.cat(positions), self._model.inverse_frequencies
            ),
            write_slots=write_slots[0] if alone else torch.cat(write_slots),
            groups=groups,
            limits=AttentionLimits(
                tables, self._model.pool.block_tokens, max_len, self._config.sliding_window
            ),
        )

    def _attend(self, query: Tensor, index: int, place: _LayerContext) -> Tensor:
        """Return attention outputs [M, Q * d] of queries [M, Q, d], computed group by group."""
        alone = len(place.groups) == 1
        joined = None if alone else torch.empty_like(query, memory_format=torch.contiguous_format)
        first, attended = 0, query
        for group in place.groups:
            end = first + group.slots.shape[0] * group.num_nodes
            attended = self._kernels.attend(
                query[first:end],
                self._keys[index],
                self._values[index],
                group,
                place.limits,
                out=None if joined is None else joined[first:end].flatten(1),
            )
            first = end
        return attended if joined is None else joined.flatten(1)

    def _layer(
        self,
        index: int,
        layer: _Layer,
        x: Tensor,
        normed: Normed,
        next_norm: Tensor,
        place: _LayerContext,
        out: Tensor | None,
    ) -> tuple[Tensor, Normed]:
        """Return the residual stream after a layer, and its norm by `next_norm`. `out`: memory for
        the residual stream."""
        kernels, weights, eps = self._kernels, layer.weights, self._config.rms_norm_eps
        writes = HeadWrites(
            place.table,
            place.write_slots,
            self._keys[index],
            self._values[index],
            self._config.num_heads,
            weights.qk_norms,
            eps,
        )
        query = kernels.project_heads(normed, layer.qkv, writes)
        attended = self._attend(query, index, place)
        x, normed = kernels.add(attended, layer.o_proj, x, weights.post_norm, eps, out=None)
        inner = kernels.multiply(normed, layer.gate_up, gated=True, out_dtype=None)
        return kernels.add(inner, layer.down, x, next_norm, eps, out=out)


class _LayerContext(NamedTuple):
    """Inputs that all layers of a forward share."""

    table: Tensor
    """[M, 2, d/2]: cosines and sines of the rotary embedding."""
    write_slots: Tensor
    """int64 [M]: pool slot that each row's KV is written to; -1 to write none."""
    groups: Sequence[RowGroup]
    limits: AttentionLimits


class _Layer:
    """Plain weights of one layer."""

    __slots__ = ("down", "gate_up", "o_proj", "qkv", "weights")

    def __init__(self, weights: LayerWeights) -> None:
        self.weights = weights
        self.qkv = plain_weights(weights.qkv)
        self.o_proj = plain_weights(weights.o_proj)
        self.gate_up = plain_weights(weights.gate_up)
        self.down = plain_weights(weights.down)
