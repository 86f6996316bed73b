"""Acceptance rules of speculative decoding: accepted path and next token of every row.

target_probs (p) is the target's distribution after the logits processor. draft_probs (q) is the
distribution from which a draft token was drawn. Every row walks down its draft tree from the root.
Its acceptance rule decides at each node:

greedy, coupled   y = argmax(z / T + G), where z are the target's logits, T is the temperature and G
                  is the TARGET noise of the position. Greedy has T = 1 and G = 0. If a child has
                  token y, it is accepted. Otherwise y is the next token.
rejection         Children were drawn from q without replacement, in node order. Child c is accepted
                  if u < p(c) / q(c), where u is the child's ACCEPT random draw; otherwise
                  p <- max(p - q, 0) and q <- q without c, both renormalised. If all children are
                  rejected, a token is drawn from p (RECOVER noise).
target-only       The children share one random draw u. The first child c_j for which
                  u < p(c_1) + .. + p(c_j) is accepted. If there is none, a token is drawn from p,
                  restricted to the ids that are not children.

At a node without children a token is drawn from p: the bonus token. Only visited nodes are
evaluated, so the cost depends on accepted_len and not on the size of the tree. If rounding makes
max(p - q, 0) zero everywhere, the token is drawn from the p of the logits processor. A row's result
depends on that row only.

A row of logits without a finite value (NaN weights, an overflow) is invalid: a walk that reaches it
ends there, and its result has `invalid_output` set. Other rows are unaffected.

Each random draw belongs to one position and is used at most once, however often drafts are proposed
for that position. A position that was drafted but not reached has used none of its random draws.

Shape suffixes: R rows of the target's forward pass, A walks that are at the same level of their
trees, V vocabulary size.
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
"""Maximum number of logits that a CPU processes together, so that they fit into its caches."""


def _no_ids() -> NDArray[np.int32]:
    return np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AcceptRow:
    """Draft, sampling parameters and token history of one session, for `accept_drafts`.

    The caller must have validated `tree` and `distribution`.
    """

    logits_start: int
    """Row of the root in the logits. The row of node i is logits_start + 1 + i."""
    tree: DraftTree | None = None
    distribution: DraftDistribution | None = None
    """Distribution from which the tree was drawn. Only the rejection rule uses it."""
    sampling: SamplingParams
    position: int
    """Absolute position of the token that follows the root, which is the length of the prefix."""
    prompt_ids: NDArray[np.int32] = field(default_factory=_no_ids)
    """Prompt token ids. Only penalties use prompt_ids and output_ids."""
    output_ids: NDArray[np.int32] = field(default_factory=_no_ids)
    banned_now: tuple[int, ...] = ()
    """Ids banned at positions below `banned_until` (stop tokens before min_new_tokens)."""
    banned_until: int = sys.maxsize
    allowed_tokens: NDArray[np.uint32] | None = None
    """Bit masks of the tokens that a grammar allows after the root (row 0) and after each of the N
    nodes, uint32 [1 + N, words] as in `outrider.engine.logits_processor.TokenHistory`. None without
    a grammar."""


class AcceptanceResult(NamedTuple):
    """Accepted path and next token of one session (`AcceptRow`)."""

    accepted_nodes: tuple[int, ...]
    """Indices of the accepted nodes, from the first level of the tree down."""
    tokens: tuple[int, ...]
    """Tokens of the accepted nodes, then the next token: accepted_len + 1 ids."""
    resampled: bool
    """Whether the last accepted node (or the root) had children, all of which were rejected. If
    not, the last token is the bonus token."""
    used_target_only_fallback: bool
    """Whether the target-only rule replaced the rejection rule because the draft distribution was
    missing."""
    invalid_output: bool = False
    """Whether the logits of the last node have no finite value. The last token is then 0, a
    placeholder."""


class _Walk:
    """State of one row's walk down its draft tree."""

    __slots__ = ("below", "distribution", "fallback", "nodes", "result", "row", "rule", "tokens")

    below: dict[int, list[tuple[int, int]]]
    """(node, token) of the children of each parent node. The list is empty if all tokens of the
    children are out of range."""

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
        """Return (node, token) of the current node's children, in node order."""
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
        """End the walk because the current node's logits have no finite value."""
        self.finish(0)
        assert self.result is not None
        self.result = self.result._replace(invalid_output=True)


def _children_in_range(tree: DraftTree | None, vocab_size: int) -> dict[int, list[tuple[int, int]]]:
    """Return the (node, token) pairs by parent node, without tokens outside [0, vocab_size)."""
    below: dict[int, list[tuple[int, int]]] = {}
    if tree is not None:
        tokens = tree.tokens.tolist()
        for node, parent in enumerate(tree.parents.tolist()):
            siblings = below.setdefault(parent, [])
            if 0 <= tokens[node] < vocab_size:
                siblings.append((node, tokens[node]))
    return below


def accept_drafts(logits: Tensor, rows: Sequence[AcceptRow]) -> list[AcceptanceResult]:
    """Apply the acceptance rule of each row and return one result per row.

    `logits` are the target's, float32 [R, V]. Rows may have different rules. A row with the
    rejection rule but without a draft distribution uses the target-only rule, which is lossless for
    any draft that does not depend on the random draws. All returned tokens lie in [0, V). A row
    that reaches logits without a finite value ends there, with `AcceptanceResult.invalid_output`
    set.
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
    """End the walks whose logits have no finite value. Return the other walks and their logits."""
    kept: list[_Walk] = []
    for walk, is_finite in zip(walks, finite_A.tolist(), strict=True):
        if is_finite:
            kept.append(walk)
        else:
            walk.finish_invalid()
    return rows_AV[finite_A], kept


def _rows_of(logits: Tensor, walks: list[_Walk]) -> Tensor:
    """Return the logits [A, V] of the current node of each walk."""
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
    """Advance greedy walks by one level, from logits [A, V]."""
    params = [walk.row.sampling for walk in walks]
    histories = [walk.history() for walk in walks]
    edits = [i for i in range(len(walks)) if needs_editing(params[i], histories[i])]
    chosen = plain_argmax(rows_AV)
    if edits:
        of_edits = [params[i] for i in edits], [histories[i] for i in edits]
        chosen[edits] = plain_argmax(edit_logits(rows_AV[edits], *of_edits))
    _follow(walks, chosen)


def _accept_coupled(rows_AV: Tensor, walks: list[_Walk]) -> None:
    """Advance coupled walks by one level, from logits [A, V]."""
    keys = _keys(walks, NoiseStream.TARGET, rows_AV.device)
    _follow(walks, perturbed_argmax(_processed(rows_AV, walks), keys))


def _follow(walks: list[_Walk], chosen_A: Tensor) -> None:
    """Descend to the child with the chosen token, or end the walk with this token."""
    for walk, wanted in zip(walks, chosen_A.tolist(), strict=True):
        for node, token in walk.children():
            if token == wanted:
                walk.descend(node, token)
                break
        else:
            walk.finish(wanted)


def _accept_randomized(rows_AV: Tensor, walks: list[_Walk]) -> None:
    """Advance rejection and target-only walks by one level, from logits [A, V]."""
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
    """Return the target_probs of the children of each walk's current node, in float64."""
    pairs = [(i, token) for i, walk in enumerate(walks) for _, token in walk.children()]
    if not pairs:
        return [[] for _ in walks]
    index = torch.tensor(pairs, device=logprobs_AV.device)
    flat = logprobs_AV[index[:, 0], index[:, 1]].to(torch.float64).exp().tolist()
    return _split(flat, [len(walk.children()) for walk in walks])


def _random_draws(walks: list[_Walk]) -> list[list[float]]:
    """Return the random draws of each walk: the ACCEPT draw of each child, then the draw that all
    children share."""
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
"""(ids, log-probs) that replace a row's log-probs at these ids before the last token is drawn. They
have the same additive constant as the row's other log-probs."""


def _target_only(
    candidates: list[tuple[int, int]], probs: list[float], coin: float
) -> tuple[tuple[int, int] | None, Change | None]:
    """Return the accepted child, or None and the change that removes the children from p."""
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
    """Draw the last token of each walk from its log-probs after `changes`."""
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
