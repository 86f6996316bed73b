"""Draft token selection: the children of every draft row, by acceptance rule.

greedy, target-only   the top_k most probable ids. With top_k = 1 only the argmax of the logits is
                      computed, without a softmax, and the log-prob is returned as 0.
coupled               the top_k ids by log q + G, where q is the draft distribution and G is the
                      TARGET noise of the position and target id. The target adds the same noise, so
                      that the drafter predicts its sample and not its most probable id.
rejection             the distribution q is truncated and quantised to integer counts first;
                      children are then drawn from exactly these counts, without replacement, with
                      DRAFT noise.

The logits processor first processes each row with the session's own parameters (penalties, bans, T,
top-k, top-p, min-p). Shape suffixes: N rows, D draft vocabulary columns, k children per row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.logits_processor import (
    EMPTY_HISTORY,
    TokenHistory,
    apply_logits_processor,
    edit_logits,
    needs_editing,
    plain_argmax,
)
from outrider.engine.noise import noise_keys, perturbed_topk
from outrider.spec.draft_distribution import DistributionEntries
from outrider.spec.noise import NoiseStream, bits_from_keys, gumbel_from_bits
from outrider.spec.noise import noise_keys as numpy_noise_keys
from outrider.spec.sampling import Rule, SamplingParams

DRAFT_LOGIT_ERROR = 0.5
"""Assumed scale of the error of draft logits at temperature 1, in logits, for
`coupled_logprobs`."""
NUM_RUNNER_UPS = 32
"""Minimum number of candidates (the largest log q + G) over which `coupled_logprobs` normalises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributionLimits:
    """Limits on the size of one draft distribution in a message, where each id takes 6 bytes.

    Leaving out ids lowers the acceptance rate by at most their probability mass. Measured with
    SmolLM2-135M over its 16,384 most frequent ids, a mass of 0.995 takes 70 ids per node at T = 0.7
    and 1,000 ids at T = 1. 4,096 ids hold a mass of 0.99 at T = 1.3, 0.97 at T = 1.5 and 0.885 at T
    = 2; 1,024 ids hold 0.95, 0.90 and 0.70.
    """

    mass: float = 0.995
    """Probability mass, in (0, 1], that the kept ids must reach. The most probable ids are kept."""
    max_ids: int = 1024
    """Maximum number of ids per node, which takes precedence over `mass`. 1,024 ids take 6 KB."""


MAX_DISTRIBUTION_ENTRIES = 1 << 15
"""Maximum number of ids in all distributions of one proposal: 192 KB at 6 bytes an id. Each
distribution may have 64 ids even if the sum is then larger."""
DEFAULT_DISTRIBUTION_LIMITS = DistributionLimits()


def distribution_limits_for(num_distributions: int) -> DistributionLimits:
    """Return the limits of each distribution of a proposal with `num_distributions` distributions.

    A proposal has one distribution for its root and one for every node with children. In a chain of
    4 draft tokens each distribution may have 8,192 ids, which the flat distributions of high
    temperatures need. In a wide tree each may have fewer ids, so that the size of the message is
    bounded. The limits depend only on the shape of the tree, never on its tokens: otherwise the
    output would not be lossless.
    """
    return DistributionLimits(
        max_ids=max(64, MAX_DISTRIBUTION_ENTRIES // max(num_distributions, 1))
    )


MAX_COUNT = 65535


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChildCandidates:
    """Child tokens of N rows, k per row.

    The tokens of a row are in descending order of their scores. Under the rejection rule this is
    the order in which they were drawn. If a row has fewer than k possible children, the remaining
    entries have id -1 and log-prob -inf.
    """

    tokens: Tensor
    """Target ids, int64 [N, k]."""
    draft_ids: Tensor
    """The same tokens as columns of the draft logits, int64 [N, k]."""
    logprobs: Tensor
    """Log-probabilities of the tokens, float32 [N, k], <= 0. Their sum along a path ranks the nodes
    of a tree. With k = 1 they are 0 for greedy, target-only and coupled rows, because a chain needs
    no ranking, and computing them would take a softmax."""
    distributions: tuple[DistributionEntries | None, ...]
    """For each row with the rejection rule its quantised draft distribution, as target ids (int32)
    and counts (uint16). None for rows with other rules."""


def propose_children(
    logits: Tensor,
    target_ids: Tensor | None,
    sampling: Sequence[SamplingParams],
    positions: Sequence[int],
    top_k: int,
    histories: Sequence[TokenHistory] | None = None,
    *,
    distribution_limits: DistributionLimits
    | Sequence[DistributionLimits] = DEFAULT_DISTRIBUTION_LIMITS,
) -> ChildCandidates:
    """Return the child tokens of every row of draft logits, float32 [N, D].

    `target_ids` is the target id of each draft logit, int64 [D], distinct, or None if draft and
    target share one vocabulary. `sampling` and `positions` have one entry per row; a position is
    the absolute position of the child tokens. `histories` has one entry per row and is needed for
    penalties, bans before the minimum length and grammars. `distribution_limits` is one value for
    all rows or a list with one entry per row. A row's result depends on that row only.
    """
    rows = logits.shape[0]
    batch = _Batch(
        logits,
        target_ids,
        sampling,
        positions,
        [EMPTY_HISTORY] * rows if histories is None else histories,
        top_k,
        [distribution_limits] * rows
        if isinstance(distribution_limits, DistributionLimits)
        else distribution_limits,
    )
    groups: dict[_Proposer, list[int]] = {}
    for row, params in enumerate(sampling):
        groups.setdefault(_proposer(params, top_k), []).append(row)
    distributions: list[DistributionEntries | None]
    if len(groups) == 1:
        (proposer,) = groups
        columns, logprobs, distributions = proposer(batch)
    else:
        columns = torch.full((rows, top_k), -1, dtype=torch.int64, device=logits.device)
        logprobs = torch.zeros(rows, top_k, device=logits.device)
        distributions = [None] * rows
        for proposer, members in groups.items():
            part = proposer(batch.select(members))
            columns[members], logprobs[members] = part[0], part[1]
            for row, distribution in zip(members, part[2], strict=True):
                distributions[row] = distribution
    tokens = columns
    if target_ids is not None:
        tokens = torch.where(columns >= 0, target_ids[columns.clamp(min=0)], columns)
    return ChildCandidates(
        tokens=tokens, draft_ids=columns, logprobs=logprobs, distributions=tuple(distributions)
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    logits_ND: Tensor
    target_ids: Tensor | None
    sampling: Sequence[SamplingParams]
    positions: Sequence[int]
    histories: Sequence[TokenHistory]
    top_k: int
    distribution_limits: Sequence[DistributionLimits]

    def select(self, rows: list[int]) -> _Batch:
        return _Batch(
            self.logits_ND[rows],
            self.target_ids,
            [self.sampling[row] for row in rows],
            [self.positions[row] for row in rows],
            [self.histories[row] for row in rows],
            self.top_k,
            [self.distribution_limits[row] for row in rows],
        )

    def processed(self) -> Tensor:
        return apply_logits_processor(
            self.logits_ND, self.sampling, self.histories, target_ids=self.target_ids
        )

    def edited(self) -> Tensor:
        return edit_logits(
            self.logits_ND, self.sampling, self.histories, target_ids=self.target_ids
        )

    def stream_keys(self, stream: NoiseStream) -> list[int]:
        return [params.stream_key(stream) for params in self.sampling]


_Part = tuple[Tensor, Tensor, list[DistributionEntries | None]]
"""(columns [N, k], log-probs [N, k], draft distribution of each row or None)."""
_Proposer = Callable[[_Batch], _Part]


def _proposer(params: SamplingParams, top_k: int) -> _Proposer:
    match params.effective_rule:
        case Rule.REJECTION:
            return _drawn_from_distribution
        case Rule.COUPLED:
            return _coupled
        case Rule.GREEDY | Rule.TARGET_ONLY:
            return _argmax if top_k == 1 else _max_probable


def _argmax(batch: _Batch) -> _Part:
    """Return the most probable column of each row. Temperature and truncation cannot change the
    argmax, so only penalties, biases, bans and grammars are applied."""
    columns = plain_argmax(batch.logits_ND)
    pairs = zip(batch.sampling, batch.histories, strict=True)
    edited = [row for row, pair in enumerate(pairs) if needs_editing(*pair)]
    if edited:
        columns[edited] = plain_argmax(batch.select(edited).edited())
    zeros = torch.zeros(len(batch.sampling), 1, device=columns.device)
    return columns[:, None], zeros, [None] * len(batch.sampling)


def _max_probable(batch: _Batch) -> _Part:
    logprobs_ND = batch.processed().log_softmax(dim=-1)
    columns = torch.stack([_stable_topk(row, batch.top_k) for row in logprobs_ND])
    logprobs = logprobs_ND.gather(1, columns.clamp(min=0))
    return columns, logprobs.masked_fill(columns < 0, -torch.inf), [None] * len(columns)


def _stable_topk(logprobs_D: Tensor, k: int) -> Tensor:
    """Return the columns of the k largest entries, best first; ties go to the lower column. Missing
    entries are -1."""
    kept = min(k, logprobs_D.shape[0])
    floor = logprobs_D.topk(kept).values[-1]
    candidates = ((logprobs_D >= floor) & (logprobs_D > -torch.inf)).nonzero()[:, 0]
    order = logprobs_D[candidates].sort(descending=True, stable=True).indices[:k]
    return torch.nn.functional.pad(candidates[order], (0, k - len(order)), value=-1)


def _coupled(batch: _Batch) -> _Part:
    keys = noise_keys(
        batch.stream_keys(NoiseStream.TARGET), batch.positions, batch.logits_ND.device
    )
    wanted = 1 if batch.top_k == 1 else max(batch.top_k, NUM_RUNNER_UPS)
    perturbed, columns = perturbed_topk(batch.processed(), keys, wanted, batch.target_ids)
    if batch.top_k == 1:
        logprobs = torch.zeros(len(columns), 1, device=columns.device)
    else:
        temperatures = torch.tensor([p.temperature for p in batch.sampling], dtype=torch.float64)
        logprobs = coupled_logprobs(perturbed, temperatures.to(perturbed.device))
    return columns[:, : batch.top_k], logprobs[:, : batch.top_k], [None] * len(columns)


def coupled_logprobs(perturbed_NM: Tensor, temperatures_N: Tensor) -> Tensor:
    """Return the log-probability that each candidate is the target's sample, float32 [N, M], <= 0.

    `perturbed_NM` is log q + G of the M best candidates, float64. q is the draft distribution, and
    G is the Gumbel noise that drafter and target share. The target samples the argmax of log p + G
    = (log q + G) + log(p / q), where p is its own distribution. The drafter knows G, so that only
    log(p / q) is unknown: the error of the draft logits divided by the temperature T. If this error
    is modelled as Gumbel noise of scale s = DRAFT_LOGIT_ERROR / T, candidate i is the target's
    sample with probability softmax((log q + G) / s). Candidates far below the best have almost no
    weight, so M candidates suffice to normalise.

    On simulated pairs of distributions (heavy-tailed logits, draft error 0.8, total variation 0.2
    to 0.4, T from 0.5 to 1.5), this s was within 0.01 nat per token of the best s. Using log q
    alone was 0.8 to 6 nats worse.
    """
    scale = temperatures_N[:, None] / DRAFT_LOGIT_ERROR
    return (perturbed_NM * scale).log_softmax(dim=-1).to(torch.float32)


def _drawn_from_distribution(batch: _Batch) -> _Part:
    rows, k = len(batch.sampling), batch.top_k
    columns, logprobs = np.full((rows, k), -1, np.int64), np.full((rows, k), -np.inf, np.float32)
    distributions: list[DistributionEntries | None] = []
    target_ids = None if batch.target_ids is None else batch.target_ids.cpu().numpy()
    keys = numpy_noise_keys(batch.stream_keys(NoiseStream.DRAFT), list(batch.positions))
    weights_ND = distribution_weights(batch.processed()).cpu().numpy()
    for row in range(rows):
        kept, counts = quantise_distribution(
            weights_ND[row], batch.distribution_limits[row], at_least=k
        )
        ids = kept
        if target_ids is not None:
            order = target_ids[kept].argsort(kind="stable")  # one pass if they increase already
            kept, counts = kept[order], counts[order]
            ids = target_ids[kept]
        distributions.append((ids.astype(np.int32), counts))
        weights = np.log(counts.astype(np.float64))
        noise = gumbel_from_bits(bits_from_keys(keys[row : row + 1], ids))
        drawn = _largest(weights + noise, k)
        columns[row, : len(drawn)] = kept[drawn]
        logprobs[row, : len(drawn)] = weights[drawn] - math.log(counts.sum(dtype=np.int64))
    device = batch.logits_ND.device
    return (
        torch.from_numpy(columns).to(device),
        torch.from_numpy(logprobs).to(device),
        distributions,
    )


def _largest(values: NDArray[np.float64], k: int) -> NDArray[np.int64]:
    """Return the indices of the k largest values, largest first, or of all values if there are
    fewer than k."""
    if k == 1:
        return np.array([values.argmax()])
    top = np.argpartition(values, -k)[-k:] if k < len(values) else np.arange(len(values))
    return top[values[top].argsort()[::-1]]


def distribution_weights(scores_ND: Tensor) -> Tensor:
    """Return exp(score - largest score of the row), float32 [N, D], which `quantise_distribution`
    takes. Scores are finite or -inf, and each row has a finite score."""
    return (scores_ND - scores_ND.amax(dim=-1, keepdim=True)).exp()


def quantise_distribution(
    weights_D: NDArray[np.float32], limits: DistributionLimits, *, at_least: int
) -> tuple[NDArray[np.int64], NDArray[np.uint16]]:
    """Return the columns (increasing) and integer counts of the truncated, quantised distribution.

    `weights_D` holds probabilities up to a common factor. The largest weight gets count 65535, the
    others are rounded to that scale, and columns of count 0 are dropped. Then the columns with the
    largest counts are kept: as few as reach `limits.mass`, and at most `limits.max_ids`. If these
    are fewer than `at_least`, `at_least` columns are kept, or all if there are not so many. Among
    equal counts the lower columns are kept. This choice depends on the integer counts alone, so
    rounding in a floating-point sum cannot change it.
    """
    scale = MAX_COUNT / float(weights_D.max())
    possible = np.flatnonzero(weights_D > 0.49 / scale)
    values = np.rint(weights_D[possible].astype(np.float64) * scale).astype(np.int64)
    possible, values = possible[values > 0], values[values > 0]
    descending = np.sort(values)[::-1]
    mass = descending.cumsum()
    kept = int(np.count_nonzero(mass[:-1] < limits.mass * float(mass[-1]))) + 1
    kept = min(max(min(kept, limits.max_ids), at_least), len(values))
    edge = descending[kept - 1]
    inside = np.flatnonzero(values >= edge)
    if len(inside) > kept:
        tied = np.flatnonzero(values == edge)
        inside = np.setdiff1d(inside, tied[kept - len(inside) :], assume_unique=True)
    return possible[inside], values[inside].astype(np.uint16)
