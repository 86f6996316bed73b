"""Converts packed int32 draft output of the GPU into chains, trees and their draft distributions.

Letters in shapes: B sessions (rows of a bucket); K chain length; n tree nodes; L maximum entries of
a distribution; Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.transfer.buffers import Downloader
from outrider.engine.kernels.attention.layout import PADDING_NODE
from outrider.spec.draft_distribution import DistributionEntries, make_distribution
from outrider.spec.tree import DraftTree, chain_parents
from outrider_drafter.gpu.shapes import DraftTreeShape
from outrider_drafter.proposers.interface import ProposedDraft, SessionDrafts
from outrider_drafter.state.session import FollowedSession


def make_chains_with_distributions(
    words: NDArray[np.int32],
    entries: Tensor,
    lengths: Sequence[int],
    target_ids: NDArray[np.int32],
    downloads: Downloader,
) -> list[ProposedDraft]:
    """Return chains with their draft distributions. Chain i is row i of `words`, cut to lengths[i]
    tokens.

    words: int32 [B, 2K] on the host: the K tokens of each chain, then the number of entries of each
    token's distribution. entries: int32 [2, B, K, L] on the device: the draft id of each entry, and
    its count, which is proportional to its probability. Only as many entries as the largest
    distribution has are downloaded. target_ids: int32 [Vd], the target id of each draft id.
    """
    steps = words.shape[1] // 2
    tokens, sizes = words[: len(lengths), :steps], words[: len(lengths), steps:]
    # Widths are powers of two, because each width has its own host memory.
    width = min(1 << (int(sizes.max()) - 1).bit_length(), entries.shape[3])
    kept = downloads.start_download(entries[..., :width].contiguous()).wait_tensor().numpy()
    return [
        _chain(tokens[row, :length], sizes[row], kept[:, row], target_ids)
        for row, length in enumerate(lengths)
    ]


def _chain(
    tokens: NDArray[np.int32],
    sizes: NDArray[np.int32],
    kept: NDArray[np.int32],
    target_ids: NDArray[np.int32],
) -> ProposedDraft:
    entries_by_step: dict[int, DistributionEntries] = {}
    logprobs = np.zeros(len(tokens), dtype=np.float32)
    for step, token in enumerate(tokens.tolist()):
        columns, counts = kept[:, step, : sizes[step]]
        ids = target_ids[columns]
        order = ids.argsort(kind="stable")  # A stable sort takes one pass if they increase already.
        ids, counts = ids[order], counts[order]
        entries_by_step[step] = (ids, counts.astype(np.uint16))
        own = counts[ids.searchsorted(token)]
        logprobs[step] = np.log(float(own)) - np.log(float(counts.sum(dtype=np.int64)))
    chain = DraftTree.chain(tokens)
    tree = DraftTree(tokens=chain.tokens, parents=chain.parents, logprobs=logprobs.cumsum())
    return ProposedDraft(tree=tree, distribution=make_distribution(len(tokens), entries_by_step))


def chain_lengths(
    shape: DraftTreeShape, planned_lens: NDArray[np.int64], max_lens: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the length to which the chain of each session is cut, int64 [B].

    planned_lens int64 [B]: draft tokens that the session's plan asks for; max_lens int64 [B]: draft
    tokens that still fit below the session's maximum length.
    """
    lengths: NDArray[np.int64] = np.minimum(np.minimum(shape.depth, planned_lens), max_lens)
    return lengths


def make_chains(
    sessions: Sequence[FollowedSession], counts: NDArray[np.int64], words: NDArray[np.int32]
) -> SessionDrafts:
    """Return one chain for each session. Chain i has the first counts[i] tokens of row i of
    `words`.

    counts: int64 [B]; words: int32 [B, K], token ids.
    """
    within = np.arange(words.shape[1]) < counts[:, None]
    tokens = words[within]
    return SessionDrafts(
        sessions=sessions,
        node_counts=counts,
        tokens=tokens,
        parents=chain_parents(counts),
        logprobs=np.zeros(len(tokens), dtype=np.float32),
    )


def make_trees(sessions: Sequence[FollowedSession], words: NDArray[np.int32]) -> SessionDrafts:
    """Return one tree for each session from its packed nodes. A node with the parent PADDING_NODE
    is padding and is left out.

    words: int32 [B, 3, n]: token ids, parents, bits of the float32 log-probabilities.
    """
    is_node = words[:, 1] != PADDING_NODE
    return SessionDrafts(
        sessions=sessions,
        node_counts=np.count_nonzero(is_node, axis=1),
        tokens=words[:, 0][is_node],
        parents=words[:, 1][is_node],
        logprobs=words[:, 2][is_node].view(np.float32),
    )
