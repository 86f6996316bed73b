"""Logits processor: turns raw logits into the sampling distribution, for verifier and drafter.

Order: penalties, logit bias, banned ids, the grammar's allowed-token mask, division by the
temperature, top-k, top-p, min-p; removed ids become -inf. The verifier processes the target's
logits, and the drafter processes its own logits with the same parameters. At a node of a draft
tree, penalties treat the draft tokens on the path to the node like output tokens. At temperature 0
only penalties, biases, bans and grammars apply (`edit_logits`).

A row's result depends on that row only, bit for bit. Its arithmetic is defined to the bit (see
`penalties_for` and `outrider.engine.truncation`), so that
`outrider.engine.kernels.logits_processor.process` gives the same result on a device.

Ties at a boundary of top-k, top-p or min-p are all kept. The kept set is then a function of the
values alone and not of a sorting order, so that all devices, and verifier and drafter, agree on it.

Shape suffixes: R rows, V columns. A column is a target id, or the draft id whose target id is
`target_ids[column]` where a draft head has a vocabulary of its own.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from outrider.engine.truncation import min_p_floor, probability_thresholds
from outrider.spec.sampling import SamplingParams

MAX_LOGIT = 1e30
"""Upper limit of logits before the division by the temperature, so that the division cannot
overflow. Larger logits, including +inf, are clamped to it. Greedy rows are not divided and not
clamped."""
MIN_TEMPERATURE = 1e-6
"""Lower limit of positive temperatures: smaller ones are raised to it, because float32 cannot
distinguish them from greedy decoding."""


def _no_ids() -> NDArray[np.int32]:
    return np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenHistory:
    """Prompt, output and path to a tree node before one position, with the banned ids and the
    grammar mask at this position. All ids are target ids."""

    prompt_ids: NDArray[np.int32] = field(default_factory=_no_ids)
    output_ids: NDArray[np.int32] = field(default_factory=_no_ids)
    path_ids: tuple[int, ...] = ()
    """Draft tokens on the path from the root (exclusive) to the node (inclusive)."""
    banned_now: tuple[int, ...] = ()
    """Ids banned at this position only (stop tokens before the minimum length)."""
    allowed_tokens: NDArray[np.uint32] | None = None
    """Bit mask of the target ids that a grammar allows at this position, uint32 [words], or None if
    all ids are allowed. Id i is bit i % 32 of word i // 32; ids beyond the last word are not
    allowed."""

    def output_and_path(self) -> NDArray[np.int32]:
        """Return the output ids with the path appended, int32."""
        if not self.path_ids:
            return self.output_ids
        return np.concatenate([self.output_ids, np.array(self.path_ids, dtype=np.int32)])


EMPTY_HISTORY = TokenHistory()


def apply_logits_processor(
    logits_RV: Tensor,
    params: Sequence[SamplingParams],
    histories: Sequence[TokenHistory],
    *,
    target_ids: Tensor | None = None,
) -> Tensor:
    """Return the processed logits, float32 [R, V] without NaN or +inf.

    `logits_RV` is float32. Every row of the result has at least one finite entry. If a row would
    have none (all logits are NaN, or all ids are banned), its first column that is not banned is
    kept. If bans exclude all ids that a grammar allows, the first allowed column is kept, because
    the grammar takes precedence. If there is nothing to change, the input itself is returned, so
    the caller must write to neither tensor.
    """
    warped = _edited(logits_RV, params, histories, target_ids)
    warped = _tamed(warped, params, histories, target_ids, limit=MAX_LOGIT)
    temperatures = [max(p.temperature, MIN_TEMPERATURE) if p.temperature else 1.0 for p in params]
    if any(t != 1.0 for t in temperatures):
        # A tensor and not a scalar: a scalar may be turned into a product with its reciprocal.
        divisors = torch.tensor(temperatures, dtype=torch.float32, device=warped.device)
        warped = warped / divisors[:, None]
    cut = [row for row, p in enumerate(params) if p.temperature and has_truncation(p)]
    if len(cut) == len(params):
        return _truncated(warped, params)
    if cut:
        if warped is logits_RV:
            warped = warped.clone()
        warped[cut] = _truncated(warped[cut], [params[row] for row in cut])
    return warped


def edit_logits(
    logits_RV: Tensor,
    params: Sequence[SamplingParams],
    histories: Sequence[TokenHistory],
    *,
    target_ids: Tensor | None = None,
) -> Tensor:
    """Apply only penalties, biases, bans and grammars to float32 logits [R, V].

    Returns [R, V] float32 without NaN, of which greedy rows take the argmax. Logits are not
    clamped, so that the order of the remaining ids never changes. A row without any finite entry
    keeps one column, as in `apply_logits_processor`.
    """
    edited = _edited(logits_RV, params, histories, target_ids)
    return _tamed(edited, params, histories, target_ids, limit=math.inf)


def plain_argmax(logits_RV: Tensor) -> Tensor:
    """Return the column of the largest logit of every row, int64 [R]. Of equal logits the first
    column is returned. NaN is never chosen; for a row of NaN only, 0 is returned."""
    best = _raw_argmax(logits_RV)
    if bool(logits_RV.gather(1, best[:, None]).isnan().any()):
        best = logits_RV.nan_to_num(nan=-math.inf, posinf=math.inf).argmax(dim=-1)
    return best


def has_finite(logits_RV: Tensor) -> Tensor:
    """Return whether each row has a finite logit, bool [R]."""
    # The largest logit is nearly always finite, and an argmax is the cheapest check of a row.
    best = _raw_argmax(logits_RV)
    found = logits_RV.gather(1, best[:, None])[:, 0].isfinite()
    if not bool(found.all()):
        others = (~found).nonzero()[:, 0]
        found[others] = logits_RV[others].isfinite().any(dim=-1)
    return found


def _raw_argmax(logits_RV: Tensor) -> Tensor:
    """Return the argmax of every row, int64 [R]; NaN counts as the largest value."""
    if logits_RV.device.type == "cpu":
        return torch.from_numpy(logits_RV.numpy().argmax(axis=-1))  # ten times torch's speed
    return logits_RV.argmax(dim=-1)


def needs_editing(params: SamplingParams, history: TokenHistory) -> bool:
    """Return whether penalties, biases, bans or a grammar change the row's logits. If not, the
    greedy token is the argmax of the raw logits."""
    return bool(
        params.banned_ids
        or params.logit_bias
        or history.banned_now
        or history.allowed_tokens is not None
        or has_penalties(params)
    )


def has_penalties(params: SamplingParams) -> bool:
    """Return whether `params` set a repetition, presence or frequency penalty."""
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def has_truncation(params: SamplingParams) -> bool:
    """Return whether `params` set top-k, top-p or min-p."""
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


_inverse_maps: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()


def _columns(ids: NDArray[np.integer], logits_V: Tensor, target_ids: Tensor | None) -> Tensor:
    """Return the columns of target ids, int64, without the ids that have no column."""
    wanted = torch.from_numpy(np.ascontiguousarray(ids, dtype=np.int64)).to(logits_V.device)
    if target_ids is None:
        return wanted[(wanted >= 0) & (wanted < logits_V.shape[0])]
    inverse = _inverse_maps.get(target_ids)
    if inverse is None:
        size = int(target_ids.max()) + 1
        inverse = torch.full((size,), -1, dtype=torch.int64, device=target_ids.device)
        inverse[target_ids] = torch.arange(target_ids.shape[0], device=target_ids.device)
        _inverse_maps[target_ids] = inverse
    columns = inverse[wanted[(wanted >= 0) & (wanted < inverse.shape[0])]]
    return columns[columns >= 0]


def _edited(
    logits_RV: Tensor,
    params: Sequence[SamplingParams],
    histories: Sequence[TokenHistory],
    target_ids: Tensor | None,
) -> Tensor:
    """Return the logits after penalties, biases, bans and grammars, or the input itself if there
    are none."""
    if not any(needs_editing(p, h) for p, h in zip(params, histories, strict=True)):
        return logits_RV
    edited = logits_RV.clone()
    for row, (row_params, history) in enumerate(zip(params, histories, strict=True)):
        if needs_editing(row_params, history):
            _edit_(edited[row], row_params, history, target_ids)
    return edited


def _edit_(
    logits_V: Tensor, params: SamplingParams, history: TokenHistory, target_ids: Tensor | None
) -> None:
    """Apply penalties, biases, bans and the grammar to one row in place."""
    output = history.output_and_path()
    if params.repetition_penalty != 1.0:
        # Repeated columns are written with the same value, so the ids need not be unique.
        columns = _columns(np.concatenate([history.prompt_ids, output]), logits_V, target_ids)
        old = logits_V[columns]
        # A tensor and not a scalar: a scalar may be turned into a product with its reciprocal.
        penalty = torch.full_like(old, params.repetition_penalty)
        logits_V[columns] = torch.where(old > 0, old / penalty, old * penalty)
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        ids, counts = np.unique(output, return_counts=True)
        by_id = dict(zip(ids.tolist(), counts.tolist(), strict=True))
        columns = _columns(ids, logits_V, target_ids)
        owners = columns if target_ids is None else target_ids[columns]
        counts = np.array([by_id[i] for i in owners.tolist()], dtype=np.int64)
        amounts = torch.from_numpy(penalties_for(counts, params))
        logits_V[columns] -= amounts.to(logits_V.device)
    for id_, amount in params.logit_bias:
        logits_V[_columns(np.array([id_]), logits_V, target_ids)] += amount
    banned = _banned(params, history)
    if banned.size:
        logits_V[_columns(banned, logits_V, target_ids)] = -math.inf
    if history.allowed_tokens is not None:
        logits_V[~_allowed_columns(history.allowed_tokens, logits_V, target_ids)] = -math.inf


def _allowed_columns(
    allowed_tokens: NDArray[np.uint32], logits_V: Tensor, target_ids: Tensor | None
) -> Tensor:
    """Return whether a grammar allows each column, bool [V]."""
    bits = np.unpackbits(allowed_tokens.astype("<u4", copy=False).view(np.uint8), bitorder="little")
    allowed = torch.from_numpy(bits).to(logits_V.device, torch.bool)
    if target_ids is not None:
        missing = int(target_ids.max()) + 1 - allowed.shape[0]
        if missing > 0:
            allowed = torch.nn.functional.pad(allowed, (0, missing))
        return allowed[target_ids]
    missing = logits_V.shape[0] - allowed.shape[0]
    if missing > 0:
        return torch.nn.functional.pad(allowed, (0, missing))
    return allowed[: logits_V.shape[0]]


def penalties_for(counts: NDArray[np.int64], params: SamplingParams) -> NDArray[np.float32]:
    """Return the sum of frequency and presence penalty, float32, for ids that occur `counts` times
    each.

    The sum is subtracted from the logits of these ids. All counts are > 0. The penalties are
    float32 values and the sum is rounded once, so the result is the same with and without a fused
    multiply-add.
    """
    frequency = float(np.float32(params.frequency_penalty))
    presence = float(np.float32(params.presence_penalty))
    return (counts * frequency + presence).astype(np.float32)


def _banned(params: SamplingParams, history: TokenHistory) -> NDArray[np.int64]:
    return np.array((*params.banned_ids, *history.banned_now), dtype=np.int64)


def _tamed(
    logits_RV: Tensor,
    params: Sequence[SamplingParams],
    histories: Sequence[TokenHistory],
    target_ids: Tensor | None,
    *,
    limit: float,
) -> Tensor:
    """Replace NaN by -inf, clamp to `limit`, and make one entry of every row finite."""
    peaks = logits_RV.amax(dim=-1)
    if bool(((peaks > -math.inf) & (peaks <= limit)).all()):  # false for NaN
        return logits_RV
    tamed = logits_RV.nan_to_num(nan=-math.inf, posinf=limit, neginf=-math.inf)
    tamed.clamp_(max=limit)
    for row in (tamed.amax(dim=-1) == -math.inf).nonzero()[:, 0].tolist():
        allowed_tokens = torch.ones(tamed.shape[1], dtype=torch.bool, device=tamed.device)
        if (bits := histories[row].allowed_tokens) is not None:
            allowed_tokens = _allowed_columns(bits, tamed[row], target_ids)
        allowed = allowed_tokens.clone()
        allowed[_columns(_banned(params[row], histories[row]), tamed[row], target_ids)] = False
        tamed[row, (allowed if bool(allowed.any()) else allowed_tokens).int().argmax()] = 0.0
    return tamed


def _truncated(scores_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return a copy of the scores in which removed columns are -inf. top-k is applied first, then
    top-p and min-p to the remaining columns."""
    lowest = probability_thresholds(
        scores_RV,
        [p.top_k for p in params],
        [p.top_p for p in params],
        [min_p_floor(p.min_p) for p in params],
    )
    return scores_RV.masked_fill(scores_RV < lowest[:, None], -math.inf)
