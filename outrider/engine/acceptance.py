"""Acceptance rules of speculative decoding: accepted path and next token of every row.

target_probs (p) is the target's distribution after the logits processor, draft_probs (q) the
distribution a draft token was drawn from. Every row walks down its tree from the root; at its
current node:

greedy, coupled   y = argmax(z / T + G); the child whose token is y is accepted, otherwise y is
                  emitted. G is the TARGET noise of the position; greedy has G = 0 and T = 1.
rejection         Children were drawn from q without replacement, in node order. Child c is accepted
                  if u < p(c) / q(c), u its ACCEPT random draw; else p <- max(p - q, 0) and q <- q
                  without c, both renormalised. After the last one a token is drawn from p (RECOVER
                  noise).
target-only       The siblings share one random draw u: child c_j is accepted for the first j
                  with u < p(c_1) + .. + p(c_j); otherwise p without the children is sampled.

A node without children emits a sample of p: the bonus token. Only visited nodes are evaluated,
so the cost follows accepted_len and not the size of the tree; a residual that is zero everywhere
(p = q and a rejection by rounding) falls back to p. A row's result depends on that row only.

A row of logits without a finite value (NaN weights, an overflow) is invalid: a walk that reaches it
ends there, and its result has `invalid_output` set. Other rows are unaffected.

Noise belongs to a position and is used once, however often the position is proposed: a position
that was drafted but not reached has used none of its random draws.

Shape suffixes: R rows of the target's forward, A rows of one level, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.logits_processor import (
    TokenHistory,
    apply_logits_processor,
    edit_logits,
    has_finite,
    needs_editing,
    plain_argmax,
)
from outrider.engine.noise import noise_keys, perturbed_argmax
from outrider.engine.residual import ResidualSampler
from outrider.spec.draft_distribution import DraftDistribution
from outrider.spec.noise import SHARED_DRAW_ID, NoiseStream, bits_from_keys, uniform_from_bits
from outrider.spec.noise import noise_keys as position_keys
from outrider.spec.sampling import Rule, SamplingParams
from outrider.spec.tree import DraftTree

MAX_CHUNK_ELEMENTS = 1 << 18
"""Logits handled in one piece on a CPU: more rows at once would fall out of its caches."""


def _no_ids() -> NDArray[np.int32]:
    return np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AcceptRow:
    """One session's part of a verify forward. The tree and the distribution have been validated."""

    logits_start: int
    """Row of the root in the logits; node i is at logits_start + 1 + i."""
    tree: DraftTree | None = None
    distribution: DraftDistribution | None = None
    """The distribution that the tree was drawn from; only the rejection rule looks at it."""
    sampling: SamplingParams
    position: int
    """Absolute position of the token that follows the root: the length of the prefix."""
    prompt_ids: NDArray[np.int32] = field(default_factory=_no_ids)
    """Only needed for penalties, as are output_ids."""
    output_ids: NDArray[np.int32] = field(default_factory=_no_ids)
    banned_now: tuple[int, ...] = ()
    """Ids banned at positions below `banned_until` (stop tokens before min_new_tokens)."""
    banned_until: int = sys.maxsize
    allowed_tokens: NDArray[np.uint32] | None = None
    """uint32 [1 + N, W]: what a grammar allows after the root, and after each node; None: there is
    none (`outrider.engine.logits_processor.TokenHistory`)."""


class AcceptanceResult(NamedTuple):
    """Accepted path and next token of one row."""

    accepted_nodes: tuple[int, ...]
    """Nodes on the accepted path, first level first."""
    tokens: tuple[int, ...]
    """Their tokens and the final one: accepted_len + 1 ids."""
    resampled: bool
    """Whether the final token follows a rejection; else it is the bonus token."""
    used_target_only_fallback: bool
    """Whether the rejection rule was judged target-only because the distribution was missing."""
    invalid_output: bool = False
    """Whether the last node's row has no finite logit: the final token is 0, a placeholder."""


class _Walk:
    """A row on its way down."""

    __slots__ = ("below", "distribution", "fallback", "nodes", "result", "row", "rule", "tokens")

    below: dict[int, list[tuple[int, int]]]
    """(node, token) by parent; a node whose children are all out of range has an empty list."""

    def __init__(self, row: AcceptRow, vocab_size: int) -> None:
        self.row = row
        self.rule = row.sampling.effective_rule
        self.distribution = row.distribution
        self.below = _children_in_range(row.tree, vocab_size)
        self.fallback = (
            self.rule is Rule.REJECTION and bool(self.below) and row.distribution is None
        )
        self.nodes: list[int] = []
        self.tokens: list[int] = []
        self.result: AcceptanceResult | None = None

    @property
    def node(self) -> int:
        return self.nodes[-1] if self.nodes else -1

    @property
    def position(self) -> int:
        return self.row.position + len(self.nodes)

    def children(self) -> list[tuple[int, int]]:
        """(node, token) of the current node's children, in order."""
        return self.below.get(self.node, [])

    def history(self) -> TokenHistory:
        row = self.row
        return TokenHistory(
            prompt_ids=row.prompt_ids,
            output_ids=row.output_ids,
            path_ids=tuple(self.tokens),
            banned_now=row.banned_now if self.position < row.banned_until else (),
            allowed_tokens=None
            if row.allowed_tokens is None
            else row.allowed_tokens[1 + self.node],
        )

    def descend(self, node: int, token: int) -> None:
        self.nodes.append(node)
        self.tokens.append(token)

    def finish(self, token: int) -> None:
        self.result = AcceptanceResult(
            accepted_nodes=tuple(self.nodes),
            tokens=(*self.tokens, token),
            resampled=self.node in self.below,
            used_target_only_fallback=self.fallback,
        )

    def finish_invalid(self) -> None:
        """End at a row without a finite logit."""
        self.finish(0)
        assert self.result is not None
        self.result = self.result._replace(invalid_output=True)


def _children_in_range(tree: DraftTree | None, vocab_size: int) -> dict[int, list[tuple[int, int]]]:
    """Children by parent, without placeholders and ids out of range: these never stand."""
    below: dict[int, list[tuple[int, int]]] = {}
    if tree is not None:
        tokens = tree.tokens.tolist()
        for node, parent in enumerate(tree.parents.tolist()):
            siblings = below.setdefault(parent, [])
            if 0 <= tokens[node] < vocab_size:
                siblings.append((node, tokens[node]))
    return below


def accept_drafts(logits: Tensor, rows: Sequence[AcceptRow]) -> list[AcceptanceResult]:
    """Judge the drafts of all rows against the target's logits, float32 [R, V].

    Rules mix freely. Rejection rows without a distribution are judged target-only, which is
    lossless for any draft that does not depend on the random draws. Never emits an id outside [0,
    V). A row that meets logits of which none is finite ends as `AcceptanceResult.invalid_output`
    says.
    """
    walks = [_Walk(row, logits.shape[1]) for row in rows]
    active = walks
    while active:
        for rules, judge in _JUDGES:
            members = [walk for walk in active if walk.rule in rules]
            for chunk in _chunks(members, logits):
                rows_AV = _rows_of(logits, chunk)
                finite = has_finite(rows_AV)
                if not bool(finite.all()):
                    rows_AV, chunk = _without_invalid(rows_AV, chunk, finite)
                if chunk:
                    judge(rows_AV, chunk)
        active = [walk for walk in active if walk.result is None]
    return [walk.result for walk in walks if walk.result is not None]


def _chunks(walks: list[_Walk], logits: Tensor) -> Iterator[list[_Walk]]:
    size = max(len(walks), 1)
    if logits.device.type == "cpu":
        size = max(1, MAX_CHUNK_ELEMENTS // logits.shape[1])
    for begin in range(0, len(walks), size):
        yield walks[begin : begin + size]


def _without_invalid(
    rows_AV: Tensor, walks: list[_Walk], finite_A: Tensor
) -> tuple[Tensor, list[_Walk]]:
    """End the walks whose rows have no finite logit; the rows and walks that are left."""
    kept: list[_Walk] = []
    for walk, is_finite in zip(walks, finite_A.tolist(), strict=True):
        if is_finite:
            kept.append(walk)
        else:
            walk.finish_invalid()
    return rows_AV[finite_A], kept


def _rows_of(logits: Tensor, walks: list[_Walk]) -> Tensor:
    """Logits [A, V] at the node that each walk stands on."""
    indices = [walk.row.logits_start + 1 + walk.node for walk in walks]
    if len(indices) == 1:
        return logits[indices[0] : indices[0] + 1]
    return logits[torch.tensor(indices, device=logits.device)]


def _processed(logits_AV: Tensor, walks: list[_Walk]) -> Tensor:
    params = [walk.row.sampling for walk in walks]
    return apply_logits_processor(logits_AV, params, [walk.history() for walk in walks])


def _keys(walks: list[_Walk], stream: NoiseStream, device: torch.device) -> Tensor:
    keys = [walk.row.sampling.stream_key(stream) for walk in walks]
    return noise_keys(keys, [walk.position for walk in walks], device)


def _accept_greedy(rows_AV: Tensor, walks: list[_Walk]) -> None:
    """One level of greedy rows, by logits [A, V]."""
    params = [walk.row.sampling for walk in walks]
    histories = [walk.history() for walk in walks]
    edits = [i for i in range(len(walks)) if needs_editing(params[i], histories[i])]
    chosen = plain_argmax(rows_AV)
    if edits:
        of_edits = [params[i] for i in edits], [histories[i] for i in edits]
        chosen[edits] = plain_argmax(edit_logits(rows_AV[edits], *of_edits))
    _follow(walks, chosen)


def _accept_coupled(rows_AV: Tensor, walks: list[_Walk]) -> None:
    """One level of coupled rows, by logits [A, V]."""
    keys = _keys(walks, NoiseStream.TARGET, rows_AV.device)
    _follow(walks, perturbed_argmax(_processed(rows_AV, walks), keys))


def _follow(walks: list[_Walk], chosen_A: Tensor) -> None:
    """Descend to the child that carries the chosen token, or emit it."""
    for walk, wanted in zip(walks, chosen_A.tolist(), strict=True):
        for node, token in walk.children():
            if token == wanted:
                walk.descend(node, token)
                break
        else:
            walk.finish(wanted)


def _accept_randomized(rows_AV: Tensor, walks: list[_Walk]) -> None:
    """One level of rejection and target-only rows, by logits [A, V]."""
    logprobs_AV = _processed(rows_AV, walks).log_softmax(dim=-1)
    probs, coins = _candidate_probs(logprobs_AV, walks), _random_draws(walks)
    unfinished: list[tuple[_Walk, int]] = []
    changes: list[tuple[int, NDArray[np.int64], NDArray[np.float64]]] = []
    for index, walk in enumerate(walks):
        candidates = walk.children()
        row_probs, row_coins = probs[index], coins[index]
        if walk.rule is Rule.TARGET_ONLY or walk.distribution is None:
            winner, change = _target_only(candidates, row_probs, row_coins[-1])
        else:
            slot = walk.distribution.entries(walk.node + 1)
            residual = ResidualSampler(logprobs_AV[index], *slot)
            winner, change = residual.try_children(candidates, row_probs, row_coins)
        if winner is not None:
            walk.descend(*winner)
            continue
        if change is not None:
            changes.append((len(unfinished), *change))
        unfinished.append((walk, index))
    if unfinished:
        _finish_sampled(logprobs_AV, unfinished, changes)


def _candidate_probs(logprobs_AV: Tensor, walks: list[_Walk]) -> list[list[float]]:
    """target_probs of each walk's children, float64."""
    pairs = [(i, token) for i, walk in enumerate(walks) for _, token in walk.children()]
    if not pairs:
        return [[] for _ in walks]
    index = torch.tensor(pairs, device=logprobs_AV.device)
    flat = logprobs_AV[index[:, 0], index[:, 1]].to(torch.float64).exp().tolist()
    return _split(flat, [len(walk.children()) for walk in walks])


def _random_draws(walks: list[_Walk]) -> list[list[float]]:
    """ACCEPT random draws of each walk's children, then the random draw that they share."""
    sizes = [len(walk.children()) + 1 for walk in walks]
    ids = [[*(t for _, t in walk.children()), SHARED_DRAW_ID] for walk in walks]
    keys = position_keys(
        [walk.row.sampling.stream_key(NoiseStream.ACCEPT) for walk in walks],
        [walk.position for walk in walks],
    )
    bits = bits_from_keys(np.repeat(keys, sizes), [i for row in ids for i in row])
    return _split(uniform_from_bits(bits).tolist(), sizes)


def _split(flat: list[float], sizes: list[int]) -> list[list[float]]:
    result, begin = [], 0
    for size in sizes:
        result.append(flat[begin : begin + size])
        begin += size
    return result


Change = tuple[NDArray[np.int64], NDArray[np.float64]]
"""New log-probs (up to a constant) of some ids of a row, before its last token is drawn."""


def _target_only(
    candidates: list[tuple[int, int]], probs: list[float], coin: float
) -> tuple[tuple[int, int] | None, Change | None]:
    """The child that stands, or what to take out of p."""
    mass, seen = 0.0, set()
    for candidate, prob in zip(candidates, probs, strict=True):
        if candidate[1] not in seen:
            seen.add(candidate[1])
            mass += prob
        if coin < mass:
            return candidate, None
    if not candidates:
        return None, None
    ids = np.array(sorted(seen), dtype=np.int64)
    return None, (ids, np.full(len(ids), -np.inf))


def _finish_sampled(
    logprobs_AV: Tensor,
    unfinished: list[tuple[_Walk, int]],
    changes: list[tuple[int, NDArray[np.int64], NDArray[np.float64]]],
) -> None:
    """Draw the last token of each walk from its row, changed where a rejection changed it."""
    walks = [walk for walk, _ in unfinished]
    indices = torch.tensor([index for _, index in unfinished], device=logprobs_AV.device)
    scores = logprobs_AV[indices]
    for row, ids, values in changes:
        where = torch.from_numpy(ids).to(scores.device)
        scores[row, where] = torch.from_numpy(values.astype(np.float32)).to(scores.device)
    empty = scores.amax(dim=-1) == -torch.inf
    if bool(empty.any()):
        scores[empty] = logprobs_AV[indices[empty]]
    chosen = perturbed_argmax(scores, _keys(walks, NoiseStream.RECOVER, scores.device))
    for walk, token in zip(walks, chosen.tolist(), strict=True):
        walk.finish(token)


_JUDGES = (
    (frozenset({Rule.GREEDY}), _accept_greedy),
    (frozenset({Rule.COUPLED}), _accept_coupled),
    (frozenset({Rule.REJECTION, Rule.TARGET_ONLY}), _accept_randomized),
)
