# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Embedding lookup for a few tokens, faster than torch's, with the RMSNorm of the result.

Shapes: M token rows, V vocabulary size, H hidden size.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from outrider.engine.kernels.linear.fused import HalfNormed, Normed, splits_norms
from outrider.engine.kernels.norm import rms_norm
from outrider.engine.kernels.runtime import cdiv

_BLOCK: Final = 1024


def embed(
    tokens: Tensor,
    embedding: Tensor,
    norm_weight: Tensor,
    eps: float,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Normed]:
    """Return the embeddings of tokens, [M, H], and their RMSNorm as the input of the next matrix
    product.

    tokens: int32 [M]; negative ids (absent nodes) count as 0. embedding: [V, H]. norm_weight: [H].
    out: memory [M, H] that the function may use for the first result.
    """
    if splits_norms(tokens.shape[0], embedding):
        return embed_triton(tokens, embedding, norm_weight, eps)
    x = embed_torch(tokens, embedding, out=out)
    return x, rms_norm(x, norm_weight, eps)


def embed_torch(tokens: Tensor, embedding: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the embeddings of tokens, [M, H], with a PyTorch operator and without the norm."""
    rows = tokens.clamp(min=0)
    if out is None:
        return F.embedding(rows, embedding)
    return torch.index_select(embedding, 0, rows, out=out)


def embed_triton(
    tokens: Tensor, embedding: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, HalfNormed]:
    """Compute `embed` with one Triton kernel, one program per part of a row. The next matrix
    product completes the norm (see `HalfNormed`)."""
    rows, hidden = tokens.shape[0], embedding.shape[1]
    parts = cdiv(hidden, _BLOCK)
    out = torch.empty((rows, hidden), dtype=embedding.dtype, device=embedding.device)
    normed = HalfNormed(
        scaled=torch.empty_like(out),
        squares=torch.empty((parts, rows), dtype=torch.float32, device=embedding.device),
        eps=eps,
    )
    _embed[(rows, parts)](
        tokens,
        embedding,
        norm_weight,
        out,
        normed.scaled,
        normed.squares,
        rows,
        hidden,
        embedding.stride(0),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out, normed


@triton.jit(do_not_specialize=["rows"])
def _embed(
    tokens,
    embedding,
    norm_weight,
    out,
    scaled,
    squares,
    rows,
    hidden,
    stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token = tl.maximum(tl.load(tokens + row), 0).to(tl.int64)
    feature = part * BLOCK + tl.arange(0, BLOCK)
    inside = feature < hidden
    values = tl.load(embedding + token * stride + feature, mask=inside, other=0.0)
    scale = tl.load(norm_weight + feature, mask=inside, other=0.0).to(tl.float32)
    wide = values.to(tl.float32)
    tl.store(squares + part * rows + row, tl.sum(wide * wide, axis=0))
    place = row * hidden + feature
    tl.store(out + place, values, mask=inside)
    tl.store(scaled + place, (wide * scale).to(out.dtype.element_ty), mask=inside)
