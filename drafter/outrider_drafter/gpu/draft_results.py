"""Converts draft words read from the GPU into chains, trees and their draft distributions.

B sessions (rows of a bucket), K chain length, n tree nodes, L the most entries of a distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.transfer.buffers import Downloader
from outrider.engine.kernels.attention.layout import PADDING_NODE
from outrider.spec.draft_distribution import DistributionEntries, make_distribution
from outrider.spec.flat_trees import chain_parents
from outrider.spec.tree import DraftTree
from outrider_drafter.gpu.shapes import DraftTreeShape
from outrider_drafter.proposers.interface import SessionDrafts
from outrider_drafter.proposers.tree_growth import ProposedDraft
from outrider_drafter.state.session import FollowedSession


def make_chains_with_distributions(
    words: NDArray[np.int32],
    entries: Tensor,
    lengths: Sequence[int],
    target_ids: NDArray[np.int32],
    downloads: Downloader,
) -> list[ProposedDraft]:
    """The drafts of the first rows of a bucket, cut to `lengths`.

    words: int32 [B, 2K], the tokens and the sizes of their distributions, already here; entries:
    int32 [2, B, K, L] on the device, draft ids and counts, of which only what the largest
    distribution needs is fetched; target_ids: int32 [Vd].
    """
    steps = words.shape[1] // 2
    tokens, sizes = words[: len(lengths), :steps], words[: len(lengths), steps:]
    # Few widths, for each has host memory of its own.
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
    slots: dict[int, DistributionEntries] = {}
    logprobs = np.zeros(len(tokens), dtype=np.float32)
    for step, token in enumerate(tokens.tolist()):
        columns, counts = kept[:, step, : sizes[step]]
        ids = target_ids[columns]
        order = ids.argsort(kind="stable")  # one pass if they increase already
        ids, counts = ids[order], counts[order]
        slots[step] = (ids, counts.astype(np.uint16))
        own = counts[ids.searchsorted(token)]
        logprobs[step] = np.log(float(own)) - np.log(float(counts.sum(dtype=np.int64)))
    chain = DraftTree.chain(tokens)
    tree = DraftTree(tokens=chain.tokens, parents=chain.parents, logprobs=logprobs.cumsum())
    return ProposedDraft(tree=tree, distribution=make_distribution(len(tokens), slots))


def chain_lengths(
    shape: DraftTreeShape, wanted: NDArray[np.int64], rooms: NDArray[np.int64]
) -> NDArray[np.int64]:
    """[B]: how much of a chain each session has room and use for."""
    found: NDArray[np.int64] = np.minimum(np.minimum(shape.depth, wanted), rooms)
    return found


def make_chains(
    sessions: Sequence[FollowedSession], counts: NDArray[np.int64], words: NDArray[np.int32]
) -> SessionDrafts:
    """Of words int32 [B, K], tokens, as many of each chain as counts [B] say."""
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
    """Of words int32 [B, 3, n]: tokens, parents, bits of log-probabilities."""
    there = words[:, 1] != PADDING_NODE
    return SessionDrafts(
        sessions=sessions,
        node_counts=np.count_nonzero(there, axis=1),
        tokens=words[:, 0][there],
        parents=words[:, 1][there],
        logprobs=words[:, 2][there].view(np.float32),
    )
