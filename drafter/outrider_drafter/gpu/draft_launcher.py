"""Launches drafts for sessions or outcomes on the GPU and reads the results back.

Letters in shapes: B rows of a bucket; K chain length; A alternative tokens of each level; n tree
nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.drafting.draft_forward import NewRows
from outrider.engine.device.drafting.draft_masks import DraftTokenMasks
from outrider.engine.device.drafting.draft_row_state import DraftSampling
from outrider.engine.device.drafting.look_ahead_program import LookAheadProgram
from outrider.engine.device.transfer.buffers import DownloadBuffer, Downloader
from outrider.engine.draft_sampling import distribution_limits_for
from outrider_drafter.gpu.draft_results import (
    make_chains,
    make_chains_with_distributions,
    make_trees,
)
from outrider_drafter.gpu.grammar_masks import (
    DraftConstraintStates,
    first_level_masks,
    truncate_chains,
)
from outrider_drafter.gpu.paged_kv import PagedDraftKV
from outrider_drafter.gpu.shapes import BATCH_SIZES, CHAIN_LENGTHS, DraftTreeShape
from outrider_drafter.proposers.interface import SessionDrafts
from outrider_drafter.state.outcomes import OUTCOME_BATCH_SIZES
from outrider_drafter.state.session import FollowedSession

LaunchOutput = tuple[Tensor, Tensor | None]
"""Packed output of a draft launch, and the entries of draft distributions or None. Chains: int32
[B, K] tokens; with alternative tokens [B, K, 1 + A] (see `ChainDraft`); with distributions [B, 2K]
tokens and distribution sizes (see `ChainDistributions`). Trees: int32 [B, 3, n] tokens, parents and
bits of the log-probs."""


class DraftLauncher:
    """Launches drafts of a given shape from new rows and reads them back."""

    def __init__(
        self, program: LookAheadProgram, rows: PagedDraftKV, landing: DownloadBuffer
    ) -> None:
        """Create a launcher. `landing`: host buffer that receives the first tensor of a launch's
        output."""
        self._program, self._rows, self._landing = program, rows, landing
        self._downloads = Downloader(rows.tables.device)
        vocabulary = program.forward.vocabulary
        ids = vocabulary.target_ids
        self._target_ids: NDArray[np.int32] = ids.cpu().numpy().astype(np.int32)
        self.masks = DraftTokenMasks(
            levels=CHAIN_LENGTHS[-1],
            max_rows=max(BATCH_SIZES[-1], OUTCOME_BATCH_SIZES[-1]),
            vocab_size=len(vocabulary.draft_columns),
            target_ids=ids,
            device=ids.device,
        )
        """Allowed-token masks of the next launch with logits processing. They remain set for later
        launches."""

    def launch_draft(
        self, shape: DraftTreeShape, rows: NewRows, drawing: DraftSampling | None, *, general: bool
    ) -> LaunchOutput:
        """Launch a draft and the download of its output, without reading values on the host.
        `general`: whether sessions may process their logits, have a constraint (`masks`), or grow
        trees with the target's noise."""
        grown = self._grown(shape, rows, drawing, general=general)
        self._landing.start_copy(grown[0])
        return grown

    def _grown(
        self, shape: DraftTreeShape, rows: NewRows, drawing: DraftSampling | None, *, general: bool
    ) -> LaunchOutput:
        state, warp = self._rows.sampling, self._rows.warp.state if general else None
        allowed_tokens = self.masks if general else None
        if shape.top_k == 1:
            chain = self._program.draft_chain(
                rows,
                state=state,
                length=shape.depth,
                warp=warp,
                distribution_limits=distribution_limits_for(shape.depth)
                if shape.has_distribution
                else None,
                drawing=drawing,
                allowed_tokens=allowed_tokens,
                with_others=shape.has_alternatives,
            )
            if chain.alternatives is not None:
                return torch.cat((chain.tokens[:, :, None], chain.alternatives), dim=2), None
            if chain.distributions is None:
                return chain.tokens, None
            return torch.cat(
                (chain.tokens, chain.distributions.sizes), dim=1
            ), chain.distributions.entries
        tree = self._program.draft_tree(
            rows,
            state=state,
            num_nodes=shape.num_nodes,
            top_k=shape.top_k,
            depth=shape.depth,
            warp=warp,
            coupled=general,
            drawing=drawing,
            allowed_tokens=allowed_tokens,
        )
        bits = tree.logprobs.view(torch.int32)
        return torch.stack((tree.tokens, tree.parents, bits), dim=1), None

    def set_masks(self, shape: DraftTreeShape, starts: DraftConstraintStates, size: int) -> None:
        """Set the masks of the next launch with logits processing. `starts`: constraint of each
        session at the start of its draft; `size`: batch size of the bucket."""
        levels = 1 if shape.top_k > 1 else min(shape.depth, self.masks.levels)
        self.masks.set_masks(first_level_masks(starts, levels), size)

    def read_drafts(
        self,
        shape: DraftTreeShape,
        sessions: Sequence[FollowedSession],
        lengths: NDArray[np.int64],
        words: NDArray[np.int32],
        entries: Tensor | None,
        starts: DraftConstraintStates = (),
    ) -> SessionDrafts:
        """Return the drafts of `sessions` from the first rows of the downloaded output `words`.
        Chains are cut to `lengths`, and chains of constrained sessions to what their constraints in
        `starts` allow."""
        words = words[: len(sessions)]
        if entries is not None:
            # The entries come by another download, which may reuse the memory of this one.
            drafts = make_chains_with_distributions(
                words.copy(), entries, lengths.tolist(), self._target_ids, self._downloads
            )
            return SessionDrafts.of_drafts(list(zip(sessions, drafts, strict=True)))
        if shape.top_k == 1:
            others = words[:, :, 1:] if words.ndim == 3 else None
            tokens = words if others is None else words[:, :, 0]
            tokens, lengths = truncate_chains(starts, tokens, lengths, others)
            return make_chains(sessions, lengths, tokens)
        return make_trees(sessions, words)
