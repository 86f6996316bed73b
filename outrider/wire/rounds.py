"""Messages with the verdicts of a round or the proposals of a draft batch, as columns.

In shapes, S is the number of entries, which are verdicts or proposals; T, N and F are the numbers
of tokens, nodes and feature rows of all entries together; and H is the number of values in a
feature row. Each entry owns a consecutive part of each flat array, in the order of the entries.
Decoded arrays are read-only views of the received bytes. `Verdict` and `Proposal` are single
entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.spec.draft_distribution import DraftDistribution
from outrider.spec.tree import DraftTree, valid_distributions, valid_trees
from outrider.wire.arrays import FeatureRows, WireTensor
from outrider.wire.limits import MAX_HANDLES

Indices = NDArray[np.int64]
ScalarT = TypeVar("ScalarT", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Verdict:
    """Tokens that one session has committed, and features of positions whose KV is written.

    The result of a prefill is a verdict too: its tokens are the prompt and the first sampled token.
    A chunked prefill gives one verdict for each chunk, and only the last one has `draft_wanted`.
    Once prefill is complete, a session has after each verdict with features one feature row for
    each token except for the last one, the root, whose KV is not written yet.
    """

    handle: int
    start: int
    """Position of the first token of `tokens` in the session's prefix."""
    tokens: NDArray[np.int32]
    """Newly committed token ids, [n]. The last one is the new root if `draft_wanted` is true."""
    prefix_digest: int
    """Digest of the session's prefix, including `tokens`."""
    feature_start: int
    """First position that has a row in `features`."""
    features: WireTensor | None
    """Projected features, [m, H], of the positions feature_start to feature_start + m - 1."""
    draft_wanted: bool
    """Whether the verifier expects a proposal for the new prefix."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Verdicts:
    """Verdicts of a round for one drafter, as columns with one entry for each session. Columns are
    int64 [S] unless noted.
    """

    handles: Indices
    starts: Indices
    token_counts: Indices
    tokens: NDArray[np.int32]
    """Newly committed token ids of all entries, [T]."""
    digests: NDArray[np.uint64]
    """Digest of each session's prefix, including its new tokens, [S]."""
    feature_starts: Indices
    feature_counts: Indices
    draft_wanted: NDArray[np.bool_]
    features: FeatureRows | None
    """Features of all entries, [F, H]; None if no entry has features."""
    feature_offsets: Indices | None = None
    """Index of each entry's first row in `features`, [S]. `features` may then contain rows of no
    entry. None if `features` contains exactly the entries' rows, in order.
    """

    def __len__(self) -> int:
        return len(self.handles)

    @property
    def nbytes(self) -> int:
        """Approximate size of the message in bytes."""
        features = 0 if self.features is None else self.features.nbytes
        return 64 + 40 * len(self) + self.tokens.nbytes + features

    @classmethod
    def of_verdicts(cls, verdicts: Sequence[Verdict]) -> Verdicts:
        """Return one message with these verdicts of several sessions. Their features must have the
        same dtype and width.
        """
        features = [v.features for v in verdicts if v.features is not None]
        pieces = tuple(wire.data for wire in features)
        rows = FeatureRows(dtype=features[0].dtype, segments=pieces) if features else None
        return cls(
            handles=_column([v.handle for v in verdicts]),
            starts=_column([v.start for v in verdicts]),
            token_counts=_column([len(v.tokens) for v in verdicts]),
            tokens=_joined([v.tokens for v in verdicts], np.int32),
            digests=np.array([v.prefix_digest for v in verdicts], dtype=np.uint64),
            feature_starts=_column([v.feature_start for v in verdicts]),
            feature_counts=_column(
                [0 if v.features is None else len(v.features.data) for v in verdicts]
            ),
            draft_wanted=np.array([v.draft_wanted for v in verdicts], dtype=np.bool_),
            features=rows,
        )

    def first_rows(self) -> Indices:
        """Return the index of each entry's first row in `features`, [S]."""
        if self.feature_offsets is not None:
            return self.feature_offsets
        first: Indices = np.cumsum(self.feature_counts) - self.feature_counts
        return first

    def iter_verdicts(self) -> list[Verdict]:
        """Return the verdicts of all entries. The features of an entry without feature rows are
        None.
        """
        ends, firsts = np.cumsum(self.token_counts), self.first_rows()
        rows = None if self.features is None else self.features.joined()
        result: list[Verdict] = []
        for i in range(len(self)):
            count, first = int(self.feature_counts[i]), int(firsts[i])
            wire = None
            if count and rows is not None and self.features is not None:
                wire = WireTensor(dtype=self.features.dtype, data=rows[first : first + count])
            result.append(
                Verdict(
                    handle=int(self.handles[i]),
                    start=int(self.starts[i]),
                    tokens=self.tokens[int(ends[i] - self.token_counts[i]) : int(ends[i])],
                    prefix_digest=int(self.digests[i]),
                    feature_start=int(self.feature_starts[i]),
                    features=wire,
                    draft_wanted=bool(self.draft_wanted[i]),
                )
            )
        return result


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Proposal:
    """A draft tree of one session. It can be used only if `prefix_digest` is the digest of the
    session's present prefix.

    A tree without nodes means that the drafter has no draft for this prefix. The verifier then
    decodes without drafts immediately, instead of waiting for the proposal timeout.
    """

    handle: int
    prefix_digest: int
    """64-bit digest of the committed prefix (root included) that the tree continues."""
    prefix_len: int
    """Number of tokens in that prefix, prompt and root included."""
    tree: DraftTree
    distribution: DraftDistribution | None = None
    """Draft probabilities of the children of each node; None unless the acceptance rule needs them.
    """
    draft_us: int = 0
    """Time in microseconds that drafting took for the whole batch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftDistributions:
    """Draft distributions of the entries of `Proposals` that have one.

    Such an entry with n nodes owns n + 1 slots: one for the root and one for each node. A slot
    holds the distribution from which the children of its node were drawn. L is the number of slots
    and M the number of token ids in all slots.
    """

    has_distribution: NDArray[np.bool_]
    """Whether each entry has a distribution, [S]."""
    sizes: Indices
    """Number of token ids in each slot, [L]."""
    ids: NDArray[np.int32]
    """Token ids of all slots, [M]."""
    counts: NDArray[np.uint16]
    """Counts of the token ids, [M]; a probability is a count divided by the sum of its slot's
    counts.
    """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Proposals:
    """Proposals of a draft batch, as columns with one entry for each proposal. Columns are int64
    [S] unless noted. A session's handle occurs more than once if the batch has drafts for several
    of its prefixes.
    """

    handles: Indices
    digests: NDArray[np.uint64]
    """Digest of the prefix that each tree continues, [S]."""
    prefix_lens: Indices
    node_counts: Indices
    tokens: NDArray[np.int32]
    """Token ids of the nodes, [N]."""
    parents: NDArray[np.int32]
    """Index of each node's parent within the same tree, [N]; -1 means the root."""
    logprobs: NDArray[np.float32]
    """Cumulative log-probability of each node's path, [N]."""
    distributions: DraftDistributions | None = None
    draft_us: int = 0

    def __len__(self) -> int:
        return len(self.handles)

    @property
    def nbytes(self) -> int:
        """Approximate size of the message in bytes."""
        distributions = self.distributions
        size = 64 + 32 * len(self) + 3 * self.tokens.nbytes
        return (
            size
            if distributions is None
            else size + distributions.sizes.nbytes + 2 * distributions.ids.nbytes
        )

    def select(self, chosen: Indices) -> Proposals:
        """Return a message with the entries at the indices `chosen`, in that order."""
        if len(chosen) == len(self) and bool((chosen == np.arange(len(self))).all()):
            return self
        nodes = owned_indices(self.node_counts, chosen)
        return Proposals(
            handles=self.handles[chosen],
            digests=self.digests[chosen],
            prefix_lens=self.prefix_lens[chosen],
            node_counts=self.node_counts[chosen],
            tokens=self.tokens[nodes],
            parents=self.parents[nodes],
            logprobs=self.logprobs[nodes],
            distributions=None
            if self.distributions is None
            else self._distributions_only(chosen, self.distributions),
            draft_us=self.draft_us,
        )

    def _distributions_only(
        self, chosen: Indices, distributions: DraftDistributions
    ) -> DraftDistributions | None:
        given = distributions.has_distribution[chosen]
        if not given.any():
            return None
        slots = owned_indices(
            np.where(distributions.has_distribution, self.node_counts + 1, 0), chosen
        )
        pairs = owned_indices(distributions.sizes, slots)
        return DraftDistributions(
            has_distribution=given,
            sizes=distributions.sizes[slots],
            ids=distributions.ids[pairs],
            counts=distributions.counts[pairs],
        )

    @classmethod
    def concatenate(cls, messages: Sequence[Proposals]) -> Proposals:
        """Return one message with the entries of several messages, in order, and with the longest
        `draft_us` of them. The messages must not have distributions.
        """
        assert all(message.distributions is None for message in messages)
        return cls(
            handles=_joined([each.handles for each in messages], np.int64),
            digests=_joined([each.digests for each in messages], np.uint64),
            prefix_lens=_joined([each.prefix_lens for each in messages], np.int64),
            node_counts=_joined([each.node_counts for each in messages], np.int64),
            tokens=_joined([each.tokens for each in messages], np.int32),
            parents=_joined([each.parents for each in messages], np.int32),
            logprobs=_joined([each.logprobs for each in messages], np.float32),
            draft_us=max([each.draft_us for each in messages], default=0),
        )

    @classmethod
    def of_proposals(
        cls, proposals: Sequence[Proposal], *, draft_us: int | None = None
    ) -> Proposals:
        """Return one message with these proposals. Its `draft_us` is the longest one of the
        proposals unless it is given.
        """
        return cls(
            handles=_column([p.handle for p in proposals]),
            digests=np.array([p.prefix_digest for p in proposals], dtype=np.uint64),
            prefix_lens=_column([p.prefix_len for p in proposals]),
            node_counts=_column([len(p.tree) for p in proposals]),
            tokens=_joined([p.tree.tokens for p in proposals], np.int32),
            parents=_joined([p.tree.parents for p in proposals], np.int32),
            logprobs=_joined([p.tree.logprobs for p in proposals], np.float32),
            distributions=_distributions_of(proposals),
            draft_us=max([p.draft_us for p in proposals], default=0)
            if draft_us is None
            else draft_us,
        )

    def get_proposal(self, index: int) -> Proposal:
        """Return the proposal of entry `index`; its arrays are views."""
        part = self.nodes_of(index)
        return Proposal(
            handle=int(self.handles[index]),
            prefix_digest=int(self.digests[index]),
            prefix_len=int(self.prefix_lens[index]),
            tree=DraftTree(self.tokens[part], self.parents[part], self.logprobs[part]),
            distribution=self._distribution(index),
            draft_us=self.draft_us,
        )

    def nodes_of(self, index: int) -> slice:
        """Return the slice of the flat arrays that contains the nodes of entry `index`."""
        begin = int(self.node_counts[:index].sum())
        return slice(begin, begin + int(self.node_counts[index]))

    def iter_proposals(self) -> list[Proposal]:
        """Return the proposals of all entries."""
        return [self.get_proposal(index) for index in range(len(self))]

    def _distribution(self, index: int) -> DraftDistribution | None:
        distributions = self.distributions
        if distributions is None or not distributions.has_distribution[index]:
            return None
        slots = self.node_counts + 1
        first = int(slots[:index][distributions.has_distribution[:index]].sum())
        sizes = distributions.sizes[first : first + int(slots[index])]
        begin = int(distributions.sizes[:first].sum())
        end = begin + int(sizes.sum())
        offsets = np.zeros(len(sizes) + 1, dtype=np.int32)
        np.cumsum(sizes, out=offsets[1:])
        return DraftDistribution(
            offsets=offsets,
            ids=distributions.ids[begin:end],
            counts=distributions.counts[begin:end],
        )


def valid_proposals(proposals: Proposals, *, vocab_size: int, max_nodes: int) -> NDArray[np.bool_]:
    """Return a mask [S] of the entries that follow all rules of trees and distributions, for a
    vocabulary of `vocab_size` and at most `max_nodes` nodes in a tree. Several entries may have the
    same handle. Never raises for decoded messages.
    """
    drafts = proposals
    sound = valid_trees(
        drafts.node_counts,
        drafts.tokens,
        drafts.parents,
        drafts.logprobs,
        vocab_size=vocab_size,
        max_nodes=max_nodes,
    )
    if drafts.distributions is not None:
        distributions = drafts.distributions
        sound &= valid_distributions(
            drafts.node_counts,
            drafts.tokens,
            drafts.parents,
            distributions.has_distribution,
            distributions.sizes,
            distributions.ids,
            distributions.counts,
            trees=sound,
            vocab_size=vocab_size,
        )
    sound &= (drafts.prefix_lens >= 1) & (drafts.handles < MAX_HANDLES)
    return sound


def is_last_occurrence(values: Indices) -> NDArray[np.bool_]:
    """Return a mask [S] of the values that do not occur again at a higher index."""
    result = np.ones(len(values), dtype=np.bool_)
    if len(values) < 2:
        return result
    ascending = np.sort(values)
    if (ascending[1:] != ascending[:-1]).all():
        return result
    order = np.argsort(values, kind="stable")
    result[order[:-1]] = np.diff(values[order]) != 0
    return result


def owner_and_offset(counts: Indices) -> tuple[Indices, Indices]:
    """Return two indices for each element of a flat array: the index of the entry that owns it, and
    its index within that entry. Entry e owns counts[e] consecutive elements.
    """
    owners = np.repeat(np.arange(len(counts)), counts)
    firsts = np.cumsum(counts) - counts
    return owners, np.arange(len(owners)) - firsts[owners]


def owned_indices(counts: Indices, chosen: Indices) -> Indices:
    """Return the indices of the elements of a flat array that the entries `chosen` own, in the
    order of `chosen`. Entry e owns counts[e] consecutive elements.
    """
    owners, places = owner_and_offset(counts[chosen])
    firsts = (np.cumsum(counts) - counts)[chosen]
    return firsts[owners] + places


def _distributions_of(proposals: Sequence[Proposal]) -> DraftDistributions | None:
    distributions = [p.distribution for p in proposals if p.distribution is not None]
    if not distributions:
        return None
    return DraftDistributions(
        has_distribution=np.array([p.distribution is not None for p in proposals], dtype=np.bool_),
        sizes=np.concatenate([np.diff(law.offsets) for law in distributions]).astype(np.int64),
        ids=_joined([law.ids for law in distributions], np.int32),
        counts=_joined([law.counts for law in distributions], np.uint16),
    )


def _column(values: Sequence[int]) -> Indices:
    return np.array(values, dtype=np.int64)


def _joined(pieces: Sequence[NDArray[ScalarT]], dtype: type[ScalarT]) -> NDArray[ScalarT]:
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces).astype(dtype, copy=False) if pieces else np.empty(0, dtype)
