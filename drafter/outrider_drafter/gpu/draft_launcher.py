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
"""Output of a draft launch: the packed drafts, and the entries of their draft distributions (None
if there are no distributions). The packed drafts are int32. Chains: [B, K] tokens. Chains with
alternative tokens (`ChainDraft`): [B, K, 1 + A] tokens, each followed by its alternatives. Chains
with distributions (`ChainDistributions`): [B, 2K] tokens, then distribution sizes. Trees: [B, 3, n]
tokens, parents and bits of the float32 log-probs."""


class DraftLauncher:
    """Launches drafts of a given shape on the GPU and converts their downloaded output."""

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
        """Allowed-token masks for launches with logits processing. They stay set until they are
        replaced."""

    def launch_draft(
        self, shape: DraftTreeShape, rows: NewRows, drawing: DraftSampling | None, *, general: bool
    ) -> LaunchOutput:
        """Launch the computation of the new rows `rows` and of the drafts that begin from them, and
        start to download the drafts. The host does not wait. `drawing`: sampling state with which
        tokens are drawn from draft distributions, or None. `general`: whether the launch supports
        logits processing, grammar masks (`masks`) and trees drawn with the target's random
        numbers."""
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
        session at the start of its draft; `size`: batch size of the launch."""
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
        """Convert the downloaded output `words` to drafts. Row i of `words` belongs to session i.
        Chains are cut to `lengths`. Chains without distributions are also cut to what the
        constraints in `starts` allow. `entries`: entries of the draft distributions on the device,
        or None."""
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
