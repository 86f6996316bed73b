"""Acceptance on the device under any acceptance rule, including rejection and target-only.

The decisions are those of `outrider.engine.acceptance`, with the same random numbers and residual
distributions. Log-sum-exps are summed in another order, so a decision may differ if a random number
is within 1e-6 of the acceptance probability. `matching` is cheaper for batches in which all
sessions are greedy or coupled.

Shape suffixes: B sessions of the batch bucket, N nodes per session including the root, M = B * N
rows (one per node), X session slots, V vocabulary size, D draft vocabulary size, K draft length, E
distribution entries of all sessions.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.engine.kernels.acceptance.matching import (
    DeviceAcceptance,
    ReferenceWalk,
    chain_parents,
)
from outrider.engine.kernels.acceptance.randomized_kernels import HUGE_SCORE
from outrider.engine.kernels.acceptance.randomized_launch import (
    DistributionTensors,
    LaunchArguments,
    launch_accept_sampled,
)
from outrider.engine.kernels.noise import row_keys
from outrider.engine.kernels.sampling import scaled_scores
from outrider.engine.kernels.session_tensors import RULE_REJECTION, RULE_TARGET_ONLY, SamplingState
from outrider.engine.noise import noise_bits, perturbed_argmax, uniform_from_bits
from outrider.engine.residual import ResidualSampler
from outrider.errors import InvalidRequestError
from outrider.spec.noise import SHARED_DRAW_ID, NoiseStream


class DenseChainDistribution(NamedTuple):
    """Dense draft distributions of chains that were drafted on this device."""

    probs: Tensor
    """float32 [X, K, D]: probs[x, k] are the probabilities from which draft token k of the session
    in slot x was drawn. K is at least N - 1. If the probability of the draft token itself is 0 or
    not finite, the distribution is invalid and the target-only rule decides on that token."""
    draft_columns: Tensor
    """int32 [V]: the last index into `probs` of each target id; -1 for ids that the draft
    vocabulary lacks."""
    target_ids: Tensor
    """int32 [D]: the target id of each last index of `probs`."""


class SparseDistribution(NamedTuple):
    """Sparse draft distributions of all sessions, as drafter processes send them
    (`spec.draft_distribution`)."""

    ids: Tensor
    """int32 [E]: target ids, strictly increasing within a node's entries."""
    counts: Tensor
    """int32 [E]: quantised weights in [1, 65535], proportional to the probabilities."""
    ranges: Tensor
    """int32 [B, N, 2], last dimension contiguous: the children of row j of session b were drawn
    from the entries ranges[b, j, 0] to ranges[b, j, 1] (exclusive). If all ranges of a session are
    empty, it has no distribution."""

    @classmethod
    def of_offsets(cls, ids: Tensor, counts: Tensor, offsets: Tensor) -> SparseDistribution:
        """Build the distributions from offsets instead of ranges: row j of session b has the
        entries offsets[b, j] to offsets[b, j + 1] (exclusive). offsets: int32 [B, N + 1]."""
        return cls(ids, counts, offsets.unfold(1, 2, 1))


def accept_sampled(
    logits: Tensor,
    chosen: Tensor,
    tokens: Tensor,
    parents: Tensor | None,
    *,
    num_nodes: int,
    state: SamplingState,
    slots: Tensor,
    positions: Tensor,
    distribution: SparseDistribution | DenseChainDistribution | None,
) -> DeviceAcceptance:
    """Decide which draft tokens of each session are accepted, under the session's own acceptance
    rule.

    logits: float32 or bfloat16 [M, V], columns contiguous. Tokens are sampled from softmax(logits /
    temperature), so logits of sessions with penalties, bans, top-k, top-p or min-p must already be
    processed by the logits processor; logits that are already divided by the temperature need
    temperature 1 in `state`. chosen: int32 [M], the result of `choose_tokens` for these logits with
    side "target"; -1 if the row has no finite logit. Greedy and coupled sessions compare their
    draft tokens with it. The other rules emit it if they rejected no child of the last accepted
    node. No child of a row without a finite logit is accepted.

    tokens: int32 [M], the draft token of each row; the entry of the root is ignored. Nodes with the
    token -1 (absent) or a token >= V are never accepted. parents: int32 [B, N - 1] (-1 for the
    root, -2 for absent nodes); None for chains. Siblings are tried in row order, which is the order
    in which they were drawn. slots: int32 [B], the session slots. positions: int32 [M], the
    position of the token that follows each row. distribution: the distributions from which the
    draft tokens of sessions with the rejection rule were drawn; a session without one uses the
    target-only rule. Raises InvalidRequestError for a DenseChainDistribution with trees or with
    fewer than N - 1 steps.
    """
    if isinstance(distribution, DenseChainDistribution) and (
        parents is not None or distribution.probs.shape[1] < num_nodes - 1
    ):
        raise InvalidRequestError(
            f"a dense draft distribution needs a chain of at most {distribution.probs.shape[1]} "
            f"draft nodes (its number of steps), got {num_nodes - 1} nodes"
            + (" of a tree" if parents is not None else ""),
            reason="KERNEL_SHAPES",
        )
    function = accept_sampled_triton if logits.is_cuda else accept_sampled_torch
    return function(
        logits,
        chosen,
        tokens,
        parents,
        num_nodes=num_nodes,
        state=state,
        slots=slots,
        positions=positions,
        distribution=distribution,
    )


def accept_sampled_triton(
    logits: Tensor,
    chosen: Tensor,
    tokens: Tensor,
    parents: Tensor | None,
    *,
    num_nodes: int,
    state: SamplingState,
    slots: Tensor,
    positions: Tensor,
    distribution: SparseDistribution | DenseChainDistribution | None,
    tile: int | None = None,
) -> DeviceAcceptance:
    """Compute `accept_sampled` with Triton kernels. tile: number of columns per program, a power of
    two; None for a default that depends on the shape."""
    distributions = DistributionTensors()
    if isinstance(distribution, SparseDistribution):
        distributions = DistributionTensors(
            ids=distribution.ids, counts=distribution.counts, ranges=distribution.ranges
        )
    elif distribution is not None:
        distributions = DistributionTensors(
            probs=distribution.probs, draft_columns=distribution.draft_columns
        )
    arguments = LaunchArguments(
        logits, chosen, tokens, parents, num_nodes, state, slots, positions, distributions
    )
    return launch_accept_sampled(arguments, tile=tile)


def accept_sampled_torch(
    logits: Tensor,
    chosen: Tensor,
    tokens: Tensor,
    parents: Tensor | None,
    *,
    num_nodes: int,
    state: SamplingState,
    slots: Tensor,
    positions: Tensor,
    distribution: SparseDistribution | DenseChainDistribution | None,
) -> DeviceAcceptance:
    """Compute `accept_sampled` on the host, one node at a time, for CPU tensors only."""
    batch = len(slots)
    if parents is None:
        parents = chain_parents(batch, num_nodes, logits.device)
    owners = slots.long()
    rules, temperatures = state.rules[owners], state.temperatures[owners]
    coin = (temperatures > 0) & ((rules == RULE_TARGET_ONLY) | (rules == RULE_REJECTION))
    judge = _RandomizedAcceptance(
        logits=logits,
        tokens_BN=tokens.view(batch, num_nodes),
        parents_BN=parents,
        temperatures=temperatures,
        stream_keys=state.stream_keys[owners],
        slots=owners,
        positions_BN=positions.view(batch, num_nodes),
        distribution=distribution,
        rejection=rules == RULE_REJECTION,
    )
    chosen_BN = chosen.view(batch, num_nodes)
    node = torch.zeros(batch, dtype=torch.int64, device=logits.device)
    walk = ReferenceWalk(batch, num_nodes, logits.device)
    for row in range(1, num_nodes):
        drafted = judge.tokens_BN[:, row]
        below = (parents[:, row - 1] == node - 1) & (drafted >= 0)
        wanted = chosen_BN.gather(1, node[:, None])[:, 0]
        tossed = (below & coin & (drafted < logits.shape[1]) & (wanted >= 0)).nonzero()[:, 0]
        stands = below & (drafted == wanted) & ~coin
        stands[tossed] = judge.draw_accept(tossed, node[tossed], row)
        node = walk.step(row, node, drafted, below, stands)
    walk.fallback = judge.fallback & coin
    final = chosen_BN.gather(1, node[:, None])[:, 0].clone()
    changed = coin & (judge.changed_at == node)
    changed = (changed | (coin & (final >= 0) & judge.is_huge(node))).nonzero()[:, 0]
    if len(changed):
        final[changed] = judge.draw_token(changed, node[changed], final[changed])
    return walk.finish(final)


class _RandomizedAcceptance:
    """Random draws and residual distributions of the sessions with the target-only or the rejection
    rule. A is the number of sessions that a method is called for."""

    def __init__(
        self,
        *,
        logits: Tensor,
        tokens_BN: Tensor,
        parents_BN: Tensor,
        temperatures: Tensor,
        stream_keys: Tensor,
        slots: Tensor,
        positions_BN: Tensor,
        distribution: SparseDistribution | DenseChainDistribution | None,
        rejection: Tensor,
    ) -> None:
        self.tokens_BN, self.parents_BN = tokens_BN, parents_BN
        self._logits, self._temperatures = logits, temperatures
        self._stream_keys, self._slots = stream_keys, slots
        self._positions_BN = positions_BN
        self._distribution = distribution
        self._uses_distribution = rejection.clone()
        if isinstance(distribution, SparseDistribution):
            begins, ends = distribution.ranges.unbind(dim=2)
            self._uses_distribution &= (ends > begins).any(dim=1)
        elif distribution is None:
            self._uses_distribution.zero_()
        self.fallback = rejection & ~self._uses_distribution & (tokens_BN[:, 1:] >= 0).any(dim=1)
        """bool [B]: whether a session with the rejection rule has drafts but no valid draft
        distribution."""
        batch = len(slots)
        self.changed_at = torch.full((batch,), -1, dtype=torch.int64, device=logits.device)
        """int64 [B]: the row whose target distribution a rejection changed, or -1."""
        self._unsound_at = self.changed_at.clone()
        """int64 [B]: the row at which the session's dense distribution was invalid, or -1."""
        self._mass_at = self.changed_at.clone()
        self._mass = torch.zeros(batch, dtype=torch.float64, device=logits.device)
        self._tried_at = self.changed_at.clone()
        self._winners = self.changed_at.clone()
        self._changes: dict[int, tuple[np.ndarray, np.ndarray] | None] = {}

    def draw_accept(self, sessions: Tensor, node: Tensor, row: int) -> Tensor:
        """Return whether node `row`, a child of the session's last accepted node `node`, is
        accepted, bool [A]. sessions, node: int64 [A]."""
        stands = torch.zeros(len(sessions), dtype=torch.bool, device=sessions.device)
        has_distribution = self._uses_distribution[sessions]
        plain = (~has_distribution).nonzero()[:, 0]
        if len(plain):
            stands[plain] = self._target_only(sessions[plain], node[plain], row)
        judged = has_distribution.nonzero()[:, 0]
        if len(judged):
            rule = (
                self._dense
                if isinstance(self._distribution, DenseChainDistribution)
                else self._sparse
            )
            stands[judged] = rule(sessions[judged], node[judged], row)
        return stands

    def _logprobs(self, sessions: Tensor, node: Tensor) -> Tensor:
        num_nodes = self.tokens_BN.shape[1]
        logits_AV = self._logits[sessions * num_nodes + node]
        return scaled_scores(logits_AV, self._temperatures[sessions]).log_softmax(dim=-1)

    def _probs(self, sessions: Tensor, node: Tensor, tokens: Tensor) -> Tensor:
        logprobs_AV = self._logprobs(sessions, node)
        return logprobs_AV.gather(1, tokens.long()[:, None])[:, 0].to(torch.float64).exp()

    def _accept_drafts(self, sessions: Tensor, node: Tensor, ids: Tensor) -> Tensor:
        keys = self._keys(sessions, node, NoiseStream.ACCEPT)
        return uniform_from_bits(noise_bits(keys, ids.long()))

    def _keys(self, sessions: Tensor, node: Tensor, stream: NoiseStream) -> Tensor:
        positions = self._positions_BN[sessions, node]
        return row_keys(self._stream_keys[sessions, stream - 1], positions)

    def _siblings(self, sessions: Tensor, node: Tensor) -> Tensor:
        """Return bool [A, N]: whether each row is a child of the session's node with a token in
        range."""
        drafted = self.tokens_BN[sessions]
        below = torch.zeros_like(drafted, dtype=torch.bool)
        below[:, 1:] = self.parents_BN[sessions] == node[:, None] - 1
        return below & (drafted >= 0) & (drafted < self._logits.shape[1])

    def _target_only(self, sessions: Tensor, node: Tensor, row: int) -> Tensor:
        drafted = self.tokens_BN[sessions, row]
        earlier = self._siblings(sessions, node)[:, :row]
        seen = (earlier & (self.tokens_BN[sessions, :row] == drafted[:, None])).any(dim=1)
        before = self._mass[sessions].masked_fill(self._mass_at[sessions] != node, 0.0)
        gained = self._probs(sessions, node, drafted).masked_fill(seen, 0.0)
        self._mass[sessions] = before + gained
        self._mass_at[sessions] = node
        self.changed_at[sessions] = node
        coins = self._accept_drafts(sessions, node, torch.full_like(node, SHARED_DRAW_ID))
        return coins < before + gained

    def _dense(self, sessions: Tensor, node: Tensor, row: int) -> Tensor:
        assert isinstance(self._distribution, DenseChainDistribution)
        drafted = self.tokens_BN[sessions, row]
        columns = self._distribution.draft_columns[drafted.long()].long()
        weights = self._distribution.probs[self._slots[sessions], node, columns.clamp(min=0)]
        coins = self._accept_drafts(sessions, node, drafted)
        drawn = columns >= 0
        stands = coins * weights.to(torch.float64) < self._probs(sessions, node, drafted)
        self.changed_at[sessions] = torch.where(drawn, node, self.changed_at[sessions])
        stands &= drawn
        # A distribution that does not have the token it is said to have given is no distribution.
        unsound = (drawn & ~((weights > 0) & (weights < math.inf))).nonzero()[:, 0]
        if len(unsound):
            self.fallback[sessions[unsound]] = True
            self._unsound_at[sessions[unsound]] = node[unsound]
            stands[unsound] = self._target_only(sessions[unsound], node[unsound], row)
        return stands

    def _sparse(self, sessions: Tensor, node: Tensor, row: int) -> Tensor:
        fresh = (self._tried_at[sessions] != node).nonzero()[:, 0]
        if len(fresh):
            self._walk_residuals(sessions[fresh], node[fresh])
        return self._winners[sessions] == row

    def _walk_residuals(self, sessions: Tensor, node: Tensor) -> None:
        """Try all children of each session's node, and store the accepted one in `_winners`."""
        assert isinstance(self._distribution, SparseDistribution)
        logprobs_AV = self._logprobs(sessions, node)
        siblings = self._siblings(sessions, node)
        coins = self._accept_drafts(sessions[:, None], node[:, None], self.tokens_BN[sessions])
        for index, (session, at) in enumerate(zip(sessions.tolist(), node.tolist(), strict=True)):
            rows = siblings[index].nonzero()[:, 0].tolist()
            candidates = [(r, int(self.tokens_BN[session, r])) for r in rows]
            begin, end = self._distribution.ranges[session, at].tolist()
            ids, counts = (
                self._distribution.ids[begin:end].numpy(),
                self._distribution.counts[begin:end].numpy(),
            )
            probs = [math.exp(float(logprobs_AV[index, token])) for _, token in candidates]
            walk = ResidualSampler(logprobs_AV[index], ids, counts.astype(np.uint16))
            winner, change = walk.try_children(candidates, probs, coins[index, rows].tolist())
            self._winners[session] = -1 if winner is None else winner[0]
            self._changes[session] = change
            self.changed_at[session] = at if change is not None else -1
        self._tried_at[sessions] = node

    def is_huge(self, node: Tensor) -> Tensor:
        """Return whether the largest score of each session exceeds HUGE_SCORE, above which rounding
        loses the Gumbel noise, bool [B]. node: int64 [B], the row of each session to check."""
        rows = torch.arange(len(node), device=node.device) * self.tokens_BN.shape[1] + node
        tops = self._logits[rows].nan_to_num(nan=-math.inf, posinf=math.inf).amax(dim=-1)
        return scaled_scores(tops[:, None], self._temperatures)[:, 0] > HUGE_SCORE

    def draw_token(self, sessions: Tensor, node: Tensor, bonus: Tensor) -> Tensor:
        """Draw the last token, int32 [A], of sessions whose target distribution a rejection changed
        or whose scores exceed HUGE_SCORE.

        bonus: int32 [A], the token to return if the changed distribution is empty.
        """
        scores_AV = self._logprobs(sessions, node)
        changed = self.changed_at[sessions] == node  # else only huge
        by_distribution = self._uses_distribution[sessions] & (self._unsound_at[sessions] != node)
        self._without_children(scores_AV, changed & ~by_distribution, sessions, node)
        if isinstance(self._distribution, DenseChainDistribution):
            self._residual_without_dense(scores_AV, changed & by_distribution, sessions, node)
        else:
            for index in (changed & by_distribution).nonzero()[:, 0].tolist():
                change = self._changes[int(sessions[index])]
                assert change is not None
                values = torch.from_numpy(change[1].astype(np.float32))
                scores_AV[index, torch.from_numpy(change[0])] = values
        keys = self._keys(sessions, node, NoiseStream.RECOVER)
        drawn = perturbed_argmax(scores_AV, keys).to(torch.int32)
        return torch.where(drawn >= 0, drawn, bonus)

    def _without_children(
        self, scores_AV: Tensor, where: Tensor, sessions: Tensor, node: Tensor
    ) -> None:
        """Set the log-probs [A, V] of the children of each session's node to -inf, in the rows
        `where`, bool [A]."""
        siblings = self._siblings(sessions, node) & where[:, None]
        rows, columns = siblings.nonzero().unbind(dim=1)
        scores_AV[rows, self.tokens_BN[sessions[rows], columns].long()] = -math.inf

    def _residual_without_dense(
        self, scores_AV: Tensor, where: Tensor, sessions: Tensor, node: Tensor
    ) -> None:
        """Replace the log-probs [A, V] by log max(p - q, 0), in the rows `where`, bool [A]."""
        assert isinstance(self._distribution, DenseChainDistribution)
        rows = where.nonzero()[:, 0]
        probs = scores_AV[rows].exp()
        weights = self._distribution.probs[self._slots[sessions[rows]], node[rows]]
        probs.index_add_(1, self._distribution.target_ids.long(), -weights)
        scores_AV[rows] = probs.clamp(min=0.0).log()
