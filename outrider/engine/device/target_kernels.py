"""Kernels of the target's forward pass: the fastest ones, or batch-invariant ones.

Shapes: M token rows, B sessions of a row group, N rows per session, Q query and G key/value heads,
d head dimension, H hidden size, S pool slots, X session slots, T blocks of a table.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.engine.kernels.attention.invariant import invariant_attention
from outrider.engine.kernels.attention.layout import RoundLayout
from outrider.engine.kernels.attention.tree import tree_attention
from outrider.engine.kernels.embedding import embed, embed_torch
from outrider.engine.kernels.linear.fused import Normed, add_linear, fused_linear
from outrider.engine.kernels.linear.invariant import (
    invariant_add_linear,
    invariant_linear,
    invariant_qkv,
)
from outrider.engine.kernels.linear.qkv import rotary_qkv
from outrider.engine.kernels.norm import rms_norm
from outrider.engine.linear import PlainLinear


class HeadWrites(NamedTuple):
    """Inputs of one layer with which `TargetKernels.project_heads` rotates query and key heads and
    writes keys and values to the KV cache."""

    table: Tensor
    """float32 [M, 2, d/2]: cosines and sines (see `rotary.rotary_table`)."""
    write_slots: Tensor
    """int64 [M]: pool slot of each row's KV; -1 to write none."""
    keys: Tensor
    """[G, S, d]: keys of the layer in the cache; `values` has the same shape."""
    values: Tensor
    num_heads: int
    """Number Q of query heads."""
    qk_norms: Tensor | None
    """[Q + G, d]: weights of the norms of query and key heads; None if the model has no such
    norms."""
    eps: float


class RowGroup(NamedTuple):
    """Consecutive token rows of a forward pass: N rows for each of B sessions."""

    slots: Tensor
    """int32 [B]: session slots. A session may occur several times, with increasing context. This
    works because each layer writes the keys and values of all rows before any row attends to
    them."""
    context: Tensor
    """int32 [B]: number of KV slots before the first of the session's N rows."""
    round_layout: RoundLayout
    num_nodes: int
    """Number N of rows per session."""


class AttentionLimits(NamedTuple):
    """Properties of the KV cache that all layers share."""

    tables: Tensor
    """int32 [X, T]: pool blocks of each session."""
    block_tokens: int
    max_len: int
    """Maximum context length of a row, including its own nodes."""
    window: int | None


class TargetKernels(Protocol):
    """Interface of the kernels of the target's forward pass."""

    @property
    def reads_paths(self) -> bool:
        """Whether `attend` reads the paths of trees (see `RoundLayout`)."""
        ...

    def embed(
        self,
        tokens: Tensor,
        embedding: Tensor,
        norm_weight: Tensor,
        eps: float,
        *,
        out: Tensor | None,
    ) -> tuple[Tensor, Normed]:
        """Return the embeddings [M, H] of token ids int32 [M], and their RMSNorm by `norm_weight`.
        `out`: memory that may be used for the embeddings."""
        ...

    def project_heads(self, x: Normed, linear: PlainLinear, writes: HeadWrites) -> Tensor:
        """Return the rotated queries [M, Q, d] of the normed rows `x`, and write their rotated keys
        and their values to the KV cache. `linear`: fused projection of queries, keys and values."""
        ...

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        group: RowGroup,
        limits: AttentionLimits,
        *,
        out: Tensor | None,
    ) -> Tensor:
        """Return the attention output [B * N, Q * d] of queries [B * N, Q, d]. Each row attends to
        its session's context, to its ancestors in the tree and to itself."""
        ...

    def add(
        self,
        x: Tensor,
        linear: PlainLinear,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        *,
        out: Tensor | None,
    ) -> tuple[Tensor, Normed]:
        """Return residual + linear(x), and its RMSNorm by `norm_weight`. The memory of `residual`
        may be overwritten by the result. `out`: memory that may be used for the result."""
        ...

    def multiply(
        self, x: Normed, linear: PlainLinear, *, gated: bool, out_dtype: torch.dtype | None
    ) -> Tensor:
        """Return y = linear(x). If `gated` is set, return silu(a) * b instead, where a and b are
        the first and the second half of the columns of y."""
        ...


class FastKernels:
    """The fastest kernels. The order in which they add depends on the number of rows, so rounding
    does, too."""

    reads_paths = False

    def embed(
        self,
        tokens: Tensor,
        embedding: Tensor,
        norm_weight: Tensor,
        eps: float,
        *,
        out: Tensor | None,
    ) -> tuple[Tensor, Normed]:
        """See `TargetKernels`."""
        return embed(tokens, embedding, norm_weight, eps, out=out)

    def project_heads(self, x: Normed, linear: PlainLinear, writes: HeadWrites) -> Tensor:
        """See `TargetKernels`."""
        return rotary_qkv(
            x,
            linear.weight,
            writes.table,
            writes.write_slots,
            writes.keys,
            writes.values,
            num_heads=writes.num_heads,
            interleaved=True,
            bias=linear.bias,
            qk_norms=writes.qk_norms,
            eps=writes.eps,
        )

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        group: RowGroup,
        limits: AttentionLimits,
        *,
        out: Tensor | None,
    ) -> Tensor:
        """See `TargetKernels`."""
        return tree_attention(
            query,
            keys,
            values,
            tables=limits.tables,
            slots=group.slots,
            context=group.context,
            num_nodes=group.num_nodes,
            mask=group.round_layout.mask,
            block_tokens=limits.block_tokens,
            positions=group.round_layout.positions,
            max_len=limits.max_len,
            window=limits.window,
            out=out,
        )

    def add(
        self,
        x: Tensor,
        linear: PlainLinear,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        *,
        out: Tensor | None,
    ) -> tuple[Tensor, Normed]:
        """See `TargetKernels`."""
        return add_linear(
            x,
            linear.weight,
            residual,
            bias=linear.bias,
            norm_weight=norm_weight,
            eps=eps,
            overwrite=True,
            out=out,
        )

    def multiply(
        self, x: Normed, linear: PlainLinear, *, gated: bool, out_dtype: torch.dtype | None
    ) -> Tensor:
        """See `TargetKernels`."""
        return fused_linear(x, linear.weight, bias=linear.bias, gated=gated, out_dtype=out_dtype)


class InvariantKernels:
    """Batch-invariant kernels: the result of a row is bit-identical whatever other rows are in the
    batch."""

    reads_paths = True

    def embed(
        self,
        tokens: Tensor,
        embedding: Tensor,
        norm_weight: Tensor,
        eps: float,
        *,
        out: Tensor | None,
    ) -> tuple[Tensor, Normed]:
        """See `TargetKernels`."""
        x = embed_torch(tokens, embedding, out=out)
        return x, rms_norm(x, norm_weight, eps)

    def project_heads(self, x: Normed, linear: PlainLinear, writes: HeadWrites) -> Tensor:
        """See `TargetKernels`."""
        assert isinstance(x, Tensor)
        return invariant_qkv(
            x,
            linear.weight,
            writes.table,
            writes.write_slots,
            writes.keys,
            writes.values,
            num_heads=writes.num_heads,
            bias=linear.bias,
            qk_norms=writes.qk_norms,
            eps=writes.eps,
        )

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        group: RowGroup,
        limits: AttentionLimits,
        *,
        out: Tensor | None,
    ) -> Tensor:
        """See `TargetKernels`."""
        return invariant_attention(
            query,
            keys,
            values,
            tables=limits.tables,
            slots=group.slots,
            context=group.context,
            num_nodes=group.num_nodes,
            positions=group.round_layout.positions,
            paths=group.round_layout.paths,
            block_tokens=limits.block_tokens,
            max_len=limits.max_len,
            window=limits.window,
            out=out,
        )

    def add(
        self,
        x: Tensor,
        linear: PlainLinear,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        *,
        out: Tensor | None,
    ) -> tuple[Tensor, Normed]:
        """See `TargetKernels`."""
        return invariant_add_linear(
            x,
            linear.weight,
            residual,
            bias=linear.bias,
            norm_weight=norm_weight,
            eps=eps,
            overwrite=True,
            out=out,
        )

    def multiply(
        self, x: Normed, linear: PlainLinear, *, gated: bool, out_dtype: torch.dtype | None
    ) -> Tensor:
        """See `TargetKernels`."""
        assert isinstance(x, Tensor)
        return invariant_linear(
            x, linear.weight, bias=linear.bias, gated=gated, out_dtype=out_dtype
        )
