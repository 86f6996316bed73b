"""Forward of the target over static buffers, recorded into a CUDA graph.

M token rows, L logit rows, Q query and G key/value heads, d head dimension, H hidden size, V
vocabulary, X session slots, T blocks of a table. The rows of a forward come in groups of B sessions
and N rows a session: decoding rows, prefill chunks. All groups share the matrix products; each has
its own attention.
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
    """Results of one forward."""

    logits: Tensor
    """float32 [L, V]."""
    taps: Tensor | None
    """[M, n_taps * H]: as `outrider.engine.target.ForwardOutput.taps`."""


class TargetProgram:
    """Runs the target over all rows of a bucket; KV goes to the slots after each context."""

    def __init__(
        self,
        model: TargetModel,
        tap_layers: tuple[int, ...] = (),
        *,
        hidden: Tensor | None = None,
        storage: Tensor | None = None,
        kernels: TargetKernels | None = None,
    ) -> None:
        """`hidden`: where the last layer's output [M, H] goes, for `logits`; [most M, H].
        `storage` [2, L, G, S, d]: other keys and values than the model's pool, in blocks of as many
        slots. `kernels`: None for the fastest."""
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
        """Run token ids int32 [M]; ids below 0 stand for absent nodes.

        tables int32 [X, T]: see `SequenceState`. `max_len` bounds the slots that any row sees.
        logit_rows int64 [L]: rows whose logits are wanted; None: all. Nothing is committed.
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
        """As `forward`, but for the last layer's outputs [M, H] alone; see `logits_of`."""
        return self._run(tokens, groups, tables, max_len)[0]

    def logits(self, rows: Tensor) -> Tensor:
        """Logits float32 [L, V] of token rows int64 [L] of the last forward; `hidden` was given."""
        assert self._hidden is not None
        return self.logits_of(self._hidden.index_select(0, rows))

    def logits_of(self, outputs: Tensor) -> Tensor:
        """Logits float32 [L, V] of the last layer's outputs [L, H]."""
        weights = self._model.weights
        return self._to_logits(rms_norm(outputs, weights.final_norm, self._config.rms_norm_eps))

    def _run(
        self, tokens: Tensor, groups: Sequence[RowGroup], tables: Tensor, max_len: int
    ) -> tuple[Tensor, Normed, dict[int, Tensor]]:
        """All layers: the last one's output, its norm, and what is tapped of the others."""
        weights, eps = self._model.weights, self._config.rms_norm_eps
        norms = [layer.weights.input_norm for layer in self._layers] + [weights.final_norm]
        # With many rows the layers work in place, and so the last one where it is wanted.
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
        """[M, Q * d] of queries [M, Q, d]: group by group."""
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
        """The residual stream after a layer, and its norm by `next_norm`; `out`: its memory."""
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
    """What every layer must know beside its input."""

    table: Tensor
    """[M, 2, d/2]: cos and sin."""
    write_slots: Tensor
    """int64 [M]."""
    groups: Sequence[RowGroup]
    limits: AttentionLimits


class _Layer:
    """A layer's weights, known to be plain."""

    __slots__ = ("down", "gate_up", "o_proj", "qkv", "weights")

    def __init__(self, weights: LayerWeights) -> None:
        self.weights = weights
        self.qkv = plain_weights(weights.qkv)
        self.o_proj = plain_weights(weights.o_proj)
        self.gate_up = plain_weights(weights.gate_up)
        self.down = plain_weights(weights.down)
