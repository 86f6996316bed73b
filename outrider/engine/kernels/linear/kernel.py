"""Triton kernel of the weight-streaming (skinny) matrix product.

`linear.fused.fused_linear_triton` launches it. Shapes: M rows of x, C output columns, K features,
ROWS weight rows of a tile (one per output column, or two if the product is gated).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from outrider.engine.kernels.runtime import dot


@triton.jit
def _finish(
    product,
    tile,
    bias,
    residual,
    out,
    next_norm,
    scaled,
    squares,
    M,
    C,
    residual_stride,
    m,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    NORM_OUT: tl.constexpr,
    ROUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Apply bias, activation and residual to one tile [BLOCK_M, ROWS] of the product, and store the
    result. With NORM_OUT, also store the tile's part of the first half of the next norm."""
    BLOCK_N: tl.constexpr = ROWS // 2 if GATED else ROWS
    if HAS_BIAS:
        place = tl.arange(0, ROWS)
        at = tile * BLOCK_N + place % BLOCK_N
        at_row = at + (place // BLOCK_N) * C
        product += tl.load(bias + at_row, mask=at < C, other=0.0).to(tl.float32)[None, :]
    if ROUNDED and (GATED or HAS_RESIDUAL):
        product = product.to(out.dtype.element_ty).to(tl.float32)
    if GATED:
        pairs = tl.permute(tl.reshape(product, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1))
        gate, up = tl.split(pairs)
        result = gate * tl.sigmoid(gate) * up
    else:
        result = product
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (m < M)[:, None] & (column < C)[None, :]
    if HAS_RESIDUAL:
        at_residual = m[:, None] * residual_stride + column[None, :]
        result += tl.load(residual + at_residual, mask=inside, other=0.0).to(tl.float32)
    at_out = m[:, None] * C + column[None, :]
    rounded = result.to(out.dtype.element_ty)
    tl.store(out + at_out, rounded, mask=inside)
    if NORM_OUT:
        values = tl.where(inside, rounded.to(tl.float32), 0.0)
        tl.store(squares + tile * M + m, tl.sum(values * values, axis=1), mask=m < M)
        scale = tl.load(next_norm + column, mask=column < C, other=0.0).to(tl.float32)
        tl.store(scaled + at_out, (values * scale[None, :]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _load_rotary(
    table,
    write_slots,
    tile,
    M,
    m,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return the cosines and sines for one tile's pairs of elements, float32 [BLOCK_M, ROWS / 2]
    (see `rotary.rotary_table`), and the KV pool slots of its rows (-1 for query heads)."""
    head = tile * ROWS // DIM
    # Written so that the compiler sees what the start is a multiple of, and loads wide.
    pair = tile % (DIM // ROWS) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    at = table + m[:, None] * DIM + pair[None, :]
    turns = (m < tl.where(head < QUERY_HEADS + KV_HEADS, M, 0))[:, None]
    cos = tl.load(at, mask=turns, other=1.0)
    sin = tl.load(at + DIM // 2, mask=turns, other=0.0)
    kept = m < tl.where(head < QUERY_HEADS, 0, M)
    slot = tl.load(write_slots + m, mask=kept, other=-1)
    return cos, sin, slot


@triton.jit
def _finish_rotary(
    product,
    cos,
    sin,
    slot,
    tile,
    bias,
    out,
    keys,
    values,
    M,
    keys_stride,
    values_stride,
    m,
    HAS_BIAS: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Apply bias and rotation to one tile of a head, and store the result: queries to `out`, keys
    and values to the KV cache."""
    start = tile * ROWS
    place = tl.arange(0, ROWS)
    if HAS_BIAS:
        product += tl.load(bias + start + place).to(tl.float32)[None, :]
    if ROUNDED:
        product = product.to(out.dtype.element_ty).to(tl.float32)
    head = start // DIM
    first, second = tl.split(tl.reshape(product, (BLOCK_M, ROWS // 2, 2)))
    # The value heads keep their bits. Chosen within the pairs: a branch, or a choice after the
    # join, would hold the product in the layout it came in, for more exchanges between threads.
    turns = head < QUERY_HEADS + KV_HEADS
    # Written as they are rounded, like those of `rotary`, so that no compiler chooses.
    turned_first = tl.where(turns, tl.fma(first, cos, -(second * sin)), first)
    turned_second = tl.where(turns, tl.fma(first, sin, second * cos), second)
    result = tl.reshape(tl.join(turned_first, turned_second), (BLOCK_M, ROWS))
    result = result.to(out.dtype.element_ty)
    if head < QUERY_HEADS:
        at_query = m[:, None] * (QUERY_HEADS * DIM) + (start + place)[None, :]
        tl.store(out + at_query, result, mask=(m < M)[:, None])
    else:
        at_slot = slot[:, None] * DIM + (tile % (DIM // ROWS) * ROWS + place)[None, :]
        kv_head = (head - QUERY_HEADS).to(tl.int64)
        if kv_head < KV_HEADS:
            tl.store(keys + kv_head * keys_stride + at_slot, result, mask=(slot >= 0)[:, None])
        else:
            plain = values + (kv_head - KV_HEADS) * values_stride
            tl.store(plain + at_slot, result, mask=(slot >= 0)[:, None])


@triton.jit(do_not_specialize=["M"])
def skinny_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    workspace,
    counters,
    x_squares,
    next_norm,
    scaled,
    squares,
    table,
    write_slots,
    keys,
    values,
    M,
    C,
    K,
    parts,
    x_stride,
    weight_stride,
    residual_stride,
    keys_stride,
    values_stride,
    eps,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    NORM_IN: tl.constexpr,
    NORM_OUT: tl.constexpr,
    ROTARY: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP: tl.constexpr,
    ROUNDED: tl.constexpr,
    SEVERAL: tl.constexpr,
):
    """Compute one tile of the C output columns, over one of SPLIT_K parts of K.

    A gated tile reads its gate rows and, C rows further down, its up rows as one tile of the
    weight. If several programs share a tile, the last one to finish adds all partial sums in a
    fixed order. NORM_IN: x is the first half of an RMSNorm, and the product is divided by the root
    mean square from `x_squares`. ROTARY: the columns are heads of DIM elements, and a tile lies
    within one head. ROUNDED: the product is rounded to the dtype of `out` before an activation, a
    rotation or a residual, as cuBLAS and separate kernels do. SEVERAL: there are more rows than
    BLOCK_M. Programs for the same tile of columns have consecutive ids, so that they share its
    weights in the L2 cache.
    """
    BLOCK_N: tl.constexpr = ROWS // 2 if GATED else ROWS
    tile = tl.program_id(0)
    m = tl.arange(0, BLOCK_M)
    if SEVERAL:
        row_tiles = tl.cdiv(M, BLOCK_M)
        m += tile % row_tiles * BLOCK_M
        tile = tile // row_tiles
    part = tl.program_id(1)
    place = tl.arange(0, ROWS)
    # Rows past the end read the last row again: cheaper than a mask in the loop.
    row = tl.minimum(tile * BLOCK_N + place % BLOCK_N, C - 1) + (place // BLOCK_N) * C
    row_starts = weight + row.to(tl.int64) * weight_stride
    length = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    start = part * length
    end = tl.minimum(start + length, K)

    x_starts = x + m * x_stride
    present = (m < M)[:, None]
    if NORM_IN:
        # Asked for before the loop and used after it.
        block = tl.arange(0, BLOCK_PARTS)
        at_square = block[:, None] * M + m[None, :]
        in_row = (block < parts)[:, None] & (m < M)[None, :]
        row_squares = tl.load(x_squares + at_square, mask=in_row, other=0.0)
    if ROTARY:
        cos, sin, slot = _load_rotary(
            table, write_slots, tile, M, m, QUERY_HEADS, KV_HEADS, DIM, ROWS
        )
    if SWAP:
        product = tl.zeros((ROWS, BLOCK_M), dtype=tl.float32)
    else:
        product = tl.zeros((BLOCK_M, ROWS), dtype=tl.float32)
    for k in range(start, end, BLOCK_K):
        feature = k + tl.arange(0, BLOCK_K)
        at_w = row_starts[:, None] + feature[None, :]
        at_x = x_starts[:, None] + feature[None, :]
        if EVEN_K:
            w_tile = tl.load(at_w, eviction_policy="evict_first")
            x_tile = tl.load(at_x, mask=present, other=0.0)
        else:
            inside = (feature < K)[None, :]
            w_tile = tl.load(at_w, mask=inside, other=0.0, eviction_policy="evict_first")
            x_tile = tl.load(at_x, mask=present & inside, other=0.0)
        if SWAP:
            product = dot(w_tile, tl.trans(x_tile), product)
        else:
            product = dot(x_tile, tl.trans(w_tile), product)
    if SWAP:
        product = tl.trans(product)

    last = True
    if SPLIT_K > 1:
        at_part = m[:, None] * ROWS + place[None, :]
        partials = workspace + tile * (SPLIT_K * BLOCK_M * ROWS)
        tl.store(partials + part * (BLOCK_M * ROWS) + at_part, product, mask=present)
        # Every thread's stores come before the one thread that releases them.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel")
        last = arrived == SPLIT_K - 1
        if last:
            tl.store(counters + tile, 0)
            product = tl.zeros((BLOCK_M, ROWS), dtype=tl.float32)
            for other in tl.static_range(SPLIT_K):
                at = partials + other * (BLOCK_M * ROWS) + at_part
                product += tl.load(at, mask=present, other=0.0, cache_modifier=".cg")
    if last:
        if NORM_IN:
            product *= tl.rsqrt(tl.sum(row_squares, axis=0) / K + eps)[:, None]
        if ROTARY:
            _finish_rotary(
                product,
                cos,
                sin,
                slot,
                tile,
                bias,
                out,
                keys,
                values,
                M,
                keys_stride,
                values_stride,
                m,
                HAS_BIAS,
                QUERY_HEADS,
                KV_HEADS,
                DIM,
                ROUNDED,
                BLOCK_M,
                ROWS,
            )
        else:
            _finish(
                product,
                tile,
                bias,
                residual,
                out,
                next_norm,
                scaled,
                squares,
                M,
                C,
                residual_stride,
                m,
                HAS_BIAS,
                HAS_RESIDUAL,
                GATED,
                NORM_OUT,
                ROUNDED,
                BLOCK_M,
                ROWS,
            )
