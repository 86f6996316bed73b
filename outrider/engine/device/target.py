"""The target's forward from static buffers, for a CUDA graph.

M = B * N token rows (N nodes of B sessions), L layers, Q query and G key/value heads, d head
dimension, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.heads.config import FINAL_NORM
from outrider.engine.kernels.attention import tree_attention
from outrider.engine.kernels.embedding import embed
from outrider.engine.kernels.layout import RoundLayout
from outrider.engine.kernels.linear import SKINNY_ROWS, Normed, add_linear, fused_linear
from outrider.engine.kernels.norm import rms_norm
from outrider.engine.kernels.qkv import rotary_qkv
from outrider.engine.kernels.rotary import rotary_table
from outrider.engine.layers import LayerWeights
from outrider.engine.linear import plain_weights
from outrider.engine.target import TargetModel


class RoundRows(NamedTuple):
    """The sessions of a round."""

    slots: Tensor
    """int32 [B]: session slots."""
    context: Tensor
    """int32 [B]: K/V slots written before the round."""
    tables: Tensor
    """int32 [X, T]: see `SequenceState`."""


class TargetOutput(NamedTuple):
    """Results of one forward."""

    logits: Tensor
    """float32 [M, V]."""
    taps: Tensor | None
    """[M, n_taps * H]: as `outrider.engine.target.ForwardOutput.taps`."""


class TargetProgram:
    """Runs all nodes of all rows of a bucket; K/V goes to the slots after each context."""

    def __init__(self, model: TargetModel, tap_layers: tuple[int, ...] = ()) -> None:
        self._model = model
        self._config = model.config
        self.tap_layers = tap_layers
        weights = model.weights
        self._layers = [_Layer(layer) for layer in weights.layers]
        self._lm_head = plain_weights(weights.lm_head)
        self._keys = model.pool.storage[0].unbind(0)
        self._values = model.pool.storage[1].unbind(0)

    def forward(
        self, tokens: Tensor, layout: RoundLayout, rows: RoundRows, *, num_nodes: int, max_len: int
    ) -> TargetOutput:
        """Run token ids int32 [M]; ids below 0 stand for absent nodes.

        `max_len` bounds the slots that any row sees. Nothing is committed.
        """
        weights = self._model.weights
        eps = self._config.rms_norm_eps
        norms = [layer.weights.input_norm for layer in self._layers] + [weights.final_norm]
        x, normed = embed(tokens, weights.embedding, norms[0], eps)
        table = rotary_table(layout.positions, self._model.inverse_frequencies)
        outputs: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            place = _Place(index, table, layout, rows, num_nodes, max_len)
            x, normed = self._layer(layer, x, normed, norms[index + 1], place)
            if index in self.tap_layers:
                # With many rows the next layer adds to x in place.
                outputs[index] = x if x.shape[0] <= SKINNY_ROWS else x.clone()
        if FINAL_NORM in self.tap_layers:
            outputs[FINAL_NORM] = rms_norm(x, weights.final_norm, eps)
        logits = fused_linear(
            normed, self._lm_head.weight, bias=self._lm_head.bias, out_dtype=torch.float32
        )
        taps = None
        if self.tap_layers:
            taps = torch.cat([outputs[tap] for tap in self.tap_layers], dim=-1)
        return TargetOutput(logits, taps)

    def _layer(
        self, layer: _Layer, x: Tensor, normed: Normed, next_norm: Tensor, place: _Place
    ) -> tuple[Tensor, Normed]:
        """The residual stream after a layer, and its norm by `next_norm`."""
        config, weights = self._config, layer.weights
        eps, index, rows = config.rms_norm_eps, place.number, place.rows
        keys, values = self._keys[index], self._values[index]
        query = rotary_qkv(
            normed,
            layer.qkv.weight,
            place.table,
            place.layout.write_slots,
            keys,
            values,
            num_heads=config.num_heads,
            interleaved=True,
            bias=layer.qkv.bias,
            qk_norms=weights.qk_norms,
            eps=eps,
        )
        attended = tree_attention(
            query,
            keys,
            values,
            tables=rows.tables,
            slots=rows.slots,
            context=rows.context,
            num_nodes=place.num_nodes,
            mask=place.layout.mask,
            block_tokens=self._model.pool.block_tokens,
            positions=place.layout.positions,
            max_len=place.max_len,
            window=config.sliding_window,
        )
        o_proj, down = layer.o_proj, layer.down
        x, normed = add_linear(
            attended,
            o_proj.weight,
            x,
            bias=o_proj.bias,
            norm_weight=weights.post_norm,
            eps=eps,
            overwrite=True,
        )
        inner = fused_linear(normed, layer.gate_up.weight, bias=layer.gate_up.bias, gated=True)
        return add_linear(
            inner,
            down.weight,
            x,
            bias=down.bias,
            norm_weight=next_norm,
            eps=eps,
            overwrite=True,
        )


class _Place(NamedTuple):
    """What a layer must know beside its input."""

    number: int
    table: Tensor
    layout: RoundLayout
    rows: RoundRows
    num_nodes: int
    max_len: int


class _Layer:
    """A layer's weights, known to be plain."""

    __slots__ = ("down", "gate_up", "o_proj", "qkv", "weights")

    def __init__(self, weights: LayerWeights) -> None:
        self.weights = weights
        self.qkv = plain_weights(weights.qkv)
        self.o_proj = plain_weights(weights.o_proj)
        self.gate_up = plain_weights(weights.gate_up)
        self.down = plain_weights(weights.down)
