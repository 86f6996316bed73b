# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator"
"""Triton functions for recursive rejection sampling on the ids of a draft distribution.

The arithmetic is that of `outrider.engine.residual`, in float64. p is the target distribution, q
the draft distribution. The sparse q of a node has the entries `begin` to `end` (exclusive). The
workspaces `inside` (p or its residual) and `draft` (q) have one value per entry. One program
processes all entries of a session. The barriers make values visible that other threads of the
program wrote.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.engine.kernels.sampling import scaled_tile


@triton.jit
def find_entry(ids_ptr, counts_ptr, begin, end, token, ENTRIES: tl.constexpr):
    """Return the index of the token's entry in a sparse distribution (-1 if it has none), and the
    sum of all counts of the distribution."""
    entries = tl.arange(0, ENTRIES)
    place = tl.full((), -1, tl.int32)
    total = tl.full((), 0, tl.int32)
    for start in range(begin, end, ENTRIES):
        at = start + entries
        valid = at < end
        ids = tl.load(ids_ptr + at, mask=valid, other=-1)
        place = tl.maximum(place, tl.max(tl.where(valid & (ids == token), at, -1), 0))
        total += tl.sum(tl.load(counts_ptr + at, mask=valid, other=0), 0)
    return place, total


@triton.jit
def start_residual(
    ids_ptr,
    counts_ptr,
    inside_ptr,
    draft_ptr,
    logits_ptr,
    begin,
    end,
    total,
    temperature,
    top,
    log_sum,
    ENTRIES: tl.constexpr,
):
    """Fill the workspaces with the target probabilities p and the draft probabilities q of the ids
    of the draft distribution. Return the sum of p over all other ids."""
    entries = tl.arange(0, ENTRIES)
    inside_mass = tl.full((), 0.0, tl.float64)
    for start in range(begin, end, ENTRIES):
        at = start + entries
        valid = at < end
        ids = tl.load(ids_ptr + at, mask=valid, other=0)
        scores = scaled_tile(logits_ptr, ids, valid, temperature).to(tl.float64)
        probs = tl.exp((scores - top) - log_sum)
        counts = tl.load(counts_ptr + at, mask=valid, other=0).to(tl.float64)
        tl.store(inside_ptr + at, probs, mask=valid)
        tl.store(draft_ptr + at, counts / total.to(tl.float64), mask=valid)
        inside_mass += tl.sum(probs, 0)
    tl.debug_barrier()
    return tl.maximum(1.0 - inside_mass, 0.0)


@triton.jit
def reject_entry(inside_ptr, draft_ptr, begin, end, place, rest, outside, ENTRIES: tl.constexpr):
    """Replace the target probabilities p by max(p - q, 0), remove the entry `place` from the draft
    probabilities q, and normalise both.

    Outside the ids of the draft distribution, q is 0 and normalising p only scales it: `rest` is
    the sum of the original p there and `outside` the scale so far. Returns the new scale, or -1 if
    p has become 0 everywhere.
    """
    entries = tl.arange(0, ENTRIES)
    mass = outside * rest
    remaining = tl.full((), 0.0, tl.float64)
    for start in range(begin, end, ENTRIES):
        at = start + entries
        valid = at < end
        inside = tl.load(inside_ptr + at, mask=valid, other=0.0)
        draft = tl.load(draft_ptr + at, mask=valid, other=0.0)
        inside = tl.maximum(inside - draft, 0.0)
        draft = tl.where(at == place, 0.0, draft)
        tl.debug_barrier()
        tl.store(inside_ptr + at, inside, mask=valid)
        tl.store(draft_ptr + at, draft, mask=valid)
        mass += tl.sum(inside, 0)
        remaining += tl.sum(draft, 0)
    tl.debug_barrier()
    mass_divisor = tl.where(mass > 0.0, mass, 1.0)
    draft_divisor = tl.where(remaining > 0.0, remaining, 1.0)
    for start in range(begin, end, ENTRIES):
        at = start + entries
        valid = at < end
        inside = tl.load(inside_ptr + at, mask=valid, other=0.0) / mass_divisor
        draft = tl.load(draft_ptr + at, mask=valid, other=0.0) / draft_divisor
        tl.debug_barrier()
        tl.store(inside_ptr + at, inside, mask=valid)
        tl.store(draft_ptr + at, draft, mask=valid)
    tl.debug_barrier()
    return tl.where(mass > 0.0, outside / mass_divisor, -1.0)


@triton.jit
def finish_residual(inside_ptr, begin, end, outside, ENTRIES: tl.constexpr):
    """Replace each residual probability r by log(r / outside), where `outside` is the scale from
    `reject_entry`. All other ids can then keep their log p without scaling."""
    entries = tl.arange(0, ENTRIES)
    for start in range(begin, end, ENTRIES):
        at = start + entries
        valid = at < end
        inside = tl.load(inside_ptr + at, mask=valid, other=0.0)
        positive = inside > 0.0
        logs = tl.log(tl.where(positive, inside, 1.0)) - tl.log(outside)
        tl.debug_barrier()
        tl.store(inside_ptr + at, tl.where(positive, logs, float("-inf")), mask=valid)
