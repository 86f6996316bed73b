"""Chains with the laws that they were drawn from, as they come from the device.

B rows of a bucket, K chain length, L most entries of a law.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.transfer.buffers import Downloader
from outrider.spec.draft_distribution import DistributionEntries, make_distribution
from outrider.spec.tree import DraftTree
from outrider_drafter.proposers.tree_growth import ProposedDraft


def make_chains_with_distributions(
    words: NDArray[np.int32],
    entries: Tensor,
    lengths: Sequence[int],
    target_ids: NDArray[np.int32],
    downloads: Downloader,
) -> list[ProposedDraft]:
    """The drafts of the first rows of a bucket, cut to `lengths`.

    words: int32 [B, 2K], the tokens and the sizes of their laws, already here; entries: int32
    [2, B, K, L] on the device, draft ids and counts, of which only what the largest law needs is
    fetched; target_ids: int32 [Vd].
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
